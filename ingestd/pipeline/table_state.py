"""The life of one table in a run: its phase, its newest snapshot, and what the stream sent of it.

`TRANSITIONS` has the phase that follows each phase at each trigger. `_tables` says `snapshotting`
in QUEUED (from its next row on), READING and REREADING. In the latter two, a snapshot passes the
states of `ingestd.pipeline.snapshot_reader`. The glossary has the words (docs/glossary.md, "The
life of a snapshot").
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto

import numpy as np

from ingestd.model.lake_state import RegisteredTable, TableState, registered_columns
from ingestd.model.lsn import Lsn
from ingestd.model.recorded_progress import RecordedProgress
from ingestd.model.schema import Table
from ingestd.ports import Discovery


class Phase(Enum):
    """Where a table is in its life."""

    LIVE = auto()
    """The lake has all its rows; its changes are appended."""
    QUEUED = auto()
    """Its rows must be read, and no snapshot of it has begun."""
    READING = auto()
    """A snapshot of it has begun, and not all rows of it are durable."""
    REREADING = auto()
    """As READING, and the rows must be read once more after that."""
    STOPPED = auto()
    """Nothing of it is appended until it is redefined, requested, or the next run."""


class Trigger(Enum):
    """What moves a table from one phase to another."""

    NOT_LIVE = auto()
    """A discovery found that `_tables` does not have it live."""
    REDEFINED = auto()
    """A discovery found it with another definition."""
    REQUESTED = auto()
    """A snapshot of it was requested."""
    CANCELLED = auto()
    """The snapshot that was requested is not wanted any more; its old rows serve."""
    MISSED = auto()
    """Changes of it may have been missed."""
    POSTPONED = auto()
    """The source can't send its changes yet."""
    BEGUN = auto()
    """A snapshot of it began, and supersedes an earlier one."""
    FAILED = auto()
    """Its snapshot failed."""
    ENDED = auto()
    """All rows of its snapshot are durable."""
    STOPPED = auto()
    """An error of this table alone ended its capture."""


_LIVE, _QUEUED, _READING, _REREADING, _STOPPED = Phase

TRANSITIONS: dict[Trigger, dict[Phase, Phase]] = {
    trigger: dict(zip(Phase, phases, strict=True))
    for trigger, phases in {
        # from:              LIVE      QUEUED    READING     REREADING   STOPPED
        Trigger.NOT_LIVE:   (_QUEUED,  _QUEUED,  _READING,   _REREADING, _STOPPED),
        Trigger.REDEFINED:  (_LIVE,    _QUEUED,  _READING,   _REREADING, _QUEUED),
        Trigger.REQUESTED:  (_QUEUED,  _QUEUED,  _REREADING, _REREADING, _QUEUED),
        Trigger.CANCELLED:  (_LIVE,    _LIVE,    _LIVE,      _LIVE,      _STOPPED),
        Trigger.MISSED:     (_QUEUED,  _QUEUED,  _REREADING, _REREADING, _STOPPED),
        Trigger.POSTPONED:  (_QUEUED,  _QUEUED,  _REREADING, _REREADING, _STOPPED),
        Trigger.BEGUN:      (_READING, _READING, _READING,   _READING,   _STOPPED),
        Trigger.FAILED:     (_QUEUED,  _QUEUED,  _QUEUED,    _QUEUED,    _STOPPED),
        Trigger.ENDED:      (_LIVE,    _QUEUED,  _LIVE,      _QUEUED,    _STOPPED),
        Trigger.STOPPED:    (_STOPPED, _STOPPED, _STOPPED,   _STOPPED,   _STOPPED),
    }.items()
}  # fmt: skip


@dataclass(slots=True)
class NewestSnapshot:
    """The newest snapshot of a table: the one that is requested, being read, or was read last.

    `id`: its number in this run while its rows are not durable, else None. `point`: the position
    it is consistent at. `remainder`: what is left to be read (`Snapshot.remainder`), empty for all.
    `is_requested`: the table was live when it was requested; `served_point` is the point of the
    rows that serve until it has ended. `has_gap`: changes were missed since it began.
    `has_marker_last`: its `t` comes after its rows. `failures`: how often it failed because the
    table was altered.
    """

    id: int | None = None
    point: Lsn | None = None
    remainder: str = ""
    is_requested: bool = False
    served_point: Lsn | None = None
    has_gap: bool = False
    has_marker_last: bool = True
    failures: int = 0


@dataclass(slots=True)
class StreamedRelation:
    """What the stream sent of a table.

    `last_change`: commit position of the last transaction that changed it. `relation_xact`: commit
    position of the last transaction that sent its columns, and its xid where that is known.
    `version`: the newest columns; `compared`: the row of `_tables` that they agree with.
    `incomplete`: the last transaction with a row that lacked values (`row_checks`) while the
    table was not live.
    """

    last_change: Lsn | None = None
    relation_xact: tuple[Lsn, int | None] | None = None
    version: Table | None = None
    compared: RegisteredTable | None = None
    incomplete: Lsn | None = None

    def is_newer_than(self, discovery: Discovery) -> bool:
        """Return whether columns came from a transaction that the discovery does not see.

        A transaction may be invisible though its commit precedes the discovery's position: its
        record is in the WAL before others see it, and for as long as a synchronous standby does
        not answer.
        """
        if self.relation_xact is None:
            return False
        lsn, xid = self.relation_xact
        if lsn >= discovery.lsn or discovery.seen is None or xid is None:
            return lsn >= discovery.lsn
        return not discovery.seen.sees(np.array([xid]))[0]

    def is_new_version(self, table: Table, known: RegisteredTable | None) -> bool:
        """Record what the stream sent; return whether `_tables` has other columns (`known`)."""
        if self.version is table and self.compared is known:
            return False
        self.version = table
        if differs(table, known):
            return True
        self.compared = known
        return False

    def is_ambiguous(self, table: Table, known: RegisteredTable, first: Lsn) -> bool:
        """Return whether rows of one transaction, separated by DDL in it, could be confused.

        `first`: the commit position of the first row with the new columns. A column with a default
        was added after other rows of its transaction: they have it in the source, but `_tables`
        covers only the rows of earlier transactions. Or a column returned: what was written in
        between lies under another name or type. Or names are in another order, and only different
        columns can be.
        """
        before = {c.name for c in known.columns}
        new = [c for c in table.columns if c.lake_name not in before]
        returns = any(c.lake_name in known.lake_columns for c in new)
        is_defaulted = self.last_change == first and any(c.missing is not None for c in new)
        return returns or is_defaulted or _in_another_order(table, known)


@dataclass(slots=True)
class TrackedTable:
    """A table that the source offers, and its state in this run.

    `rewritten`: why its old rows are not those of the source, until that is recorded. `cause`: why
    it is re-read, until it has been. `is_newly_published`: transactions that run may have changes
    of it that the source does not send.
    """

    table: Table
    phase: Phase = Phase.LIVE
    snapshot: NewestSnapshot = field(default_factory=NewestSnapshot)
    streamed: StreamedRelation = field(default_factory=StreamedRelation)
    rewritten: str | None = None
    cause: str | None = None
    is_newly_published: bool = False

    @property
    def is_live(self) -> bool:
        """True if the lake has all its rows, and its changes are appended."""
        return self.phase is Phase.LIVE

    @property
    def is_stopped(self) -> bool:
        """True if nothing of it is appended."""
        return self.phase is Phase.STOPPED

    @property
    def is_queued(self) -> bool:
        """True if its rows must be read, though they may be being read now."""
        return self.phase in {Phase.QUEUED, Phase.REREADING}

    @property
    def is_being_read(self) -> bool:
        """True if a snapshot has begun whose rows are not durable yet."""
        return self.snapshot.id is not None

    def _move(self, trigger: Trigger) -> None:
        self.phase = TRANSITIONS[trigger][self.phase]

    def resume(self, known: RegisteredTable | None) -> None:
        """Continue a snapshot that an earlier run began, if it was of the same table (same OID)."""
        progress = RecordedProgress("")
        is_same = known is not None and known.oid == self.table.oid
        if known is not None and is_same and known.state is TableState.SNAPSHOTTING:
            progress = RecordedProgress.parse(known.progress)
            self.cause = known.reason
        self.snapshot = NewestSnapshot(
            remainder=progress.remainder,
            has_marker_last=progress.has_marker_last,
            is_requested=progress.is_requested,
        )

    def expect_live(self, *, is_live: bool) -> None:
        """Record whether `_tables` has it live."""
        if not is_live:
            self._move(Trigger.NOT_LIVE)

    def redefine(self) -> None:
        """Record that its definition changed: a stopped table may continue."""
        self._move(Trigger.REDEFINED)

    def request(self, served_point: Lsn | None) -> None:
        """Record that a snapshot was requested. `served_point`: of the rows in the lake."""
        if self.is_live:
            self.snapshot.is_requested, self.snapshot.served_point = True, served_point
        self.snapshot.remainder = ""
        self._move(Trigger.REQUESTED)

    def cancel(self) -> None:
        """Drop a requested snapshot of a table that was live: it is live as before."""
        snapshot = self.snapshot
        snapshot.id, snapshot.remainder, snapshot.is_requested = None, "", False
        snapshot.point = snapshot.served_point
        self._move(Trigger.CANCELLED)

    def miss(self, cause: str | None) -> None:
        """Record that changes of it may have been missed: it must be read from the start.

        `cause`: None where it was not live.
        """
        self.cause = cause
        self.snapshot.is_requested, self.snapshot.remainder = False, ""
        self.snapshot.has_gap = True
        self._move(Trigger.MISSED)

    def postpone(self) -> None:
        """Record that the source can't send its changes yet."""
        self._move(Trigger.POSTPONED)

    def begin_snapshot(self, snapshot_id: int, *, has_rows: bool) -> None:
        """Record that its rows are being read. `has_rows`: the lake has older ones."""
        self._move(Trigger.BEGUN)
        if self.is_stopped:
            return
        self.rewritten = None
        self.snapshot.id, self.snapshot.point, self.snapshot.has_gap = snapshot_id, None, False
        if not self.snapshot.remainder:
            self.snapshot.has_marker_last = has_rows

    def fail_snapshot(self) -> None:
        """Record that its snapshot failed: it, or its remainder, must be read again."""
        self.snapshot.id = self.snapshot.point = None
        self._move(Trigger.FAILED)

    def end_snapshot(self) -> None:
        """Record that all rows of its snapshot are durable."""
        snapshot = self.snapshot
        snapshot.id, snapshot.remainder, snapshot.failures = None, "", 0
        if not snapshot.has_gap:
            self.cause = None
        self._move(Trigger.ENDED)
        if self.phase is Phase.QUEUED:  # these rows serve, unless changes were missed
            snapshot.is_requested, snapshot.served_point = not snapshot.has_gap, snapshot.point
        else:
            self.is_newly_published = snapshot.is_requested = False

    def stop(self) -> None:
        """Append nothing more of it."""
        snapshot = self.snapshot
        snapshot.id, snapshot.point, snapshot.remainder = None, None, ""
        snapshot.is_requested, self.streamed.incomplete, self.cause = False, None, None
        self._move(Trigger.STOPPED)

    def accept_incomplete(self, lsn: Lsn) -> bool:
        """Record a row that lacks values, and return True, if its snapshot will supersede it.

        False where readers see the row: the table is live, or its old rows serve.
        """
        if self.is_live or self.snapshot.is_requested:
            return False
        self.streamed.incomplete = lsn
        return True

    @property
    def is_incomplete(self) -> bool:
        """True if a row that lacks values follows the point of its snapshot."""
        if self.streamed.incomplete is None:
            return False
        return self.snapshot.point is None or self.streamed.incomplete >= self.snapshot.point

    def latest(self, discovery: Discovery) -> Table:
        """Return its columns as the stream sent them after the discovery, or as discovered."""
        version = self.streamed.version
        if version is None or not self.streamed.is_newer_than(discovery):
            return self.table
        return replace(version, fingerprint=self.table.fingerprint)

    @property
    def recorded_progress(self) -> str:
        """The progress of its snapshot for `_tables`; empty if nothing of it is kept."""
        snapshot = self.snapshot
        if not (snapshot.remainder or snapshot.is_requested):
            return ""
        return RecordedProgress(
            snapshot.remainder, snapshot.has_marker_last, snapshot.is_requested
        ).to_text()


def differs(table: Table, known: RegisteredTable | None) -> bool:
    """Return whether `_tables` has other columns, or another replica identity, of a table."""
    if known is None or known.columns != registered_columns(table):
        return True
    return known.replica_identity != table.replica_identity


def _in_another_order(table: Table, known: RegisteredTable) -> bool:
    """Return whether common columns are in another order: in the source no column moves."""
    now, then = [c.name for c in table.columns], [c.source_name for c in known.columns]
    both = {*now} & {*then}
    return [name for name in now if name in both] != [name for name in then if name in both]
