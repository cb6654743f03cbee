"""Views of tables at a past time or position, read from their histories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException
from pyspark.sql import functions as f

from ingestd.model.errors import OperatorError
from ingestd.model.lsn import Lsn
from spark_jobs.accelerator.choice import accelerator_of
from spark_jobs.cli.arguments import spark_uri
from spark_jobs.engine.cuts import find_cut
from spark_jobs.histories.shape import ADDED, UNCHANGED
from spark_jobs.histories.table import prefix_of
from spark_jobs.lake.targets import HISTORIES, table_path

if TYPE_CHECKING:
    from datetime import datetime

    from pyspark.sql import DataFrame, SparkSession

_MAX_LONG = (1 << 63) - 1


def as_of_lsn(spark: SparkSession, target: str, table: str, lsn: int | str) -> DataFrame:
    """Return a table's rows as they were just after the transaction that committed at `lsn`.

    `lsn`: an integer or Postgres' text (``16/B374D848``). Columns: the source's, `_cdc_raw`. The
    same LSN makes several tables consistent. Raises OperatorError if there is no history, or for a
    text that is not an LSN.
    """
    position = min(_position(lsn), _MAX_LONG)
    history = _history(spark, target, table)
    prefix = prefix_of(history.columns)
    begin, ends = f.col(f"{prefix}valid_from_lsn"), f.col(f"{prefix}valid_to_lsn")
    there = history.where((begin <= position) & (ends.isNull() | (ends > position)))
    return there.drop(*(prefix + name for name in ADDED), UNCHANGED)


def as_of(spark: SparkSession, target: str, table: str, at: datetime) -> DataFrame:
    """Return a table's rows as they were at a time of the source's clock, inclusive. Spark job.

    That is just after the last transaction, in log order, in this table's history whose commit
    time is at or before `at`. Raises OperatorError, also for a time without a zone.
    """
    return as_of_lsn(spark, target, table, lsn_at(spark, target, at, [table]))


def lsn_at(
    spark: SparkSession, target: str, at: datetime, tables: Sequence[str] | None = None
) -> int:
    """Return the LSN of the last transaction of these tables that committed at or before a time.

    `tables`: None for all tables of the newest cut. Returns 0 without such a transaction. With the
    LSN, `as_of_lsn` returns several tables at a consistent point. One Spark job for all of them.
    """
    if at.tzinfo is None:
        raise OperatorError(
            "the time has no zone", remedy="datetime(2026, 11, 21, 12, tzinfo=timezone.utc)"
        )
    if tables is None:
        found = find_cut(spark, f"{spark_uri(target)}/{HISTORIES}", accelerator_of(spark))
        tables = sorted(found.tables) if found is not None else []
    limit = f.lit(at)
    each = None
    for table in tables:
        history = _history(spark, target, table)
        prefix = prefix_of(history.columns)
        for name in ("valid_from", "valid_to"):
            lsns = history.where(f.col(prefix + name) <= limit).agg(
                f.max(f"{prefix}{name}_lsn").alias("lsn")
            )
            each = lsns if each is None else each.union(lsns)
    newest = None if each is None else each.agg(f.max("lsn")).first()
    return 0 if newest is None or newest[0] is None else int(newest[0])


def _position(lsn: int | str) -> int:
    try:
        return int(Lsn.parse(lsn) if isinstance(lsn, str) else lsn)
    except ValueError as error:
        raise OperatorError(str(error), remedy="write it as Postgres does: 16/B374D848") from error


def _history(spark: SparkSession, target: str, table: str) -> DataFrame:
    path = table_path(spark_uri(target), table)
    reason: AnalysisException | None = None
    try:
        history = accelerator_of(spark).tables.rows(spark, path)
        columns = history.columns  # (Connect resolves the table only now)
        if {f"{prefix_of(columns)}{name}" for name in ADDED}.issubset(columns):
            return history
    except AnalysisException as error:
        reason = error
    raise OperatorError(
        f"no history of {table} exists at {path}",
        remedy="check the target and the table's name; `python -m spark_jobs.history` creates it",
    ) from reason
