"""A reconciliation: fix the source's position, wait for the mirrors, and compare each table."""

from __future__ import annotations

import argparse
import sys
import uuid
from collections.abc import Sequence

from pyspark.sql import SparkSession

from ingestd.config import Config, included
from ingestd.model.errors import ConfigError, did_you_mean_table
from ingestd.model.schema import Table, TableId
from ingestd.process.clock import utc_now
from spark_jobs.accelerator.choice import accelerator_of
from spark_jobs.cli.arguments import exit_code, print_error, spark_uri
from spark_jobs.lake.lake_state import known_tables
from spark_jobs.lake.source_lake import SourceLake
from spark_jobs.reconciling.mirror_position import await_mirror
from spark_jobs.reconciling.report import (
    ReconcileState,
    Reconciliation,
    TableResult,
    append_tables,
    exit_code_of,
    name_report,
    summary,
)
from spark_jobs.reconciling.source_point import SourcePoint
from spark_jobs.reconciling.table import Settings, TableComparison


def reconcile(session: SparkSession, config: Config, chosen: argparse.Namespace) -> int:
    """Compare in this session and return the exit code. `chosen`: as parsed by `parser`."""
    run, results = compare(session, config, chosen)
    sys.stdout.write(summary(run, results))
    code = exit_code_of(results)
    if chosen.report is not None:
        append_tables(session, spark_uri(chosen.report), run, results)
        fault = name_report(session, chosen.catalog, chosen.source, spark_uri(chosen.report))
        if fault is not None:
            print_error(fault)
            code = code or exit_code(fault)
    return code


def compare(
    session: SparkSession, config: Config, chosen: argparse.Namespace
) -> tuple[Reconciliation, list[TableResult]]:
    """Compare the requested tables, one after the other."""
    source, target = chosen.source, spark_uri(chosen.target)
    lake = SourceLake(
        session, spark_uri(config.lake.uri), source, accelerator=accelerator_of(session)
    )
    lake.require()
    settings = Settings(
        target=target,
        report=None if chosen.report is None else spark_uri(chosen.report),
        ranges=chosen.ranges,
        split_bytes=chosen.split_bytes,
        with_values=chosen.values,
        shown=chosen.show,
    )
    known = known_tables(config, source)
    with SourcePoint(source, config.sources[source], known, slot_limit_s=chosen.wait) as point:
        run = Reconciliation(uuid.uuid4().hex, utc_now(), source, point.lsn)
        tables, results = _asked_for(point, chosen.tables)
        around, row = await_mirror(lake, config, target, point.lsn, chosen.wait)
        comparison = TableComparison(
            lake, point, around=around, row=row, settings=settings, run=run
        )
        results += [comparison.compare(table) for table in tables]
    return run, sorted(results, key=lambda result: result.table)


def _asked_for(
    point: SourcePoint, patterns: Sequence[str]
) -> tuple[list[Table], list[TableResult]]:
    """Return the requested tables, and results for those not capturable. Raises ConfigError."""

    def is_chosen(table: Table) -> bool:
        return not patterns or included(patterns, table.id.schema, table.id.name)

    tables = [table for table in point.coverage.tables if is_chosen(table)]
    refused = [one for one in point.coverage.refused if is_chosen(one.table)]
    there = [*tables, *(one.table for one in refused)]
    for pattern in patterns:
        if not any(included([pattern.removeprefix("!")], t.id.schema, t.id.name) for t in there):
            captured = [t.id for t in point.coverage.tables if str(t.id) not in patterns]
            hint = did_you_mean_table(TableId.parse(pattern.removeprefix("!")), captured)
            raise ConfigError(
                f"TABLE {pattern}: matches no captured table",
                remedy=f"{hint}names are schema.table, as `ingestd tables` shows them",
            )
    results = [
        TableResult(str(one.table.id), ReconcileState.NOT_COMPARED, fault=one.error)
        for one in refused
    ]
    return tables, results
