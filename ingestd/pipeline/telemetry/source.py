"""Reports a source to metrics, status and log in one place.

Log events have constant names; one line per change of state, never one per row or message.
"""

from __future__ import annotations

import errno
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
from structlog.typing import FilteringBoundLogger

from ingestd.model.changes import ChangeSet, CommittedEpoch
from ingestd.model.errors import IngestdError, LakeLostError, OperatorError, TransientError
from ingestd.model.lake_state import LakeState, Notice, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from ingestd.observe.metrics import Metrics
from ingestd.observe.recent_events import note_error
from ingestd.observe.status import SourceState, SourceStatus
from ingestd.pipeline.filling_epoch import FillingEpoch, RowTally
from ingestd.pipeline.telemetry.raw_values import hint
from ingestd.pipeline.telemetry.table import TableTelemetry
from ingestd.ports import CaptureLag, Discovery
from ingestd.process.clock import utc_now
from ingestd.process.file_limit import none_left

_RUNNING = {SourceState.SNAPSHOTTING, SourceState.STREAMING}
REMIND_EVERY = timedelta(hours=1)
"""How often the log reports the WAL that a paused source retains."""


class SourceTelemetry(TableTelemetry):
    """Keeps one source's status and metrics: see TableTelemetry.

    `epoch_listeners`: called with each epoch that has become durable. `fault_listeners`: called
    with each fault that needs an operator.
    """

    def __init__(
        self,
        status: SourceStatus,
        metrics: Metrics,
        log: FilteringBoundLogger,
        *,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        super().__init__(status, metrics, log, now=now)
        self._is_measured = True
        self._held_reported_at: datetime | None = None
        self._raw_reported: set[tuple[TableId, str]] = set()
        self.epoch_listeners: list[Callable[[CommittedEpoch], None]] = []
        self.fault_listeners: list[Callable[[IngestdError], None]] = []
        metrics.source_state(self.source, status.state)
        metrics.lake_lost(self.source, is_lost=status.lake_lost)

    # --- the source --------------------------------------------------------------------------

    def enter(self, state: SourceState) -> None:
        """Record a state that needs no explanation.

        A new start after a fault keeps the fault's state and reason until it has made progress.
        """
        failed = self.status.state in {SourceState.BACKING_OFF, SourceState.STOPPED}
        if failed and state is SourceState.STARTING:
            return
        if self.status.enter(state, self._now()):
            self._metrics.source_state(self.source, state)
            if state not in _RUNNING:
                self._not_connected()
            self._log.info("source.state", state=str(state))
            self._publish()

    def _not_connected(self) -> None:
        """Record that nothing is measured any more, and that received bytes are dropped."""
        self._metrics.no_lag(self.source)
        self._metrics.buffered(self.source, 0)

    def paused(self, since: datetime) -> None:
        """Record that the source was paused, now or before this daemon started."""
        if self.status.state is SourceState.PAUSED:
            return
        self.status.pause(since)
        for table in self.status.tables.values():  # a running read continues after the pause
            table.snapshot = None
            self._metrics.no_snapshot(self.source, table.table)
        self._metrics.source_state(self.source, SourceState.PAUSED)
        self._not_connected()
        self._is_measured = True
        self._log.info("source.paused", since=since.isoformat(), remedy=self.status.remedy)
        self._held_reported_at = None
        self._publish()

    def resumed(self) -> None:
        """Record that the source delivers; no change if it was not paused."""
        if self.status.state is not SourceState.PAUSED:
            return
        paused_s = (self._now() - self.status.since).total_seconds()
        self._log.info("source.resumed", paused_s=round(paused_s, 1))
        self.enter(SourceState.STARTING)

    def report_retained(self, lag: CaptureLag) -> None:
        """Record what is retained for a paused source; log it at once, then every hour."""
        self._is_measured = True
        self._forget_dropped()
        now = self._now()
        self.status.measured(lag, None, now)
        self._metrics.set_retained(self.source, lag)
        if lag.confirmed_lsn is not None:
            self.status.confirmed(lag.confirmed_lsn)
        due = self._held_reported_at is None or now - self._held_reported_at >= REMIND_EVERY
        if due:
            self._held_reported_at = now
            self._log.info(
                "source.held",
                since=self.status.since.isoformat(),
                lag_bytes=lag.lag_bytes,
                retained_bytes=lag.retained_bytes,
                safe_bytes=lag.safe_bytes,
            )

    @property
    def knows_lake(self) -> bool:
        """True if this daemon has read or written the contents of the source's lake."""
        return self.status.end_lsn is not None or bool(self.status.epoch)

    def lake_read_while_paused(self, committed: LakeState) -> None:
        """Record the lake's contents for a source that was paused before this daemon started."""
        self.status.resumed(epoch=committed.epoch, end_lsn=committed.position)
        for known in committed.tables.values():
            why = None if known.reason is None else OperatorError(known.reason)
            self._registered(known, known.state, why)
        self._forget_dropped()

    def refuse_if_paused(self) -> None:
        """Raise OperatorError while the source is paused: waiting does not help."""
        if self.status.state is SourceState.PAUSED:
            raise self.paused_fault()

    def paused_fault(self) -> OperatorError:
        """Return why a source that is paused can't do what is asked."""
        what = f"source {self.source} is paused since {self.status.since:%Y-%m-%d %H:%M:%S} UTC"
        return OperatorError(what, remedy=self.status.remedy)

    def stopped_fault(self) -> OperatorError | None:
        """Return the fault of a table that is stopped; None without any."""
        stopped = [t for t in self.status.tables.values() if t.state is TableState.STOPPED]
        if not stopped:
            return None
        first, *others = sorted(stopped, key=lambda table: table.table)
        more = f" ({len(others)} more tables are stopped)" if others else ""
        why = f": {first.reason}" if first.reason else ""
        return OperatorError(
            f"source {self.source}: table {first.table} is stopped{why}{more}", remedy=first.remedy
        )

    def drained(self) -> None:
        """Record that the lake has all that the source had committed."""
        self._log.info("source.drained", end_lsn=str(self.status.end_lsn))

    def not_running(self) -> TransientError | None:
        """Return why the source can't accept requests now; None if it can."""
        state, reason = self.status.state, self.status.reason
        if state in _RUNNING:
            return None
        why = f": {reason}" if reason else ""
        return TransientError(
            f"source {self.source} is {state}{why}",
            reason="not_running",
            remedy=self.status.remedy or "retry when it is streaming",
        )

    def failed(self, error: IngestdError, delay_s: float) -> None:
        """Record the fault that ended a pipeline, and when it is retried."""
        transient = isinstance(error, TransientError)
        state = SourceState.BACKING_OFF if transient else SourceState.STOPPED
        reason = error.reason if isinstance(error, TransientError) else "operator"
        if isinstance(error, LakeLostError):
            reason = "lake_lost"
            self._lake_lost(is_lost=True)
        self._metrics.restarted(self.source, reason)
        self._not_connected()
        self._forget_dropped()
        if self.status.enter(state, self._now(), error):
            self._metrics.source_state(self.source, state)
            log = self._log.warning if transient else self._log.error
            log(
                "source.failed",
                state=str(state),
                reason=error.what,
                remedy=error.remedy,
                retry_s=round(delay_s, 1),
            )
            for listener in () if transient else self.fault_listeners:
                listener(error)

    def unknown(self, error: BaseException) -> IngestdError:
        """Log where an unforeseen error arose, and return it as an error of the hierarchy.

        Its text is left out: a library's error may quote row values.
        """
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            return none_left(f"source {self.source}")
        frames = traceback.extract_tb(error.__traceback__)
        where = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames]
        self._log.error("source.unknown_error", error=type(error).__name__, where=where)
        return OperatorError(
            f"source {self.source}: unexpected {type(error).__name__} in {where[-1]}",
            remedy="nothing was lost; please report it with the log's source.unknown_error",
        )

    def not_removed(self, error: IngestdError) -> None:
        """Record that files of a dropped epoch are still in the lake."""
        self._log.warning("epoch.files_left", reason=error.what)

    def not_measured(self, error: IngestdError) -> None:
        """Record that the lag could not be measured; log it once until it can be again."""
        self._metrics.no_lag(self.source)
        self._forget_dropped()
        if self._is_measured:
            self._is_measured = False
            self._log.warning("source.lag_unknown", reason=error.what)

    def noticed(self, notices: Sequence[Notice]) -> None:
        """Record what was found when the lake was opened."""
        for notice in notices:
            self._log.warning(notice.event, reason=notice.what, remedy=notice.remedy)

    def _lake_lost(self, *, is_lost: bool) -> None:
        self.status.lake_lost = is_lost
        self._metrics.lake_lost(self.source, is_lost=is_lost)

    def lake_found(self) -> None:
        """Record that the lake is the source's, or was accepted as such."""
        self._lake_lost(is_lost=False)

    def begins(self, lake: str) -> None:
        """Log that the lake has nothing of the source yet."""
        self._log.info("source.first_start", lake=lake)

    def lake_given_up(self, reason: str) -> None:
        """Record that the source starts over, in another lake than it was written to."""
        self._log.warning("source.lake_lost", reason=reason, action="resnapshot")
        remedy = "nothing to do: every table is re-read, as an operator agreed to"
        note_error(self.status.last_errors, self._now(), reason, remedy)
        self._metrics.restarted(self.source, "lake_resnapshot")

    def lost(self, reason: str) -> None:
        """Record that the stream can't continue where the lake ends."""
        self._log.warning("source.slot_lost", reason=reason, action="resnapshot")
        remedy = "nothing to do: every table is re-read, and its old rows remain until then"
        note_error(self.status.last_errors, self._now(), reason, remedy)
        self._metrics.restarted(self.source, "slot_lost")

    def discovered(self, committed: LakeState, discovery: Discovery) -> None:
        """Record the contents of the lake and the source's offer."""
        self.status.resumed(epoch=committed.epoch, end_lsn=committed.position)
        self.offered(discovery)
        self._forget_requests()
        for table in discovery.tables:
            known = committed.tables.get(table.id)
            live = committed.is_live(table.id)
            state = TableState.LIVE if live else TableState.SNAPSHOTTING
            point = None if known is None else known.snapshot_lsn
            self._table(str(table.id), state, snapshot_lsn=point)
        for refused in discovery.refused:
            known = committed.tables.get(refused.table.id)
            gone = refused.table.oid == 0 and known is not None and known.oid != 0
            if known is not None and gone:
                self._registered(known, TableState.DROPPED, refused.error)
            else:
                self._table(str(refused.table.id), TableState.STOPPED, refused.error)
        self._forget_dropped()
        self._log.info(
            "source.discovered",
            tables=len(discovery.tables),
            refused=len(discovery.refused),
            epoch=committed.epoch,
            position=None if committed.position is None else str(committed.position),
        )

    # --- positions and rows ------------------------------------------------------------------

    def received(self, change_set: ChangeSet, epoch: FillingEpoch) -> None:
        """Record a change set that is now in the epoch."""
        self.status.received(change_set.position)
        self._metrics.received(self.source, change_set.position)
        self._metrics.decoded(self.source, change_set.decode_s)
        self._metrics.ignored(self.source, change_set.ignored_messages)
        self._metrics.buffered(self.source, epoch.nbytes)

    def committed(
        self, committed: CommittedEpoch, epoch: FillingEpoch, commit_seconds: float
    ) -> None:
        """Record an epoch that has become durable."""
        now_us = time.time_ns() // 1000
        times = np.concatenate(epoch.commit_times or [np.empty(0, np.int64)])
        ages_s = (now_us - times) / 1e6
        rows = {str(t.table): t.rows for t in committed.tables}
        self.status.committed(
            committed.epoch,
            committed.summary.end_lsn,
            self._now(),
            transactions=epoch.transactions,
            rows=rows,
            ages_s=ages_s,
            nbytes=committed.summary.nbytes,
            commit_s=commit_seconds,
        )
        self._metrics.buffered(self.source, 0)
        self._metrics.committed(
            self.source,
            transactions=epoch.transactions,
            replicated=epoch.replicated,
            commit_seconds=commit_seconds,
            ages_s=ages_s,
        )
        for table, tally in epoch.tallies.items():
            self._metrics.rows(self.source, str(table), tally.ops)
            if tally.raw_values:
                self._raw_values(table, tally)
        self._log.info(
            "epoch.committed",
            epoch=committed.epoch,
            end_lsn=str(committed.summary.end_lsn),
            transactions=epoch.transactions,
            rows=sum(rows.values()),
            tables=len(rows),
            seconds=round(commit_seconds, 3),
        )
        for listener in self.epoch_listeners:
            listener(committed)
        self._publish()

    def _raw_values(self, table: TableId, tally: RowTally) -> None:
        """Count values kept as text; the log names each column once."""
        self._metrics.raw_values(self.source, str(table), tally.raw_values)
        for column, count in tally.raw_columns.items():
            if (table, column) not in self._raw_reported:
                self._raw_reported.add((table, column))
                why = hint(tally.raw_types[column])
                self._log.warning(
                    "table.raw_values", table=str(table), column=column, count=count, hint=why
                )

    def confirmed(self, position: Lsn) -> None:
        """Record the position below which the source may discard."""
        self.status.confirmed(position)
        self._metrics.confirmed(self.source, position)

    def measured(self, lag: CaptureLag, oldest_us: int | None) -> None:
        """Record a lag; `oldest_us`: commit time of the oldest change that is not durable."""
        self._is_measured = True
        self._forget_dropped()
        seconds = 0.0 if oldest_us is None else max(0.0, time.time_ns() / 1e9 - oldest_us / 1e6)
        if lag.seconds is not None:
            seconds = max(seconds, lag.seconds)
        self.status.measured(lag, seconds, self._now())
        self._metrics.lag(self.source, lag, seconds)
