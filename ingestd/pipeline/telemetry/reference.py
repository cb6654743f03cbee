"""Reports a source's reference tables to metrics, status and log in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from structlog.typing import FilteringBoundLogger

from ingestd.config import UNSTREAMED
from ingestd.model.errors import IngestdError, OperatorError, TableError, TransientError
from ingestd.model.lake_state import TableState
from ingestd.model.schema import TableId
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import (
    ReferenceStatus,
    SnapshotOutcome,
    SourceStatus,
    TableStatus,
)
from ingestd.pipeline.telemetry.source import SourceTelemetry
from ingestd.ports import ReferenceState
from ingestd.process.clock import utc_now


class ReferenceTelemetry:
    """Keeps the status of reference tables; `kinds`: the config's `reference` of each.

    A table that is not streamed is shown among the source's tables too, in the state of its rows.
    Synchronous, called from the event loop.
    """

    def __init__(
        self,
        status: SourceStatus,
        metrics: Metrics,
        log: FilteringBoundLogger,
        telemetry: SourceTelemetry,
        kinds: Mapping[TableId, str],
        *,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.telemetry = telemetry
        self._status = status
        self._metrics = metrics
        self._log = log.bind(source=status.source)
        self._now = now
        self._unstreamed = {str(t) for t, kind in kinds.items() if kind in UNSTREAMED}
        telemetry.kept = frozenset(self._unstreamed)
        for table, kind in kinds.items():
            name = str(table)
            state = TableState.SNAPSHOTTING
            status.references[name] = ReferenceStatus(name, kind, state, now())
            self._show(name, state)

    @property
    def is_running(self) -> bool:
        """True if the source is claimed, and delivers or is about to (I5)."""
        return self.telemetry.not_running() is None

    def state_of(self, table: TableId) -> object:
        """Return a value that changes when the source's own table enters another state."""
        found = self._status.tables.get(str(table))
        return None if found is None else (found.state, found.since)

    def requested(self, tables: Sequence[TableId]) -> None:
        """Record that a snapshot of these tables was requested."""
        for table in tables:
            self._status.tables[str(table)].snapshot_requested = True
        self._log.info("snapshot.requested", tables=[str(t) for t in tables], partial=False)

    def reading(self, table: TableId, ratio: float, nbytes: int, *, is_requested: bool) -> None:
        """Record how much of a table is read, 0 to 1; `nbytes`: since the last call.

        `is_requested`: another read was requested after this one.
        """
        shown = self._shown(table)
        if shown is not None:
            progress = shown.read(ratio, nbytes, self._now())
            shown.snapshot_requested = is_requested
            name = str(table)
            self._metrics.snapshot_progress(
                self._status.source, name, progress.ratio, progress.eta_s
            )

    def opened(self, table: TableId, state: ReferenceState | None) -> None:
        """Record what the lake has; a stopped table stays stopped until a step succeeds."""
        if state is None:
            return
        reference = self._status.references[str(table)]
        if reference.state is TableState.STOPPED:
            reference.version, reference.rows = state.version, state.rows
            reference.epoch = state.position
        else:
            self._record_state(table, state)

    def succeeded(self, table: TableId, state: ReferenceState | None) -> None:
        """Record that nothing is due: the lake is up to date."""
        reference = self._status.references[str(table)]
        if state is not None and reference.reason is not None:
            self._record_state(table, state)

    def current(
        self, table: TableId, state: ReferenceState, seconds: float, *, is_requested: bool = False
    ) -> None:
        """Record that the lake has a table's rows; a new version of them if `state.is_new`.

        `is_requested`: another read was requested after this one.
        """
        self._record_state(table, state)
        self._status.references[str(table)].looked = self._now()
        if state.is_new:
            self._log.info(
                "reference.committed",
                table=str(table),
                version=state.version,
                rows=state.rows,
                epoch=state.position,
                seconds=round(seconds, 3),
            )
        shown = self._shown(table)
        if shown is not None:
            shown.end_snapshot(SnapshotOutcome.DONE, self._now())
            shown.snapshot_requested = is_requested
            self._metrics.no_snapshot(self._status.source, str(table))
            if state.is_new:
                shown.last_change = self._now()

    def failed(self, table: TableId, error: IngestdError, delay_s: float) -> None:
        """Record why a table's rows could not be read or written, and when that is retried.

        A transient fault does not change the table's state.
        """
        name = str(table)
        reference = self._status.references[name]
        why = error.reason if isinstance(error, TableError) else error.what
        is_news = reference.reason != why
        reference.reason, reference.remedy = why, error.remedy
        if isinstance(error, TransientError):
            if is_news:
                self._log.warning(
                    "reference.retried", table=name, reason=why, retry_s=round(delay_s, 1)
                )
            return
        fault = OperatorError(why, remedy=error.remedy)
        shown = self._shown(table)
        if shown is not None and (shown.snapshot_requested or shown.snapshot is not None):
            shown.end_snapshot(SnapshotOutcome.FAILED, self._now(), fault)
            self._metrics.no_snapshot(self._status.source, name)
        self._enter(reference, TableState.STOPPED)
        self._show(name, TableState.STOPPED, fault)
        if is_news:
            self._log.error("reference.stopped", table=name, reason=why, remedy=error.remedy)

    def unknown(self, error: BaseException) -> IngestdError:
        """Log where an unforeseen error arose, and return it with its place."""
        return self.telemetry.unknown(error)

    def _record_state(self, table: TableId, state: ReferenceState) -> None:
        name = str(table)
        reference = self._status.references[name]
        reference.version, reference.rows = state.version, state.rows
        reference.epoch = state.position
        reference.reason = reference.remedy = None
        self._enter(reference, TableState.LIVE)
        self._show(name, TableState.LIVE)

    def _enter(self, reference: ReferenceStatus, state: TableState) -> None:
        if reference.state is not state:
            reference.state, reference.since = state, self._now()

    def _shown(self, table: TableId) -> TableStatus | None:
        return self._status.tables.get(str(table)) if str(table) in self._unstreamed else None

    def _show(self, name: str, state: TableState, error: IngestdError | None = None) -> None:
        if name in self._unstreamed:
            self._status.table(name, state, self._now(), error)
            self._metrics.table_state(self._status.source, name, state)
