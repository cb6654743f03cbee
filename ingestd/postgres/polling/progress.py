"""Which rows of a table have been delivered: polling's state, and its query conditions.

A row version is identified by the transaction that wrote it (`xmin`). A poll delivers what its
snapshot sees and earlier polls did not. Postgres can report whether a *top-level* transaction is
visible in an old snapshot (pg_visible_in_snapshot), but is wrong for subtransactions (a savepoint,
a PL/pgSQL block with EXCEPTION): no snapshot lists their ids. So the rows that were read decide
what was seen:

    every transaction below `below`, the oldest that still ran at the last poll: it had ended, and
    so had its subtransactions, whose ids are higher than its own
    of those above, the ones of which a row was read

All rows of a transaction become visible at once. So once a row of a transaction has been read, no
other row of it can appear later in the range that was scanned.

There are two kinds of scans. A *full* (whole) scan reads all rows of the table. A *near* scan reads
by an index the rows whose cursor is at or above `floor`, which stays the same between full scans. A
full scan delivers what the last full one had not seen, except what near scans have delivered since:
rows at or above `floor` whose transaction is in `last`. So a row is delivered once, whatever its
cursor: old, null, or set back by hand. The cursor decides only when.

Source: PostgreSQL documentation, "Transaction ID and Snapshot Information Functions", "Transactions
and Identifiers", "System Columns".
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from psycopg import sql

from ingestd.model.recorded import Recorded, RecordError, read_json
from ingestd.postgres.polling.keys.lake_keys import WHOLE, KeyPartition
from ingestd.postgres.polling.polled_table import PolledTable

FullXids = NDArray[np.int64]

_NONE: FullXids = np.empty(0, np.int64)
MAX_AGE = (1 << 31) - 1
"""The maximum age of a transaction id: Postgres can't distinguish older ones."""
MAX_SEEN = 1_000_000
"""The maximum number of transactions kept apart, of those above the oldest running one."""
MOST_TEXT_BYTES = 3 << 20
"""The maximum size of the text: it must fit into a line of a commit (`MOST_LINE_BYTES` there)."""
_SHORT = 250_000
"""A text of so few transactions is below that size, whatever their ids."""
_MOST_PARTS = 1 << 32
_MOST_SALT = (1 << 63) - 1
_PART_ITEMS = {2, 3}
"""Texts of old versions have no salt."""
_XID_BYTES = 8
_MOST_STEP = 1 << 41
_MOST_XID = 1 << 61
"""Of the lowest id: with MAX_SEEN steps above it, no sum overflows."""
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PollXids:
    """The 64-bit transaction ids that a poll's snapshot is bounded by.

    `oldest`: no transaction below it runs. `end`: none at or above it has ended. `next`: the id
    from which ``age(xmin)`` counts back in the poll's transaction.
    """

    oldest: int
    end: int
    next: int


@dataclass(frozen=True, slots=True)
class SeenXids:
    """Transactions whose rows were read: all below `below`, and `xids` (sorted, int64)."""

    below: int = 0
    xids: FullXids = field(default_factory=lambda: _NONE)

    def __eq__(self, other: object) -> bool:
        """Return whether both are the same transactions."""
        if not isinstance(other, SeenXids):
            return NotImplemented
        return self.below == other.below and np.array_equal(self.xids, other.xids)

    __hash__ = None  # type: ignore[assignment]

    def with_more(self, ids: PollXids, *more: FullXids) -> SeenXids:
        """Return these after a poll that read rows of `more`, and perhaps of some of these."""
        below = max(self.below, ids.oldest)
        xids = np.unique(np.concatenate([self.xids, *more]))
        return SeenXids(below, xids[xids >= below])

    def unseen(self, ids: PollXids) -> sql.Composable:
        """Return the SQL condition for rows of other transactions, as true or false.

        An age below 0 belongs to a row so old that its id has wrapped around.
        """
        oldest_age = min(max(ids.next - self.below, -1), MAX_AGE)
        condition = sql.SQL("pg_catalog.age(xmin) BETWEEN 0 AND {}").format(sql.Literal(oldest_age))
        if not len(self.xids):
            return condition
        ages = ",".join(str(age) for age in (ids.next - self.xids).tolist())
        return sql.SQL("({} AND NOT pg_catalog.age(xmin) = ANY ({}::pg_catalog.int4[]))").format(
            condition, sql.Literal("{" + ages + "}")
        )


@dataclass(frozen=True, slots=True)
class PollProgress:
    """How far a table has been polled.

    `whole`: seen by the last full scan; `last`: by any scan, in the range that it read. `floor`:
    text of the cursor from which near scans start; None: there are none. `ahead`: the next floor,
    once all transactions that ran at `ahead_end` have ended: a slow one may write an old cursor.
    `cursor`: the column of these values; `deleted`: the column that marks the rows left out.
    `lsn`: the server's position at the last poll: a server before it lacks what was seen.
    `swept_at`: when its last sweep ended, in Unix seconds by the daemon's clock; 0: not known.
    `key_partition`: the lake's keys that the current sweep is at.
    """

    whole: SeenXids
    last: SeenXids
    floor: str | None = None
    ahead: str | None = None
    ahead_end: int = 0
    cursor: str | None = None
    deleted: str | None = None
    lsn: int = 0
    swept_at: float = 0.0
    key_partition: KeyPartition = WHOLE

    @classmethod
    def initial(
        cls, ids: PollXids, xids: FullXids, peak: str | None, polled: PolledTable
    ) -> PollProgress:
        """Return the progress after a table has been read: its rows' `xids`, highest cursor."""
        seen = SeenXids().with_more(ids, xids)
        return cls(seen, seen, peak, peak, ids.end, polled.by, polled.deleted)

    @property
    def is_too_long(self) -> bool:
        """True if the ids are too many to be sent with each query, or to be recorded."""
        count = max(len(self.whole.xids), len(self.last.xids))
        if count <= _SHORT:
            return False
        written = (self.whole,) if self.last == self.whole else (self.whole, self.last)
        packed = sum(len(zlib.compress(_steps(s).tobytes(), 1)) for s in written)
        return count > MAX_SEEN or packed * 5 // 4 > MOST_TEXT_BYTES - (1 << 16)

    @property
    def below(self) -> int:
        """The id below which transactions are irrelevant."""
        return self.whole.below

    @property
    def end(self) -> int:
        """An id that the server has reached: nothing here belongs to a later transaction."""
        newest = (int(x) for seen in (self.whole, self.last) for x in seen.xids[-1:])
        return max(self.whole.below, self.last.below, self.ahead_end, *newest)

    def is_current(self, ids: PollXids) -> bool:
        """Return whether nothing can have been written since the last full scan."""
        return self.whole.below >= ids.end

    def after_near(self, ids: PollXids, xids: FullXids) -> PollProgress:
        """Return the progress after a near scan that read rows of these transactions."""
        return replace(self, last=self.last.with_more(ids, xids))

    def after_whole(self, ids: PollXids, xids: FullXids, peak: str | None) -> PollProgress:
        """Return the progress after a full scan that read rows of these transactions."""
        seen = self.whole.with_more(ids, self.last.xids, xids)
        if ids.oldest < self.ahead_end:
            return replace(self, whole=seen, last=seen)
        return replace(
            self,
            whole=seen,
            last=seen,
            floor=self.ahead,
            ahead=peak,
            ahead_end=ids.end,
        )

    def by(self, cursor: str | None) -> PollProgress:
        """Return the progress for scans by this cursor, which may be another one.

        With another cursor, what near scans have delivered since the last full scan is delivered
        once more: it can't be distinguished from what they did not see.
        """
        if cursor == self.cursor:
            return self
        return replace(self, last=self.whole, floor=None, ahead=None, ahead_end=0, cursor=cursor)

    def near_condition(self, cursor: sql.Composable, ids: PollXids) -> sql.Composable:
        """Return the SQL condition of a near scan. Only with a `floor`."""
        return sql.SQL("{} >= {} AND {}").format(
            cursor, sql.Literal(self.floor), self.last.unseen(ids)
        )

    def whole_condition(self, cursor: sql.Composable | None, ids: PollXids) -> sql.Composable:
        """Return the SQL condition of a full scan."""
        unseen = self.whole.unseen(ids)
        if cursor is None or self.floor is None or self.last == self.whole:
            return unseen
        return sql.SQL("{} AND ({} >= {} AND NOT {}) IS NOT TRUE").format(
            unseen, cursor, sql.Literal(self.floor), self.last.unseen(ids)
        )

    # --- as text -----------------------------------------------------------------------------

    def to_text(self) -> str:
        """Return the text for `TableBatch.resume`."""
        recorded = {
            "v": _FORMAT,
            "whole": _seen_text(self.whole),
            "last": None if self.last == self.whole else _seen_text(self.last),
            "floor": self.floor,
            "ahead": self.ahead,
            "ahead_end": self.ahead_end,
            "cursor": self.cursor,
            "deleted": self.deleted,
            "lsn": self.lsn,
            "swept_at": self.swept_at,
            "part": list(astuple(self.key_partition)),
        }
        return json.dumps(recorded, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> PollProgress | None:
        """Return the progress in a text of `to_text`; None for any other, as of another version."""
        try:
            return cls._parsed(read_json(text, MOST_TEXT_BYTES))
        except RecordError:
            return None

    @classmethod
    def _parsed(cls, recorded: Recorded) -> PollProgress:
        recorded.field("v").integer(_FORMAT, _FORMAT)
        whole = _seen(recorded.field("whole"))
        last = whole if recorded.field("last").is_null else _seen(recorded.field("last"))
        if last.below < whole.below:
            raise RecordError("its last scan precedes its last full one")
        # not in texts of old versions
        swept_at, part = recorded.field("swept_at"), recorded.field("part")
        return cls(
            whole,
            last,
            recorded.field("floor").optional_text(),
            recorded.field("ahead").optional_text(),
            recorded.field("ahead_end").integer(),
            recorded.field("cursor").optional_text(),
            recorded.field("deleted").optional_text(),
            recorded.field("lsn").integer(),
            0.0 if swept_at.is_null else swept_at.seconds(),
            WHOLE if part.is_null else _partition(part),
        )


def _seen_text(seen: SeenXids) -> list[Any]:
    """Return the ids as differences, compressed: most ids are consecutive."""
    if not len(seen.xids):
        return [seen.below, ""]
    return [seen.below, base64.b85encode(zlib.compress(_steps(seen).tobytes())).decode()]


def _steps(seen: SeenXids) -> FullXids:
    return np.diff(seen.xids, prepend=seen.below)


def _seen(recorded: Recorded) -> SeenXids:
    """Return the transactions; their ids ascend, from `below` on. Raises RecordError."""
    first, packed = recorded.items(2)
    below = first.integer(0, _MOST_XID)
    if not packed.text():
        return SeenXids(below)
    content = packed.packed(MAX_SEEN * _XID_BYTES)
    if len(content) % _XID_BYTES:
        raise RecordError("an id is cut off")
    steps = np.frombuffer(content, np.int64)
    if not len(steps) or steps[0] < 0 or (steps[1:] <= 0).any() or steps.max() > _MOST_STEP:
        raise RecordError("its ids do not ascend")
    return SeenXids(below, below + np.cumsum(steps))


def _partition(recorded: Recorded) -> KeyPartition:
    items = recorded.items()
    if len(items) not in _PART_ITEMS:
        raise RecordError("its part has other items than a number, a count and a salt")
    parts = items[1].integer(1, _MOST_PARTS)
    if parts & (parts - 1):
        raise RecordError("its parts are not a power of two")
    number = items[0].integer(0, parts - 1)
    # (without a salt, clients of the source choose the keys of a partition)
    return KeyPartition(number, parts, items[2].integer(0, _MOST_SALT)) if items[2:] else WHOLE
