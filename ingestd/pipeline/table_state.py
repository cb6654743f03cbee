"""The state of one table in a run: captured or stopped, to be read or read, and what is left."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ingestd.model.lake_state import RegisteredTable, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table
from ingestd.ports import Discovery

_FIRST, _LAST, _AGAIN, _MARKED = "first", "last", "again", "|"
"""Where a read has its `t`, as recorded in `_tables` before what is left of it.

Again: last, and the table was complete when its snapshot was requested.
"""


def progress_of(left: str, *, is_marked: bool) -> str:
    """Return the text for `_tables` of what another process left of a read, to be continued.

    `is_marked`: its `t` is in the lake; otherwise it comes last.
    """
    return (_FIRST if is_marked else _LAST) + _MARKED + left


def left_of(progress: str) -> str:
    """Return what is left of a read according to `_tables` (`Snapshot.left`)."""
    return progress.partition(_MARKED)[2]


@dataclass(slots=True)
class TrackedTable:
    """The state of one table that the source offers, in one run.

    `is_wanted`: its rows must be read. `load`: the number of the read that is not durable yet, None
    if none is running; a later read voids an earlier one. `point`: where the rows are read. `last`:
    commit LSN of the stream's last change of it; `told`: commit LSN and, if known, xid of the last
    transaction that sent other columns for it. `rewritten`: why its old rows differ from the
    source's, until that is recorded. `cause`: why it is re-read, until it has been. `is_postponed`:
    the source can't send it yet. `version`: the definition that the stream sent last; `compared`:
    the registered one that equals it. `progress`: what an earlier read left (`Snapshot.left`), or
    this one so far; `owes_marker`: its `t` comes last. `is_new`: the source has begun to send its
    changes only just now. `is_asked`: it was complete, by its snapshot at `whole_at`, when its
    re-read was requested. `has_gap`: changes of it were missed since its read began. `failures`:
    reads during which it was altered. `incomplete`: the last transaction with a row that lacked
    values (`incomplete_rows`), accepted while the table was not complete.
    """

    table: Table
    is_stopped: bool = False
    is_wanted: bool = False
    load: int | None = None
    point: Lsn | None = None
    last: Lsn | None = None
    told: tuple[Lsn, int | None] | None = None
    rewritten: str | None = None
    cause: str | None = None
    is_postponed: bool = False
    version: Table | None = None
    compared: RegisteredTable | None = None
    progress: str = ""
    owes_marker: bool = True
    is_new: bool = False
    is_asked: bool = False
    whole_at: Lsn | None = None
    has_gap: bool = False
    failures: int = 0
    incomplete: Lsn | None = None

    @property
    def is_whole(self) -> bool:
        """True if the lake has all its rows and accepts its changes."""
        return not (self.is_stopped or self.is_wanted or self.load is not None)

    def resume(self, known: RegisteredTable | None) -> None:
        """Continue a read that an earlier run began, if it was of this very table."""
        marker = ""
        is_this = known is not None and known.oid == self.table.oid
        if known is not None and is_this and known.state is TableState.SNAPSHOTTING:
            marker, _, self.progress = known.progress.partition(_MARKED)
            self.cause = known.reason
        self.owes_marker, self.is_asked = marker != _FIRST, marker == _AGAIN

    def ask(self, whole_at: Lsn | None) -> None:
        """Record that its re-read was requested. `whole_at`: its snapshot so far."""
        if self.is_whole:
            self.is_asked, self.whole_at = True, whole_at
        self.is_wanted, self.is_stopped, self.progress = True, False, ""

    def cancel(self) -> None:
        """Record that a re-read was cancelled. The table was complete when it was requested."""
        self.is_wanted, self.load, self.progress = False, None, ""
        self.is_asked, self.point = False, self.whole_at

    def miss(self, cause: str | None) -> None:
        """Record that changes of it may have been missed: it must be read from the start.

        `cause`: None if it was not complete.
        """
        self.cause = cause
        self.is_wanted, self.is_asked, self.progress = True, False, ""
        self.has_gap = True

    def begin(self, load: int, *, has_rows: bool) -> None:
        """Record that its rows are being read. `has_rows`: the lake has older ones."""
        self.is_wanted, self.has_gap, self.rewritten = False, False, None
        self.load, self.point = load, None
        if not self.progress:
            self.owes_marker = has_rows

    def fail(self) -> None:
        """Record that its read failed: the table, or what was left, must be read again."""
        self.load, self.point, self.is_wanted = None, None, True

    def end(self) -> None:
        """Record that all rows of its read are durable."""
        self.load, self.progress, self.failures = None, "", 0
        if not self.has_gap:
            self.cause = None
        if self.is_wanted:  # again: it is complete until then, unless something was missed
            self.is_asked, self.whole_at = not self.has_gap, self.point
        else:
            self.is_new = self.is_asked = False

    def stop(self) -> None:
        """Stop the table."""
        self.is_stopped, self.is_wanted, self.load, self.point = True, True, None, None
        self.progress, self.is_asked, self.incomplete = "", False, None
        self.cause = None

    def note_incomplete(self, lsn: Lsn) -> bool:
        """Record a row that lacks values, and return True, unless readers would see it.

        A re-read that was not requested voids the rows below its point, so readers never see them.
        """
        if self.is_whole or self.is_asked:
            return False
        self.incomplete = lsn
        return True

    @property
    def is_incomplete(self) -> bool:
        """True if such a row lies above what the read voids."""
        if self.incomplete is None:
            return False
        return self.point is None or self.incomplete >= self.point

    def is_told_after(self, discovery: Discovery) -> bool:
        """Return whether the stream has sent columns by a transaction later than the discovery.

        The transaction's commit may precede the discovery's position. Such a record is in the WAL
        for a moment, and as long as a synchronous standby does not answer, before other sessions
        see it.
        """
        if self.told is None:
            return False
        lsn, xid = self.told
        if lsn >= discovery.lsn or discovery.seen is None or xid is None:
            return lsn >= discovery.lsn
        return not discovery.seen.sees(np.array([xid]))[0]

    def latest(self, discovery: Discovery) -> Table:
        """Return its definition by the stream if that is later than the discovery, else by that."""
        if self.version is None or not self.is_told_after(discovery):
            return self.table
        return replace(self.version, storage=self.table.storage)

    @property
    def recorded_progress(self) -> str:
        """The text for `_tables` on its read; empty: nothing of it is kept."""
        if not (self.progress or self.is_asked):
            return ""
        marker = _AGAIN if self.is_asked else _LAST if self.owes_marker else _FIRST
        return marker + _MARKED + self.progress
