"""The daemon's sources, built from the config."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Collection
from functools import partial

import structlog

from ingestd.app.factories import connector_bytes, connector_of, policy_of, share_bytes
from ingestd.config import UNSTREAMED, Config, SourceSettings
from ingestd.config.redaction import Redactor
from ingestd.model.errors import OperatorError
from ingestd.model.row_checks import row_limit_bytes
from ingestd.model.schema import TableId
from ingestd.observe import logs
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import DaemonStatus, SourceState, SourceStatus
from ingestd.pipeline.known_lake import KnownLake, LakeRoot
from ingestd.pipeline.maintenance import Maintainer, MaintenanceSchedule
from ingestd.pipeline.paused_source import Paused
from ingestd.pipeline.pipeline import Pipeline
from ingestd.pipeline.reference_tables import (
    FullRefresh,
    IncrementalRefresh,
    ReferenceJob,
    References,
)
from ingestd.pipeline.retry import RETRY, RetryPolicy
from ingestd.pipeline.source_runner import SourceSpec
from ingestd.pipeline.supervisor import Supervisor
from ingestd.pipeline.telemetry.maintenance import MaintenanceTelemetry
from ingestd.pipeline.telemetry.reference import ReferenceTelemetry
from ingestd.pipeline.telemetry.source import SourceTelemetry
from ingestd.ports import LakeFactory
from ingestd.postgres.connection.claim_names import claim_of, signature_of
from ingestd.postgres.connection.session import transport_of
from ingestd.postgres.connection.tls import REMEDY, weakness
from ingestd.postgres.reference_copy import CopiedReferenceSource
from ingestd.process.clock import utc_now


class SourceBuilder:
    """Builds sources, at the start and for a reload (`ingestd.app.reload.SourceFactory`).

    `once`: each ends when it is drained. `watch`: called with each source's telemetry before it
    starts.
    """

    def __init__(
        self,
        lake: LakeFactory,
        metrics: Metrics,
        status: DaemonStatus,
        redactor: Redactor,
        accepted: Collection[str] = (),
        *,
        once: bool = False,
        retry: RetryPolicy = RETRY,
        watch: Callable[[SourceTelemetry], None] | None = None,
    ) -> None:
        self.supervisor = Supervisor({}, once=once, retry=retry)
        self._watch = watch
        self._retry = retry
        self._metrics = metrics
        self._status = status
        self._redactor = redactor
        self._turn = asyncio.Semaphore(1)
        self._lake = lake  # a reload keeps [lake] and [limits]
        self._root = LakeRoot()
        self._known = {name: KnownLake(is_accepted=True) for name in accepted}

    def log(self, config: Config) -> None:
        """Configure logging from the config; secrets of earlier configs stay redacted."""
        self._redactor.learn(config.redactor)
        logs.configure(config.log, self._redactor, sys.stderr)

    def source(self, config: Config, name: str) -> None:
        """Build a source and run it. A rebuilt source keeps its status."""
        settings = config.sources[name]
        _warn_of_weak_tls(name, settings)
        known = self._status.sources.get(name)
        if known is None:
            known = self._status.sources[name] = SourceStatus(name, since=utc_now())
        known.storage = partial(self._lake.waiting, name)
        known.references.clear()
        known.claim = claim_of(settings)
        known_lake = self._known.setdefault(name, KnownLake())
        self._root.expect(name)
        built = _supervised(
            config,
            name,
            settings,
            self._metrics,
            known,
            self._turn,
            self._lake,
            known_lake,
            self._root,
            self._retry,
        )
        if self._watch is not None:
            self._watch(built.telemetry)
        self.supervisor.start_source(name, built)

    def under_way(self) -> list[str]:
        """Return what has not ended in the sources, for a log. Callable from any thread."""
        sources = list(self._status.sources.items())
        found = [
            f"source {name} is {source.state}"
            for name, source in sources
            if source.state is not SourceState.CLOSED
        ]
        waits = [self._lake.waiting(name, 0.0) for name, _ in sources]
        return found + [str(wait) for wait in waits if wait is not None]

    def drop_source(self, name: str) -> None:
        """Remove a source from the status and the metrics."""
        self._status.sources.pop(name, None)
        self._known.pop(name, None)
        self._lake.forget(name)
        self._root.drop_source(name)
        self._metrics.forget_source(name)


def _warn_of_weak_tls(name: str, settings: SourceSettings) -> None:
    """Log a warning if the DSN lets the connection skip verification of the server."""
    try:
        found = transport_of(settings.dsn.get_secret_value())
    except OperatorError:
        return  # the source reports it
    if found.is_weak:
        structlog.get_logger("ingestd").warning(
            "tls.weak",
            source=name,
            mode=found.mode,
            host=found.host,
            reason=weakness(found),
            remedy=REMEDY,
        )


def _supervised(  # noqa: PLR0917 - of one source
    config: Config,
    name: str,
    settings: SourceSettings,
    metrics: Metrics,
    source_status: SourceStatus,
    turn: asyncio.Semaphore,
    lake: LakeFactory,
    known: KnownLake,
    root: LakeRoot,
    retry: RetryPolicy,
) -> SourceSpec:
    log = structlog.get_logger("ingestd")
    telemetry = SourceTelemetry(source_status, metrics, log)
    policy = policy_of(config, settings)
    connector = connector_of(config, name, settings)

    claim = signature_of(settings)

    def make_pipeline() -> Pipeline:
        sink = lake.sink(name, claim, memory_bytes=share_bytes(config))
        return Pipeline(connector.capture(sink), sink, policy, telemetry, known=known, root=root)

    def make_paused() -> Paused:
        return Paused(connector.capture, partial(lake.sink, name), telemetry)

    return SourceSpec(
        make_pipeline,
        telemetry,
        _references(config, name, settings, source_status, metrics, telemetry, lake, retry),
        _maintainer(config, name, lake, MaintenanceTelemetry(metrics, log, telemetry), turn),
        lake.pause_mark(name),
        make_paused,
        known,
    )


def _maintainer(
    config: Config,
    name: str,
    lake: LakeFactory,
    telemetry: MaintenanceTelemetry,
    turn: asyncio.Semaphore,
) -> Maintainer:
    settings = config.maintenance
    maintenance = lake.maintenance(name, settings, config.sources[name].references())
    return Maintainer(maintenance, MaintenanceSchedule(settings.compact), telemetry, turn)


def _references(  # noqa: PLR0917 - of one source
    config: Config,
    name: str,
    settings: SourceSettings,
    status: SourceStatus,
    metrics: Metrics,
    telemetry: SourceTelemetry,
    lake: LakeFactory,
    retry: RetryPolicy,
) -> References | None:
    tables = settings.references()
    if not tables:
        return None
    kinds = {table: found.reference for table, found in tables.items()}
    limit_bytes = row_limit_bytes(connector_bytes(config))
    memory_bytes = share_bytes(config)
    log = structlog.get_logger("ingestd")
    telemetry_of_references = ReferenceTelemetry(status, metrics, log, telemetry, kinds)
    keepers: dict[TableId, ReferenceJob] = {}
    for table, found in tables.items():
        sink = lake.reference_table(name, table, memory_bytes=memory_bytes)
        if found.reference in UNSTREAMED:
            refresh_s = found.refresh_s if found.reference == "snapshot_only" else None
            copied = partial(
                CopiedReferenceSource,
                name,
                settings,
                table,
                row_limit_bytes=limit_bytes,
            )
            keepers[table] = FullRefresh(table, copied, sink, telemetry_of_references, refresh_s)
        else:
            folded = partial(lake.reference_source, name, table, memory_bytes)
            keepers[table] = IncrementalRefresh(table, folded, sink, telemetry_of_references)
    asked = frozenset(t for t, kind in kinds.items() if kind in UNSTREAMED)
    return References(keepers, telemetry_of_references, asked, retry=retry)
