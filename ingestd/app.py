"""The composition root: builds everything from a config, and runs it.

What only single commands need is imported in them: the daemon starts sooner.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from ingestd import __version__, failpoints
from ingestd.capture.reference import CopiedReferenceSource, check_references
from ingestd.capture.registry import FACTORIES
from ingestd.capture.session import transport_of
from ingestd.capture.settings import SETTINGS, PollingSettings, PostgresSettings
from ingestd.capture.tls import REMEDY, weakness
from ingestd.checks import CheckLine
from ingestd.config import UNSTREAMED, Config, SourceSettings, load_config
from ingestd.errors import ConfigError, IngestdError, OperatorError
from ingestd.observe import logs
from ingestd.observe.http import HttpServer
from ingestd.observe.metrics import Metrics
from ingestd.observe.notify import telling_service_manager
from ingestd.observe.protection import check_http, openness, protection_of
from ingestd.observe.status import (
    DaemonStatus,
    ReferenceStatus,
    SourceState,
    SourceStatus,
    paused,
    ready,
    to_json,
)
from ingestd.ports import Connector, PauseMark, ReferenceTableSource
from ingestd.recorded import TableState
from ingestd.reloading import Reloading, share_bytes
from ingestd.row_limit import READING_PART
from ingestd.run.epoch import EpochPolicy
from ingestd.run.maintenance import CLEAN_INTERVAL_S, Maintainer, MaintenanceSchedule
from ingestd.run.maintenance_watch import MaintenanceWatch
from ingestd.run.one_source import Supervised
from ingestd.run.paused import Paused
from ingestd.run.pipeline import Pipeline, PipelinePolicy
from ingestd.run.reference_watch import ReferenceWatch
from ingestd.run.references import Followed, Keeper, References, Reread
from ingestd.run.supervisor import Supervisor
from ingestd.run.watch import Watch
from ingestd.schema import Table, TableId
from ingestd.sink.lake import DeltaLake
from ingestd.sink.maintenance import MaintenancePolicy
from ingestd.sink.maintenance_process import MaintenanceProcess
from ingestd.sink.pause_mark import LakePauseMark
from ingestd.sink.reference_source import RawReferenceSource
from ingestd.sink.reference_table import DeltaReferenceTable

if TYPE_CHECKING:
    from ingestd.capture.verified_source import Pace
    from ingestd.redaction import Redactor
    from ingestd.run.table_verification import VerifySettings
    from ingestd.table_report import SourceReport
    from ingestd.verification import Progress, VerifiedSource
    from ingestd.verify_report import VerifyReport

EXIT_WITHIN_S = 9.5
"""A stop that takes longer ends the process: what is not committed is read again at the start."""


def run(config_path: Path) -> int:
    """Run the daemon until SIGTERM or SIGINT. Raises ConfigError, OperatorError."""
    # It is to be read anew by SIGHUP, not ended by it, also before the loop's own handler is there.
    signal.signal(signal.SIGHUP, lambda *_: None)
    config = _load(config_path)
    logs.configure(config.log, config.redactor, sys.stderr)
    logs.take_what_is_uncaught()
    _arm_failpoints()
    asyncio.run(_run(config, partial(_load, config_path)))
    return 0


def _arm_failpoints() -> None:
    log = structlog.get_logger("ingestd")

    def tell(point: str, action: str, time: int) -> None:
        log.warning("failpoint.reached", point=point, action=action, time=time)

    if failpoints.arm(text := os.environ.get(failpoints.VARIABLE, ""), tell):
        log.warning("failpoints.on", entries=text, remedy=f"unset {failpoints.VARIABLE}")


async def _run(config: Config, load: Callable[[], Config]) -> None:
    log = structlog.get_logger("ingestd")
    asyncio.get_running_loop().set_exception_handler(logs.tell_of_loop)
    stop, hangups = asyncio.Event(), asyncio.Event()
    _react_to_signals(stop, hangups)
    metrics = Metrics()
    status = DaemonStatus(__version__, datetime.now(UTC))
    building = _Building(metrics, status, config.redactor)
    supervisor = building.supervisor
    for name in config.sources:
        building.source(config, name)
    async with AsyncExitStack() as stack:
        if config.http.listen is not None:
            protection = protection_of(config.http)
            server = HttpServer(
                config.http.listen,
                metrics,
                status,
                config.redactor,
                supervisor,
                pausing=supervisor,
                protection=protection,
            )
            await stack.enter_async_context(server)
            log.info("http.listening", address=str(server.address))
            if why := openness(config.http.listen, protection):
                log.warning("http.open", address=str(server.address), reason=why)
        log.info("daemon.started", version=__version__, sources=len(config.sources))
        telling = telling_service_manager(
            partial(ready, status), config.redactor, stop, paused=partial(paused, status)
        )
        told = await stack.enter_async_context(telling)
        reloading = Reloading(config, load, building, supervisor, told.began, told.ended)
        task = asyncio.create_task(reloading.run(hangups), name="reloading")
        stack.callback(task.cancel)
        await supervisor.run(stop)
    log.info("daemon.stopped")


class _Building:
    """Builds sources, those at the start and those of a reload (reloading.Begin)."""

    def __init__(self, metrics: Metrics, status: DaemonStatus, redactor: Redactor) -> None:
        self.supervisor = Supervisor({})
        self._metrics = metrics
        self._status = status
        self._redactor = redactor
        self._turn = asyncio.Semaphore(1)

    def log(self, config: Config) -> None:
        """Have the log as the config says; what was a secret stays one."""
        self._redactor.learn(config.redactor)
        logs.configure(config.log, self._redactor, sys.stderr)

    def source(self, config: Config, name: str) -> None:
        """Build a source and run it. What is shown of it goes on, if it is there already."""
        settings = config.sources[name]
        _warn_of_weak_tls(name, settings)
        known = self._status.sources.get(name)
        if known is None:
            known = self._status.sources[name] = SourceStatus(name, since=datetime.now(UTC))
        known.references.clear()
        built = _supervised(config, name, settings, self._metrics, known, self._turn)
        self.supervisor.begin(name, built)

    def forget(self, name: str) -> None:
        """Show nothing of a source any more."""
        self._status.sources.pop(name, None)
        self._metrics.forget_source(name)


def _warn_of_weak_tls(name: str, settings: SourceSettings) -> None:
    """Say if the source's server could be anyone, because its DSN says so."""
    try:
        found = transport_of(settings.dsn.get_secret_value())
    except OperatorError:
        return  # the source itself says so
    if found.is_weak:
        structlog.get_logger("ingestd").warning(
            "tls.weak",
            source=name,
            mode=found.mode,
            host=found.host,
            reason=weakness(found),
            remedy=REMEDY,
        )


def _react_to_signals(stop: asyncio.Event, hangups: asyncio.Event) -> None:
    """SIGTERM, SIGINT: stop within the limit, exit code 0; a second one: end at once.

    SIGHUP: read the config anew. But if the terminal is gone that the daemon was started on, it
    says that, and is as SIGTERM: nobody left it running on purpose.
    """
    loop = asyncio.get_running_loop()
    had_terminal = os.isatty(2)

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()
        limit = threading.Timer(EXIT_WITHIN_S, os._exit, (0,))
        limit.daemon = True
        limit.start()

    def on_hangup() -> None:
        if not had_terminal or os.isatty(2):
            hangups.set()
        elif not stop.is_set():
            on_signal()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, on_hangup)


def _supervised(  # noqa: PLR0917 - of one source
    config: Config,
    name: str,
    settings: SourceSettings,
    metrics: Metrics,
    source_status: SourceStatus,
    turn: asyncio.Semaphore,
) -> Supervised:
    log = structlog.get_logger("ingestd")
    watch = Watch(source_status, metrics, log)
    policy = PipelinePolicy(
        epoch=EpochPolicy(config.epoch.max_delay, config.epoch.max_bytes),
        snapshot=getattr(settings, "snapshot", "initial") == "initial",
        resnapshot_when_lost=getattr(settings, "slot_lost", "resnapshot") == "resnapshot",
        resnapshot_rewritten=getattr(settings, "on_rewrite", "resnapshot") == "resnapshot",
    )

    connector = _connector(config, name, settings)
    writer = uuid.uuid4().hex

    def make_pipeline() -> Pipeline:
        lake = _lake(config, name, writer)
        return Pipeline(connector.capture(lake), lake, policy, watch)

    def make_paused() -> Paused:
        return Paused(connector.capture, lambda: _lake(config, name, is_claimed=False), watch)

    return Supervised(
        make_pipeline,
        watch,
        _references(config, name, settings, source_status, metrics, watch),
        _maintainer(config, name, MaintenanceWatch(metrics, log, watch), turn),
        _pause_mark(config, name),
        make_paused,
    )


def _pause_mark(config: Config, name: str) -> PauseMark:
    return LakePauseMark(config.lake.uri, name, storage_options=_storage_options(config))


def pause_mark(config_path: Path, source: str) -> PauseMark:
    """Give what keeps in the lake that a source is paused. Raises ConfigError."""
    config = _load(config_path)
    _require_source(config, source)
    return _pause_mark(config, source)


def _require_source(config: Config, source: str) -> None:
    if source not in config.sources:
        there = ", ".join(sorted(config.sources))
        raise ConfigError(f"sources.{source}: no such source; there is {there}")


def _maintainer(
    config: Config, name: str, watch: MaintenanceWatch, turn: asyncio.Semaphore
) -> Maintainer | None:
    settings = config.maintenance
    if settings.compact is None and settings.retention is None:
        return None
    policy = MaintenancePolicy(settings.target_bytes, settings.retention)
    lake = MaintenanceProcess(
        config.lake.uri, name, policy, storage_options=_storage_options(config)
    )
    cleans = None if settings.retention is None else CLEAN_INTERVAL_S
    return Maintainer(lake, MaintenanceSchedule(settings.compact, cleans), watch, turn)


def _references(  # noqa: PLR0917 - of one source
    config: Config,
    name: str,
    settings: SourceSettings,
    status: SourceStatus,
    metrics: Metrics,
    watch: Watch,
) -> References | None:
    tables = settings.references()
    if not tables:
        return None
    kinds = {table: found.reference for table, found in tables.items()}
    log = structlog.get_logger("ingestd")
    told = ReferenceWatch(status, metrics, log, watch, kinds)
    keepers: dict[TableId, Keeper] = {}
    for table, found in tables.items():
        sink = _reference_table(config, name, table)
        if found.reference in UNSTREAMED:
            refresh_s = found.refresh_s if found.reference == "snapshot_only" else None
            copied = partial(CopiedReferenceSource, name, settings, table)
            keepers[table] = Reread(table, copied, sink, told, refresh_s)
        else:
            folded = partial(_raw_source, config, name, table)
            keepers[table] = Followed(table, folded, sink, told)
    asked = frozenset(t for t, kind in kinds.items() if kind in UNSTREAMED)
    return References(keepers, told, asked)


def _reference_table(
    config: Config, source: str, table: TableId, *, is_claimed: bool = True
) -> DeltaReferenceTable:
    return DeltaReferenceTable(
        config.lake.uri,
        source,
        table,
        storage_options=_storage_options(config),
        buffer_bytes=share_bytes(config) // 8,
        is_claimed=is_claimed,
    )


def _raw_source(
    config: Config, source: str, table: TableId, position: int | None
) -> ReferenceTableSource:
    made = RawReferenceSource(
        config.lake.uri,
        source,
        table,
        storage_options=_storage_options(config),
        memory_bytes=share_bytes(config) // 16,  # a fold takes several times that
    )
    if position is not None:
        made.resume(position)
    return made


def _connector(config: Config, name: str, settings: SourceSettings) -> Connector:
    factory = FACTORIES[settings.kind]
    return factory.create(name, settings, memory_bytes=share_bytes(config) // READING_PART)


def _lake(config: Config, source: str, writer: str = "", *, is_claimed: bool = True) -> DeltaLake:
    return DeltaLake(
        config.lake.uri,
        source,
        storage_options=_storage_options(config),
        buffer_bytes=share_bytes(config) // 6,  # and half as much for open files' footers
        writer=writer,
        is_claimed=is_claimed,
    )


def _storage_options(config: Config) -> Mapping[str, str] | None:
    options = {k: v.get_secret_value() for k, v in config.lake.storage_options.items()}
    return options or None


def check(config_path: Path) -> list[CheckLine]:
    """Look for everything that would make a run fail. Raises ConfigError."""
    from ingestd.sink.probe import probe  # noqa: PLC0415

    config = _load(config_path)
    lines = [probe(config.lake.uri, _storage_options(config)), check_http(config.http)]
    return [*filter(None, lines), *asyncio.run(_check_sources(config))]


async def _check_sources(config: Config) -> list[CheckLine]:
    connectors = [_connector(config, n, s) for n, s in config.sources.items()]
    try:
        found = await asyncio.gather(
            *(c.check() for c in connectors),
            *(check_references(n, s) for n, s in config.sources.items()),
        )
    finally:
        for connector in connectors:
            await connector.close()
    return [line for lines in found for line in lines]


def status(config_path: Path) -> dict[str, Any]:
    """Tell what slot and lake know while no daemon runs: the same shape as /status."""
    return asyncio.run(_status(_load(config_path)))


async def _status(config: Config) -> dict[str, Any]:
    now = datetime.now(UTC)
    daemon = DaemonStatus(__version__, now)
    for name, settings in config.sources.items():
        daemon.sources[name] = await _offline(config, name, settings, now)
    tree = config.redactor.tree(to_json(daemon))
    assert isinstance(tree, dict)
    return tree | {"started_at": None}


async def _offline(
    config: Config, name: str, settings: SourceSettings, now: datetime
) -> SourceStatus:
    found = SourceStatus(name, since=now, state=SourceState.CLOSED)
    capture = _connector(config, name, settings).capture()
    lake = _lake(config, name, is_claimed=False)
    try:
        if (since := await _pause_mark(config, name).since()) is not None:
            found.pause(since)
        committed = await lake.open()
        found.resumed(epoch=committed.epoch, end_lsn=committed.position)
        for table in committed.tables.values():
            why = None if table.reason is None else OperatorError(table.reason)
            found.table(str(table.table), table.state, now, why, snapshot_lsn=table.snapshot_lsn)
        lag = await capture.lag()
        found.measured(lag, None)
        if lag.confirmed_lsn is not None:
            found.confirmed(lag.confirmed_lsn)
        await _offline_references(config, name, settings, found)
    except IngestdError as error:
        if found.state is SourceState.PAUSED:
            found.reason, found.remedy = error.what, error.remedy
        else:
            found.enter(SourceState.CLOSED, now, error)
    finally:
        await lake.close()
        await capture.close()
    return found


async def _offline_references(
    config: Config, name: str, settings: SourceSettings, found: SourceStatus
) -> None:
    for table, controls in settings.references().items():
        state = await _reference_table(config, name, table, is_claimed=False).open()
        if state is None:
            continue
        told, kind = str(table), controls.reference
        reference = ReferenceStatus(told, kind, TableState.LIVE, found.since)
        reference.version, reference.rows = state.version, state.rows
        reference.epoch = state.position
        found.references[told] = reference
        if kind in UNSTREAMED:
            found.table(told, TableState.LIVE, found.since)


def tables(
    config_path: Path,
    sources: Sequence[str],
    *,
    schema: str | None,
    timeout_s: float,
    running: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], list[IngestdError]]:
    """Tell what there is in these sources, or all, what is captured, and what can't be told.

    See `report_to_json`. `running`: what the daemon says of itself, if it runs. Raises ConfigError
    for an unknown source or schema.
    """
    from ingestd.table_report import report_to_json, require_schema  # noqa: PLC0415

    config = _load(config_path)
    for name in sources:
        _require_source(config, name)
    names = sources or list(config.sources)
    reports = asyncio.run(_tables(config, names, schema, timeout_s, running))
    if schema is not None:
        require_schema(reports, schema)
    tree = config.redactor.tree(report_to_json(reports))
    assert isinstance(tree, dict)
    return tree, [fault for report in reports.values() for fault in report.faults]


async def _tables(
    config: Config,
    sources: Sequence[str],
    schema: str | None,
    timeout_s: float,
    running: Mapping[str, Any] | None,
) -> dict[str, SourceReport]:
    from ingestd.table_report import report_tables  # noqa: PLC0415

    async def report(name: str) -> SourceReport:
        settings = config.sources[name]
        connector, lake = _connector(config, name, settings), _lake(config, name, is_claimed=False)
        told = None
        if running is not None:
            told = {t["table"]: t for t in running["sources"][name]["tables"]}
        try:
            return await report_tables(
                name, connector, lake, settings, schema=schema, told=told, timeout_s=timeout_s
            )
        finally:
            await lake.close()
            await connector.close()

    found = await asyncio.gather(*(report(name) for name in sources))
    return dict(zip(sources, found, strict=True))


LOOK_LIMIT_S = 60.0
"""How long a look at the catalog for a verification may take."""


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
    progress: Progress,
) -> VerifyReport:
    """Compare a source's tables (those that `patterns` name, or all) with the lake, row by row.

    Raises ConfigError; OperatorError, TransientError if nothing was begun.
    """
    from ingestd.capture.verified_source import Pace  # noqa: PLC0415
    from ingestd.run.table_verification import VerifySettings  # noqa: PLC0415

    config = _load(config_path)
    _require_source(config, source)
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
        _verify(config, source, settings, patterns, chosen, Pace(rate_bytes_per_s), progress)
    )


async def _verify(  # noqa: PLR0917 - of one source
    config: Config,
    name: str,
    settings: PostgresSettings,
    patterns: Sequence[str],
    chosen: VerifySettings,
    pace: Pace,
    progress: Progress,
) -> VerifyReport:
    from ingestd.capture.verified_source import SourceAtPoint  # noqa: PLC0415
    from ingestd.run.verifying import Verification  # noqa: PLC0415
    from ingestd.sink.verified_lake import DeltaVerifiedLake  # noqa: PLC0415
    from ingestd.verify_report import VerifyReport, asked_for  # noqa: PLC0415

    where = f"source {name}"
    if (since := await _pause_mark(config, name).since()) is not None:
        raise OperatorError(
            f"{where} is paused since {since:%Y-%m-%d %H:%M:%S} UTC: the lake stays behind it",
            remedy=f"ingestd resume {name}, then verify",
        )
    connector = _connector(config, name, settings)
    options = _storage_options(config)

    @asynccontextmanager
    async def open_point(tables: Sequence[Table]) -> AsyncIterator[VerifiedSource]:
        point = await SourceAtPoint.open(where, settings, tables, pace)
        try:
            yield point
        finally:
            await point.close()

    async with AsyncExitStack() as stack:
        stack.push_async_callback(connector.close)
        lake = DeltaVerifiedLake(config.lake.uri, name, storage_options=options)
        stack.push_async_callback(lake.close)
        # A right that capture lacks (`coverage.faults`) does not keep tables from being read.
        coverage = await connector.coverage(await lake.known(), LOOK_LIMIT_S)
        tables, outcomes = asked_for(coverage, settings, patterns)
        sweeps_s = {
            t.id: settings.controls(t.id).detect_deletes
            for t in tables
            if isinstance(settings, PollingSettings)
        }
        verification = Verification(where, open_point, lake, chosen, progress, sweeps_s=sweeps_s)
        outcomes += await verification.run(tables)
    lsn = None if verification.point is None else verification.point.lsn
    return VerifyReport(name, lsn, sorted(outcomes, key=lambda o: o.table))


def _load(path: Path) -> Config:
    return load_config(path, SETTINGS, os.environ)
