"""One table in a run: taken or stopped, to be read or read, and what a reading left."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ingestd.model.lake_state import RegisteredTable, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table
from ingestd.ports import Discovery

_FIRST, _LAST, _AGAIN, _MARKED = "first", "last", "again", "|"
"""How `_tables` says where a reading has its `t`, before what is left of it.

Again: last, and the table was whole when someone asked for it.
"""


def progress_of(left: str, *, is_marked: bool) -> str:
    """Write for `_tables` what someone else left of a reading, which a daemon goes on with.

    `is_marked`: its `t` is in the lake; else it comes last.
    """
    return (_FIRST if is_marked else _LAST) + _MARKED + left


def left_of(progress: str) -> str:
    """Return what `_tables` says is left of a reading (`Snapshot.left`)."""
    return progress.partition(_MARKED)[2]


@dataclass(slots=True)
class TrackedTable:
    """What a run knows of one table that the source offers.

    `is_wanted`: its rows must be read. `load`: which reading of them is not durable yet, None if
    none is under way; a later one makes an earlier one void. `point`: where they are read.
    `last`: transaction of the stream's last change of it; `told`: of the last that told of columns,
    and its id, where that is known.
    `rewritten`: why its old rows are not what the source has, until that is recorded. `cause`: what
    has it re-read, until it has been.
    `is_postponed`: the source can't send it yet. `version`: what the stream brought last, which is
    as `compared` says. `progress`: what a reading before left (`Snapshot.left`), or this one so
    far; `owes_marker`: its `t` comes last. `is_new`: the source has sent its changes only since a
    moment ago. `is_asked`: it was whole when someone asked for it to be read, since its snapshot
    at `whole_at`. `has_gap`: changes of it were missed since its reading began. `failures`:
    readings that it was altered in. `incomplete`: the last transaction with a row that lacked
    values (`incomplete_rows`), taken while the table was not whole.
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
        """Whether the lake has all its rows, and takes its changes."""
        return not (self.is_stopped or self.is_wanted or self.load is not None)

    def resume(self, known: RegisteredTable | None) -> None:
        """Go on with a reading that an earlier run began, if it was of this very table."""
        marker = ""
        is_this = known is not None and known.oid == self.table.oid
        if known is not None and is_this and known.state is TableState.SNAPSHOTTING:
            marker, _, self.progress = known.progress.partition(_MARKED)
            self.cause = known.reason
        self.owes_marker, self.is_asked = marker != _FIRST, marker == _AGAIN

    def ask(self, whole_at: Lsn | None) -> None:
        """Record that someone wants it re-read. `whole_at`: its snapshot so far."""
        if self.is_whole:
            self.is_asked, self.whole_at = True, whole_at
        self.is_wanted, self.is_stopped, self.progress = True, False, ""

    def cancel(self) -> None:
        """Record that nobody wants it read any more, which was whole when it was asked for."""
        self.is_wanted, self.load, self.progress = False, None, ""
        self.is_asked, self.point = False, self.whole_at

    def miss(self, cause: str | None) -> None:
        """Record that changes of it may have been missed: it has to be read from the start.

        `cause`: None where it was not whole.
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
        """Record that its reading failed: it must be read again, or what was left."""
        self.load, self.point, self.is_wanted = None, None, True

    def end(self) -> None:
        """Record that all rows of its reading are durable."""
        self.load, self.progress, self.failures = None, "", 0
        if not self.has_gap:
            self.cause = None
        if self.is_wanted:  # again: it is whole until then, unless something was missed
            self.is_asked, self.whole_at = not self.has_gap, self.point
        else:
            self.is_new = self.is_asked = False

    def stop(self) -> None:
        """Take nothing more of it."""
        self.is_stopped, self.is_wanted, self.load, self.point = True, True, None, None
        self.progress, self.is_asked, self.incomplete = "", False, None
        self.cause = None

    def note_incomplete(self, lsn: Lsn) -> bool:
        """Record that a row came that lacks values, unless that would be seen: say whether it was.

        Not where readers see it: what is re-read, and was not asked for, voids what lies below.
        """
        if self.is_whole or self.is_asked:
            return False
        self.incomplete = lsn
        return True

    @property
    def is_incomplete(self) -> bool:
        """Whether such a row lies where the reading has not made it void."""
        if self.incomplete is None:
            return False
        return self.point is None or self.incomplete >= self.point

    def is_told_after(self, discovery: Discovery) -> bool:
        """Whether the stream has told of columns by a transaction that the discovery is before.

        It may be before one whose commit lies below its position: such a record is in the WAL for
        a moment, and for as long as a synchronous standby does not answer, before others see it.
        """
        if self.told is None:
            return False
        lsn, xid = self.told
        if lsn >= discovery.lsn or discovery.seen is None or xid is None:
            return lsn >= discovery.lsn
        return not discovery.seen.sees(np.array([xid]))[0]

    def latest(self, discovery: Discovery) -> Table:
        """Return its columns as the stream told after the discovery, or as that did."""
        if self.version is None or not self.is_told_after(discovery):
            return self.table
        return replace(self.version, storage=self.table.storage)

    @property
    def recorded_progress(self) -> str:
        """What `_tables` is to say of its reading; empty: nothing of it is kept."""
        if not (self.progress or self.is_asked):
            return ""
        marker = _AGAIN if self.is_asked else _LAST if self.owes_marker else _FIRST
        return marker + _MARKED + self.progress
