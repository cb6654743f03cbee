"""The state that /status, /readyz, the status page and `ingestd status` show."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from datetime import UTC, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from ingestd.model.errors import TableError
from ingestd.model.lake_state import TableState
from ingestd.observe.freshness import RecentFreshness
from ingestd.observe.progress import SnapshotProgress
from ingestd.observe.recent_events import (
    EPOCHS_KEPT,
    ERRORS_KEPT,
    EpochStatus,
    ErrorStatus,
    note_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime

    import numpy as np
    from numpy.typing import NDArray

    from ingestd.model.errors import IngestdError
    from ingestd.model.lake_state import Notice
    from ingestd.model.lsn import Lsn
    from ingestd.ports import CaptureLag, StorageWait


DROPPED_SHOWN_FOR = timedelta(days=1)
"""How long a dropped table is shown after its drop was found; `_tables` keeps its rows."""


class SourceState(StrEnum):
    """The state of a source. Only `STREAMING` delivers changes; `PAUSED` intentionally does not."""

    STARTING = "starting"
    SNAPSHOTTING = "snapshotting"
    STREAMING = "streaming"
    BACKING_OFF = "backing_off"
    STOPPED = "stopped"
    PAUSED = "paused"
    CLOSED = "closed"


class SnapshotOutcome(StrEnum):
    """How a snapshot ended. `LOST`: its pipeline ended, and the next one has no record of it."""

    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class LastSnapshot:
    """When and how the last snapshot of a table ended, and why it failed."""

    at: datetime
    outcome: SnapshotOutcome
    reason: str | None = None
    remedy: str | None = None


def _no_wait() -> StorageWait | None:
    return None


@dataclass(slots=True)
class TableStatus:
    """A table of a source. `rows`: committed by this daemon since it started.

    `snapshot_lsn`: the point its rows were read at; `replaced_lsn`: the same before the current or
    last snapshot. `snapshot`: the one that is running. `snapshot_requested`: one was requested and
    has not begun. `last_snapshot`: how the last one ended, since this daemon started.
    """

    table: str
    state: TableState
    since: datetime
    reason: str | None = None
    remedy: str | None = None
    snapshot_lsn: Lsn | None = None
    replaced_lsn: Lsn | None = None
    snapshot: SnapshotProgress | None = None
    snapshot_requested: bool = False
    last_snapshot: LastSnapshot | None = None
    rows: int = 0
    last_change: datetime | None = None

    def read(self, ratio: float, nbytes: int, now: datetime) -> SnapshotProgress:
        """Record the progress of a snapshot: its ratio, and bytes sent since the last call."""
        self.snapshot_requested = False
        if self.snapshot is None:
            self.snapshot = SnapshotProgress(now)
        self.snapshot.observe(ratio, nbytes, now)
        return self.snapshot

    def go_live(self, snapshot_lsn: Lsn | None, now: datetime) -> None:
        """Record that the table is live with the rows read at a point, which may be old or new."""
        if snapshot_lsn not in {None, self.replaced_lsn}:
            self.last_snapshot = LastSnapshot(now, SnapshotOutcome.DONE)

    def end_snapshot(
        self, outcome: SnapshotOutcome, now: datetime, error: IngestdError | None = None
    ) -> None:
        """Record that no snapshot is requested or running any more."""
        self.snapshot, self.snapshot_requested = None, False
        what, remedy = (None, None) if error is None else (error.what, error.remedy)
        self.last_snapshot = LastSnapshot(now, outcome, what, remedy)


@dataclass(slots=True)
class ReferenceStatus:
    """The current rows of a table in the lake; `kind`: the config's `reference`.

    `state`: `snapshotting` before the first version, then `live`, or `stopped` for a reason: the
    existing version remains readable. `epoch`: with "snapshot_plus_cdc", the last epoch it
    includes. `looked`: when it was last found, or brought, up to date with the source.
    """

    table: str
    kind: str
    state: TableState
    since: datetime
    reason: str | None = None
    remedy: str | None = None
    version: int | None = None
    rows: int | None = None
    epoch: int | None = None
    looked: datetime | None = None


@dataclass(slots=True)
class SourceStatus:
    """The current state of a source. Counts are since the daemon's start, `epoch` is the lake's.

    `claim`: the claim it works under, for display; `lake_lost`: True while it waits for its lake;
    `left`: those of `references` whose table was forgotten (`forget_dropped`). `wal_status`: the
    server's status of the slot; `safe_bytes`: None also if the server sets no limit for slots.
    `storage`: returns the call to the lake's storage that hangs, if any. `lag_at`: when the lag was
    measured. `notices`: what needs attention although nothing is stopped. `now` is passed in by the
    caller (aware). Called from one event loop.
    """

    source: str
    since: datetime
    state: SourceState = SourceState.STARTING
    claim: str = ""
    lake_lost: bool = False
    reason: str | None = None
    remedy: str | None = None
    lag_bytes: int | None = None
    lag_seconds: float | None = None
    retained_bytes: int | None = None
    safe_bytes: int | None = None
    wal_status: str | None = None
    lag_at: datetime | None = None
    confirmed_lsn: Lsn | None = None
    received_lsn: Lsn | None = None
    end_lsn: Lsn | None = None
    epoch: int = 0
    rows: int = 0
    transactions: int = 0
    epochs: int = 0
    last_commit: datetime | None = None
    freshness: RecentFreshness = field(default_factory=RecentFreshness)
    tables: dict[str, TableStatus] = field(default_factory=dict)
    references: dict[str, ReferenceStatus] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    notices: tuple[Notice, ...] = ()
    last_epochs: deque[EpochStatus] = field(default_factory=lambda: deque(maxlen=EPOCHS_KEPT))
    last_errors: deque[ErrorStatus] = field(default_factory=lambda: deque(maxlen=ERRORS_KEPT))
    storage: Callable[[], StorageWait | None] = _no_wait

    def enter(self, state: SourceState, now: datetime, error: IngestdError | None = None) -> bool:
        """Enter a state, with the error that caused it; return whether anything changed."""
        what = None if error is None else error.what
        changed = (state, what) != (self.state, self.reason)
        if state is not self.state:
            self.since = now
        self.state = state
        self.reason = what
        self.remedy = None if error is None else error.remedy
        if error is not None and changed:
            note_error(self.last_errors, now, error.what, error.remedy)
        return changed

    def shown_references(self) -> list[ReferenceStatus]:
        """Return them by name; one whose table is stopped or dropped is shown as stopped."""
        shown = [each for _, each in sorted(self.references.items()) if each.table not in self.left]
        return [self._shown(reference) for reference in shown]

    def _shown(self, reference: ReferenceStatus) -> ReferenceStatus:
        table = self.tables.get(reference.table)
        if table is None or table.state not in {TableState.STOPPED, TableState.DROPPED}:
            return reference
        return replace(
            reference,
            state=TableState.STOPPED,
            since=table.since,
            reason=table.reason,
            remedy=table.remedy,
        )

    def attend(self, notices: Sequence[Notice]) -> list[Notice]:
        """Set what needs attention although nothing is stopped; return the new notices."""
        new = [notice for notice in notices if notice not in self.notices]
        self.notices = tuple(notices)
        return new

    def pause(self, since: datetime) -> None:
        """Record that an operator paused the source, and since when. No error is noted."""
        self.state, self.since = SourceState.PAUSED, since
        self.reason, self.remedy = None, f"ingestd resume {self.source}"

    def resumed(self, *, epoch: int, end_lsn: Lsn | None) -> None:
        """Record the state of the lake at the start."""
        self.epoch = epoch
        self.end_lsn = end_lsn

    def received(self, position: Lsn) -> None:
        """Record the position up to which the source has sent."""
        self.received_lsn = position

    def confirmed(self, position: Lsn) -> None:
        """Record the position below which the source may discard."""
        self.confirmed_lsn = position

    def measured(
        self, lag: CaptureLag, lag_seconds: float | None, now: datetime | None = None
    ) -> None:
        """Record a measured lag."""
        self.lag_at = now
        self.lag_bytes = lag.lag_bytes
        self.retained_bytes = lag.retained_bytes
        self.safe_bytes = lag.safe_bytes
        self.wal_status = lag.wal_status
        self.lag_seconds = lag_seconds

    def committed(  # the columns of its row in `_epochs`
        self,
        epoch: int,
        end_lsn: Lsn,
        now: datetime,
        *,
        transactions: int,
        rows: Mapping[str, int],
        ages_s: NDArray[np.float64],
        nbytes: int | None = None,
        commit_s: float | None = None,
    ) -> None:
        """Record a durable epoch: `rows` per table, `ages_s` per transaction."""
        self.epoch = epoch
        self.end_lsn = end_lsn
        self.last_commit = now
        self.epochs += 1
        self.transactions += transactions
        self.rows += sum(rows.values())
        self.last_epochs.append(
            EpochStatus(
                epoch,
                now,
                end_lsn,
                tables=len(rows),
                rows=sum(rows.values()),
                transactions=transactions,
                nbytes=nbytes,
                commit_s=commit_s,
                oldest_s=max(0.0, float(ages_s[0])) if len(ages_s) else None,
            )
        )
        self.freshness.observe(ages_s)
        for table, count in rows.items():
            status = self.tables.setdefault(table, TableStatus(table, TableState.LIVE, now))
            status.rows += count
            status.last_change = now

    def forget_dropped(self, now: datetime) -> list[str]:
        """Remove tables that were dropped over a day ago; return their names."""
        old = [
            table.table
            for table in self.tables.values()
            if table.state is TableState.DROPPED and now - table.since >= DROPPED_SHOWN_FOR
        ]
        for name in old:
            del self.tables[name]
        self.left.update(self.references.keys() & old)
        return old

    def table(
        self,
        table: str,
        state: TableState,
        now: datetime,
        error: IngestdError | None = None,
        *,
        snapshot_lsn: Lsn | None = None,
    ) -> None:
        """Record a table's state, and the error that led to it, if any."""
        self.left.discard(table)
        status = self.tables.setdefault(table, TableStatus(table, state, now))
        what = None if error is None else error.what
        if isinstance(error, TableError):
            what = error.reason  # the table is shown already
        if error is not None and state is TableState.STOPPED and what != status.reason:
            note_error(self.last_errors, now, str(what), error.remedy, table=table)
        is_again = state is TableState.STOPPED and status.snapshot_requested
        if state is not status.state or is_again:
            if state is TableState.SNAPSHOTTING:
                status.replaced_lsn = status.snapshot_lsn
            elif status.state is TableState.SNAPSHOTTING and state is TableState.LIVE:
                status.go_live(snapshot_lsn, now)
            status.since = now
            status.snapshot = None
        status.state = state
        status.reason = what
        status.remedy = None if error is None else error.remedy
        if state is not TableState.LIVE:
            status.snapshot_requested = False
        if snapshot_lsn is not None:
            status.snapshot_lsn = snapshot_lsn


class CommandAccess(Protocol):
    """How a client gets the token that commands require, or why there is none."""

    def to_json(self) -> dict[str, str | None]:
        """Return `token_file`, `user` and `off`, each None where it does not apply."""
        ...


@dataclass(slots=True)
class DaemonStatus:
    """The state of the daemon: `sources` by name, `lake`: its URI as configured.

    `commands`: the token that commands require; None if nothing is served.
    """

    version: str
    started_at: datetime
    sources: dict[str, SourceStatus] = field(default_factory=dict)
    lake: str = ""
    commands: CommandAccess | None = None


def ready(status: DaemonStatus) -> tuple[bool, list[str]]:
    """Return whether every source delivers all its tables, and the reasons if not (I8).

    A paused source need not deliver: see `paused`.
    """
    reasons = [reason for reason, _ in not_ready(status)]
    return not reasons, reasons


def not_ready(status: DaemonStatus) -> list[tuple[str, str | None]]:
    """Return the reasons of `ready`, each with its remedy, if there is one."""
    found: list[tuple[str, str | None]] = [] if status.sources else [("no sources", None)]
    for name, source in status.sources.items():
        if source.state is SourceState.PAUSED:
            continue
        if source.state is not SourceState.STREAMING:
            why = f": {source.reason}" if source.reason else ""
            found.append((f"source {name} is {source.state}{why}", source.remedy))
        if (wait := source.storage()) is not None:
            found.append((f"source {name}: {wait}", wait.remedy))
        stopped = [t for t in source.tables.values() if t.state is TableState.STOPPED]
        found += [
            (f"source {name}, table {t.table} is stopped: {t.reason}", t.remedy) for t in stopped
        ]
        listed = {t.table for t in stopped}
        for reference in source.shown_references():
            if reference.state is not TableState.LIVE and reference.table not in listed:
                why = f": {reference.reason}" if reference.reason else ""
                what = f"reference table {reference.table} is {reference.state}"
                found.append((f"source {name}, {what}{why}", reference.remedy))
    return found


def paused(status: DaemonStatus) -> list[str]:
    """Return which sources are paused, and since when."""
    return [
        f"source {name} is paused since {source.since.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
        for name, source in status.sources.items()
        if source.state is SourceState.PAUSED
    ]
