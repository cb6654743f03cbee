"""`ingestd verify`: compares a source's tables with the lake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from ingestd.app.factories import (
    connector_bytes,
    connector_of,
    lake_of,
    load,
    require_source,
)
from ingestd.app.verify_report import VerifyReport, asked_for
from ingestd.config import Config
from ingestd.model.errors import OperatorError
from ingestd.model.row_checks import row_limit_bytes
from ingestd.model.schema import Table, TableId
from ingestd.pipeline.verify.run import PollingTolerance, Verification
from ingestd.pipeline.verify.table import VerifySettings
from ingestd.ports.verify import VerifiedSource, VerifyProgress
from ingestd.postgres.polling.intervals import QUIETEST
from ingestd.postgres.settings import PollingSettings, PostgresSettings
from ingestd.postgres.verify_source import ReadThrottle, SourceAtPoint

COVERAGE_LIMIT_S = 60.0
"""Timeout of the catalog query of a verification."""


def verify(
    config_path: Path,
    source: str,
    patterns: Sequence[str],
    *,
    wait_s: float,
    memory_bytes: int | None,
    rate_bytes_per_s: float | None,
    shown: int,
    with_values: bool,
    progress: VerifyProgress,
    source_type: type[SourceAtPoint] = SourceAtPoint,
) -> VerifyReport:
    """Compare a source's tables (those that `patterns` name, or all) with the lake, row by row.

    `source_type`: reads the source. Raises ConfigError; OperatorError or TransientError if the
    comparison could not start.
    """
    config = load(config_path)
    require_source(config, source)
    settings = config.sources[source]
    assert isinstance(settings, PostgresSettings)
    chosen = VerifySettings(
        memory_bytes or config.limits.memory,
        settings.snapshot_workers,
        wait_s,
        shown,
        with_values,
    )
    return asyncio.run(
        _verify(
            config,
            source,
            settings,
            patterns,
            chosen,
            ReadThrottle(rate_bytes_per_s),
            progress,
            source_type,
        )
    )


async def _verify(  # noqa: PLR0917 - of one source
    config: Config,
    name: str,
    settings: PostgresSettings,
    patterns: Sequence[str],
    chosen: VerifySettings,
    pace: ReadThrottle,
    progress: VerifyProgress,
    source_type: type[SourceAtPoint],
) -> VerifyReport:

    where = f"source {name}"
    if (since := await lake_of(config).pause_mark(name).since()) is not None:
        raise OperatorError(
            f"{where} has been paused since {since:%Y-%m-%d %H:%M:%S} UTC: the lake lags behind it",
            remedy=f"ingestd resume {name}, then verify",
        )
    connector = connector_of(config, name, settings)

    @asynccontextmanager
    async def open_point(tables: Sequence[Table]) -> AsyncIterator[VerifiedSource]:
        limit_bytes = row_limit_bytes(connector_bytes(config))
        point = await source_type.open(where, settings, tables, pace, row_limit_bytes=limit_bytes)
        try:
            yield point
        finally:
            await point.close()

    async with AsyncExitStack() as stack:
        stack.push_async_callback(connector.close)
        lake = lake_of(config).verified(name)
        stack.push_async_callback(lake.close)
        # Privileges that capture lacks (`coverage.faults`) don't prevent reading the tables.
        coverage = await connector.coverage(await lake.known(), COVERAGE_LIMIT_S)
        tables, outcomes = asked_for(coverage, settings, patterns)
        polling = {
            t.id: _tolerance_of(t.id, settings)
            for t in tables
            if isinstance(settings, PollingSettings)
        }
        verification = Verification(where, open_point, lake, chosen, progress, polling=polling)
        outcomes += await verification.run(tables)
    lsn = None if verification.point is None else verification.point.lsn
    return VerifyReport(name, lsn, sorted(outcomes, key=lambda o: o.table))


def _tolerance_of(table: TableId, settings: PollingSettings) -> PollingTolerance:
    controls = settings.controls(table)
    interval_s = settings.interval if controls.interval is None else controls.interval
    return PollingTolerance(interval_s * QUIETEST, controls.detect_deletes)
