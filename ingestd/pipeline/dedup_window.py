"""What the stream brings of a table while its rows are read in chunks (design section 8.9, way b).

A chunk's rows lie at a position W of the WAL and are those that its snapshot saw, which may lack
what transactions did that committed below W: a commit is in the WAL before others see it. The rows
that such transactions touched are left out of the chunk: their changes are in the stream.

A change is complete but for what was TOASTed and not sent. Of a row that is read later, or never
(an update put it into a block that was read before), that is missing: it is read by its key.

See docs/snapshots.md.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.model.changes import TRUNCATE, TableBatch
from ingestd.model.keys import Key, key_rows, new_keys, old_keys
from ingestd.model.lsn import Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import Table, TableId

Ints = NDArray[np.int64]
NONE: Ints = np.empty(0, np.int64)

MOST_UNSENT = 100_000
"""Rows without their values are kept as keys, each once, beyond so many."""


@dataclass(frozen=True, slots=True)
class _Changes:
    """Changes that a snapshot may not see: their transactions, positions and what has the keys."""

    table: Table
    xids: Ints
    lsns: Ints
    rows: pa.RecordBatch

    def where(self, mask: NDArray[np.bool_]) -> _Changes:
        return _Changes(
            self.table, self.xids[mask], self.lsns[mask], self.rows.filter(pa.array(mask))
        )

    def keys(self) -> Iterator[Key]:
        yield from new_keys(self.table, self.rows)
        yield from old_keys(
            self.table, self.rows.filter(self.rows.column("_cdc_before").is_valid())
        )


class DedupWindow:
    """One table's changes since its reading began, as far as chunks to come need them.

    `floor`: a snapshot older than any chunk's; what it sees every chunk sees. Memory: the keys of
    what has been delivered and is not seen by the oldest chunk under way, and of updates that lack
    values. `before`: the transactions that were delivered until now. `is_void`: the keys are others
    now, which can't be compared with those of before.
    """

    def __init__(self, table: Table, floor: PgSnapshot, before: Ints) -> None:
        self._key = table.identifying
        self._floor = floor
        self._before = before
        self.is_void = False
        self._is_closed = False
        self._changes: list[_Changes] = []
        self._unsent: deque[tuple[Table, pa.RecordBatch]] = deque()
        self._unsent_rows = 0
        self._again: set[Key] = set()
        self._asked: set[Key] = set()

    def take(self, batch: TableBatch) -> None:
        """Note changes that the stream brought."""
        if self.is_void or batch.table.identifying != self._key:
            self.is_void = True
            return
        rows = batch.rows
        rows = rows.filter(pc.not_equal(rows.column("_cdc_op"), TRUNCATE))
        lsns = rows.column("_cdc_lsn").to_numpy(zero_copy_only=False)
        xids = rows.column("_cdc_xid").to_numpy(zero_copy_only=False)
        changes = _Changes(batch.table, xids, lsns, key_rows(batch.table, rows))
        self._keep(changes.where(~self._floor.sees(xids)))
        self.owe(batch.table, rows)

    def owe(self, table: Table, rows: pa.RecordBatch) -> None:
        """Note the rows among these changes that lack values that were not sent."""
        lacking = rows.filter(rows.column("_cdc_unchanged").is_valid())
        if self._is_closed:  # one that is still owed may have got another key
            lacking = lacking.filter(lacking.column("_cdc_before").is_valid())
            for new, old in zip(new_keys(table, lacking), old_keys(table, lacking), strict=True):
                if new != old and (old in self._again or old in self._asked):
                    self._again.add(new)
        elif lacking.num_rows:
            self._unsent.append((table, key_rows(table, lacking)))
            self._unsent_rows += lacking.num_rows
            if self._unsent_rows > MOST_UNSENT:  # the same ones again and again, it may be
                self._again |= self._take_unsent(sys.maxsize)

    def is_settled(self, point: Lsn, seen: PgSnapshot) -> bool:
        """Whether chunks may begin: this snapshot, and so each to come, sees all below `point`.

        And whatever was delivered before this began, of which the keys are not known.
        """
        return bool(seen.sees(self._before).all()) and not self.overtaken(point, seen)

    def close(self) -> None:
        """Record that every row has been read, but for what is owed: a change has one before it."""
        self._is_closed = True
        self._again |= self._take_unsent(sys.maxsize)

    def pass_floor(self, seen: PgSnapshot) -> None:
        """Record that no chunk to come is older than this snapshot."""
        self._floor = seen
        changes, self._changes = self._changes, []
        for part in changes:
            self._keep(part.where(~seen.sees(part.xids)))

    def overtaken(self, position: Lsn, seen: PgSnapshot) -> set[Key]:
        """Return the keys whose changes lie below `position` and are not seen there."""
        found: set[Key] = set()
        for part in self._changes:
            mask = (part.lsns < position) & ~seen.sees(part.xids)
            if mask.any():
                found.update(part.where(mask).keys())
        return found

    def fresh(self, page: TableBatch, position: Lsn, seen: PgSnapshot) -> TableBatch:
        """Return rows that a chunk read, without those whose newer changes lie below them."""
        self.is_void |= page.table.identifying != self._key
        overtaken = self.overtaken(position, seen)
        if not overtaken:
            return page
        keys = new_keys(page.table, page.rows)
        kept = pa.array([key not in overtaken for key in keys], pa.bool_())
        rows = page.rows.filter(kept)
        nbytes = page.nbytes * rows.num_rows // max(1, page.rows.num_rows)
        return TableBatch(page.table, rows, nbytes)

    @property
    def owes(self) -> int:
        """How many rows must be read by their keys, those counted twice that changed twice."""
        return len(self._again) + self._unsent_rows

    def owe_again(self, keys: set[Key]) -> None:
        """Record that the rows asked for were read; these were superseded meanwhile."""
        self._again |= keys
        self._asked = set()

    def take_unsent(self, limit: int) -> set[Key]:
        """Return about `limit` keys of rows to be read, once; then say `owe_again`."""
        self._asked = self._take_unsent(limit)
        return self._asked

    def _take_unsent(self, limit: int) -> set[Key]:
        keys = set(islice(self._again, limit))
        self._again -= keys
        while self._unsent and len(keys) < limit:
            table, rows = self._unsent.popleft()
            room = limit - len(keys)
            if rows.num_rows > room:
                self._unsent.appendleft((table, rows.slice(room)))
                rows = rows.slice(0, room)
            keys.update(new_keys(table, rows))
            self._unsent_rows -= rows.num_rows
        return keys

    def _keep(self, changes: _Changes) -> None:
        if len(changes.xids):
            self._changes.append(changes)


class RecentXids:
    """Transactions that the stream has delivered of each table, until a snapshot sees them.

    A table's reading must not begin before: `DedupWindow` knows only what comes after its start.
    """

    def __init__(self) -> None:
        self._xids: dict[TableId, list[Ints]] = {}

    def take(self, batch: TableBatch) -> None:
        """Note changes that the stream brought."""
        xids = batch.rows.column("_cdc_xid").drop_null().to_numpy(zero_copy_only=False)
        others = xids[1:][xids[1:] != xids[:-1]]
        once = np.concatenate([xids[:1], others]).astype(np.int64)
        self._xids.setdefault(batch.table.id, []).append(once)

    @property
    def count(self) -> int:
        """How many are remembered."""
        return sum(len(part) for parts in self._xids.values() for part in parts)

    def forget(self, seen: PgSnapshot) -> None:
        """Record that a snapshot sees what it sees, and all later ones do."""
        for name, parts in list(self._xids.items()):
            xids = np.unique(np.concatenate(parts))
            xids = xids[~seen.sees(xids)]
            if len(xids):
                self._xids[name] = [xids]
            else:
                del self._xids[name]

    def of(self, table: TableId) -> Ints:
        """Return those of a table."""
        return np.concatenate([NONE, *self._xids.get(table, ())])
