"""Reports a source's tables to metrics, status and log in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from structlog.typing import FilteringBoundLogger

from ingestd.model.errors import IngestdError, OperatorError, TableError, resnapshot_command
from ingestd.model.lake_state import RegisteredTable, TableEvent, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from ingestd.observe.metrics import Metrics
from ingestd.observe.recent_events import note_error
from ingestd.observe.status import SnapshotOutcome, SourceStatus
from ingestd.ports import Discovery
from ingestd.process.clock import utc_now


class TableTelemetry:
    """Keeps the status and metrics of one source's tables. Synchronous, called from the event loop.

    `kept`: tables that are not streamed and are reported elsewhere. `listeners`: called when the
    source's state, a table's, or the durable position has changed.
    """

    def __init__(
        self,
        status: SourceStatus,
        metrics: Metrics,
        log: FilteringBoundLogger,
        *,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.source = status.source
        self.status = status
        self._metrics = metrics
        self._log = log.bind(source=status.source)
        self._now = now
        self._refused: frozenset[str] = frozenset()
        self._partial: set[str] = set()
        self.kept: frozenset[str] = frozenset()
        self.listeners: list[Callable[[], None]] = []

    def offered(self, discovery: Discovery) -> None:
        """Record the tables that exist, and stop showing others. A table may be dropped later."""
        offered = {str(t.id) for t in discovery.tables}
        self._refused = frozenset(str(r.table.id) for r in discovery.refused)
        for notice in self.status.attend(discovery.notices):
            self._log.warning(notice.event, reason=notice.what, remedy=notice.remedy)
            note_error(self.status.last_errors, self._now(), notice.what, notice.remedy)
        others = set(self.status.tables) - offered - self._refused - self.kept
        for name in others:
            del self.status.tables[name]
        self._metrics.forget_tables(self.source, others)

    def _forget_dropped(self) -> None:
        """Remove tables that were dropped long ago from the metrics."""
        self._metrics.forget_tables(self.source, set(self.status.forget_dropped(self._now())))

    def _registered(
        self, known: RegisteredTable, state: TableState, error: IngestdError | None = None
    ) -> None:
        """Record a state from `_tables`; a drop dates from when it was detected."""
        since = known.at if state is known.state is TableState.DROPPED else None
        self._table(str(known.table), state, error, since=since, snapshot_lsn=known.snapshot_lsn)

    def _forget_requests(self) -> None:
        """Log the snapshot requests that were lost with their pipeline.

        The next pipeline continues the reads that had begun, except partial ones.
        """
        tables = [t for t in self.status.tables.values() if t.table not in self.kept]
        for table in tables:
            table.snapshot = None
        forgotten = [t for t in tables if t.snapshot_requested or t.table in self._partial]
        for table in forgotten:
            self._end_snapshot(table.table, SnapshotOutcome.LOST)
        if forgotten:
            names = [t.table for t in forgotten]
            self._log.warning(
                "snapshot.request_lost",
                tables=names,
                reason="the source restarted in the meantime",
                remedy=resnapshot_command(self.source, *names),
            )

    def tables_changed(self, events: Sequence[TableEvent]) -> None:
        """Record new rows of `_tables`."""
        for event in events:
            name = str(event.table.id)
            if event.state is TableState.STOPPED:
                remedy = self._remedy(name, event.remedy)
                self._log.error("table.stopped", table=name, reason=event.reason, remedy=remedy)
            else:
                remedy = event.remedy
                why = {"reason": event.reason} if event.reason else {}
                known = self.status.tables.get(name)
                is_news = known is None or known.state is not event.state
                if event.state is TableState.SNAPSHOTTING:  # recorded at each step
                    is_news |= known is not None and known.reason != event.reason
                else:
                    is_news |= bool(event.reason)
                if is_news:
                    self._log.info("table.state", table=name, state=str(event.state), **why)
            error = OperatorError(event.reason, remedy=remedy) if event.reason else None
            self._table(name, event.state, error, snapshot_lsn=event.snapshot_lsn)
        self._publish()

    def _remedy(self, name: str, remedy: str | None) -> str | None:
        """Return how to restart a stopped table; a refused one restarts once it can be captured."""
        if name in self._refused:
            return remedy
        again = resnapshot_command(self.source, name)
        if remedy is None:
            return again
        return remedy if remedy.endswith(again) else f"{remedy}\n  then: {again}"

    def _table(
        self,
        name: str,
        state: TableState,
        error: IngestdError | None = None,
        *,
        since: datetime | None = None,
        snapshot_lsn: Lsn | None = None,
    ) -> None:
        self.status.table(name, state, since or self._now(), error, snapshot_lsn=snapshot_lsn)
        self._metrics.table_state(self.source, name, state)
        if self.status.tables[name].snapshot is None:
            self._metrics.no_snapshot(self.source, name)
        if state is not TableState.LIVE:
            self._partial.discard(name)

    def snapshot_requested(self, tables: Sequence[TableId], *, partial: bool = False) -> None:
        """Record that a snapshot of these tables, or of some of their rows, was requested."""
        for table in tables:
            status = self.status.tables.get(str(table))
            if status is not None:  # else it is new, and about to be read
                status.snapshot_requested = True
                if partial:
                    self._partial.add(str(table))
        self._log.info("snapshot.requested", tables=[str(t) for t in tables], partial=partial)

    def snapshot_progress(self, table: TableId, ratio: float, *, nbytes: int = 0) -> None:
        """Record how much of a table's snapshot is read, 0 to 1; cleared once live or stopped.

        `nbytes`: bytes that the source has sent since the last call. A partial snapshot, whose
        table stays live, begins with the first call and ends with `snapshot_ended` or
        `snapshot_failed`.
        """
        name = str(table)
        status = self.status.tables.get(name)
        if status is None:
            return
        if status.state is TableState.SNAPSHOTTING or name in self._partial:
            progress = status.read(ratio, nbytes, self._now())
            self._metrics.snapshot_progress(self.source, name, progress.ratio, progress.eta_s)

    def snapshot_ended(self, table: TableId) -> None:
        """Record that all rows of a partial snapshot are durable."""
        if str(table) in self._partial:
            self._end_snapshot(str(table), SnapshotOutcome.DONE)

    def snapshot_cancelled(self, tables: Sequence[TableId]) -> None:
        """Record that the snapshots of these tables were cancelled."""
        for table in tables:
            self._end_snapshot(str(table), SnapshotOutcome.CANCELLED)
        self._log.info("snapshot.cancelled", tables=[str(t) for t in tables])

    def snapshot_failed(self, table: TableId, error: IngestdError) -> None:
        """Record that a snapshot can't be read, while its table continues as before."""
        why = error.reason if isinstance(error, TableError) else error.what
        fault = OperatorError(why, remedy=error.remedy)
        self._end_snapshot(str(table), SnapshotOutcome.FAILED, fault)
        errors, now = self.status.last_errors, self._now()
        note_error(errors, now, f"its snapshot failed: {why}", error.remedy, table=str(table))
        self._log.error("snapshot.failed", table=str(table), reason=why, remedy=error.remedy)

    def _end_snapshot(
        self, name: str, outcome: SnapshotOutcome, error: IngestdError | None = None
    ) -> None:
        self._partial.discard(name)
        status = self.status.tables.get(name)
        if status is not None:
            status.end_snapshot(outcome, self._now(), error)
            self._metrics.no_snapshot(self.source, name)

    def reading_failed(self, error: IngestdError, delay_s: float) -> None:
        """Record that tables could not be read, and when that is retried; the stream continues."""
        self._log.warning("snapshot.retried", reason=error.what, retry_s=round(delay_s, 1))
        note_error(self.status.last_errors, self._now(), error.what, error.remedy)

    def reading_waits(self, tables: Sequence[TableId]) -> None:
        """Record that a snapshot waits long to begin."""
        self._log.warning(
            "snapshot.waiting",
            tables=[str(t) for t in tables],
            reason="transactions must end first: those that wrote to these tables, and those that"
            " began before the tables were published or the slot was created. On a standby, the"
            " primary must log its running transactions, every 15 s unless it is idle. With"
            " synchronized_standby_slots, those standbys must catch up",
            remedy="SELECT pid, xact_start, state, query FROM pg_catalog.pg_stat_activity "
            "WHERE xact_start IS"
            " NOT NULL AND application_name <> 'ingestd' ORDER BY xact_start;"
            " SELECT * FROM pg_catalog.pg_prepared_xacts;",
        )

    def _publish(self) -> None:
        for listener in self.listeners:
            listener()
