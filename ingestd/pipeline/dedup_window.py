"""A table's changes in the stream during an incremental read (design section 8.9, way b).

A chunk's rows lie at a position W of the WAL and are those that its snapshot saw. The snapshot may
lack transactions that committed below W: a commit is in the WAL before other sessions see it. Rows
that such a transaction touched are omitted from the chunk: their changes are in the stream.

A change is complete except for TOASTed values that were not sent. If the row is read later, or
never (an update moved it to a block that was already read), those values are missing. The row is
then read by its key.

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


@dataclass(frozen=True, slots=True)
class _Changes:
    """Changes that a snapshot may not see: their transactions, positions and key columns."""

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
    """One table's changes since its read began, as far as later chunks need them.

    `floor`: a snapshot older than that of any chunk; every chunk sees what it sees. Memory: the
    keys of changes that were delivered and that the oldest running chunk does not see, and of
    updates that lack values. `before`: the transactions delivered before. `is_void`: the key
    columns have changed, so that keys can't be compared with earlier ones. `most_unsent`: above
    this count, rows with unsent values are kept as keys, without duplicates.
    """

    def __init__(
        self, table: Table, floor: PgSnapshot, before: Ints, *, most_unsent: int = 100_000
    ) -> None:
        self._most_unsent = most_unsent
        self._key = table.identifying
        self._floor = floor
        self._before = before
        self.is_void = False
        self._is_closed = False
        self._changes: list[_Changes] = []
        self._unsent: deque[tuple[Table, pa.RecordBatch]] = deque()
        self._unsent_rows = 0
        self._requeued: set[Key] = set()
        self._requested: set[Key] = set()

    def record_changes(self, batch: TableBatch) -> None:
        """Record changes of the stream."""
        if self.is_void or batch.table.identifying != self._key:
            self.is_void = True
            return
        rows = batch.rows
        rows = rows.filter(pc.not_equal(rows.column("_cdc_op"), TRUNCATE))
        lsns = rows.column("_cdc_lsn").to_numpy(zero_copy_only=False)
        xids = rows.column("_cdc_xid").to_numpy(zero_copy_only=False)
        changes = _Changes(batch.table, xids, lsns, key_rows(batch.table, rows))
        self._keep(changes.where(~self._floor.sees(xids)))
        self.add_unsent_rows(batch.table, rows)

    def add_unsent_rows(self, table: Table, rows: pa.RecordBatch) -> None:
        """Record the rows among these changes that lack values that were not sent."""
        lacking = rows.filter(rows.column("_cdc_unchanged").is_valid())
        if self._is_closed:  # the key of a row that is still owed may have changed
            lacking = lacking.filter(lacking.column("_cdc_before").is_valid())
            for new, old in zip(new_keys(table, lacking), old_keys(table, lacking), strict=True):
                if new != old and (old in self._requeued or old in self._requested):
                    self._requeued.add(new)
        elif lacking.num_rows:
            self._unsent.append((table, key_rows(table, lacking)))
            self._unsent_rows += lacking.num_rows
            if self._unsent_rows > self._most_unsent:  # perhaps the same ones repeatedly
                self._requeued |= self._take_unsent(sys.maxsize)

    def is_settled(self, point: Lsn, seen: PgSnapshot) -> bool:
        """Return whether chunks may begin: each snapshot from this one on sees all below `point`.

        It must also see everything delivered before this window began: those keys are unknown.
        """
        return bool(seen.sees(self._before).all()) and not self.superseded_keys(point, seen)

    def close(self) -> None:
        """Record that all rows are read but those owed: later changes find their row."""
        self._is_closed = True
        self._requeued |= self._take_unsent(sys.maxsize)

    def advance_floor(self, seen: PgSnapshot) -> None:
        """Record that no later chunk is older than this snapshot."""
        self._floor = seen
        changes, self._changes = self._changes, []
        for part in changes:
            self._keep(part.where(~seen.sees(part.xids)))

    def superseded_keys(self, position: Lsn, seen: PgSnapshot) -> set[Key]:
        """Return the keys with changes that precede `position` but are not visible to `seen`."""
        found: set[Key] = set()
        for part in self._changes:
            mask = (part.lsns < position) & ~seen.sees(part.xids)
            if mask.any():
                found.update(part.where(mask).keys())
        return found

    def without_superseded(self, page: TableBatch, position: Lsn, seen: PgSnapshot) -> TableBatch:
        """Return the rows of a chunk, without those that newer changes in the stream supersede."""
        self.is_void |= page.table.identifying != self._key
        overtaken = self.superseded_keys(position, seen)
        if not overtaken:
            return page
        keys = new_keys(page.table, page.rows)
        kept = pa.array([key not in overtaken for key in keys], pa.bool_())
        rows = page.rows.filter(kept)
        nbytes = page.nbytes * rows.num_rows // max(1, page.rows.num_rows)
        return TableBatch(page.table, rows, nbytes)

    @property
    def rows_to_read(self) -> int:
        """Count of rows to read by their keys; a row that changed twice counts twice."""
        return len(self._requeued) + self._unsent_rows

    def requeue_keys(self, keys: set[Key]) -> None:
        """Record that the requested rows were read; these were superseded meanwhile."""
        self._requeued |= keys
        self._requested = set()

    def pop_unsent_keys(self, limit: int) -> set[Key]:
        """Return about `limit` keys of rows to read, each once; call `requeue_keys` afterwards."""
        self._requested = self._take_unsent(limit)
        return self._requested

    def _take_unsent(self, limit: int) -> set[Key]:
        keys = set(islice(self._requeued, limit))
        self._requeued -= keys
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
    """Transactions that the stream has delivered for each table, until a snapshot sees them.

    A table's read must not begin before that: `DedupWindow` knows only what comes after its start.
    """

    def __init__(self) -> None:
        self._xids: dict[TableId, list[Ints]] = {}

    def record_changes(self, batch: TableBatch) -> None:
        """Record changes of the stream."""
        xids = batch.rows.column("_cdc_xid").drop_null().to_numpy(zero_copy_only=False)
        others = xids[1:][xids[1:] != xids[:-1]]
        once = np.concatenate([xids[:1], others]).astype(np.int64)
        self._xids.setdefault(batch.table.id, []).append(once)

    @property
    def count(self) -> int:
        """Count of transactions remembered."""
        return sum(len(part) for parts in self._xids.values() for part in parts)

    def drop_visible(self, seen: PgSnapshot) -> None:
        """Remove the transactions that this snapshot sees: all later ones see them too."""
        for name, parts in list(self._xids.items()):
            xids = np.unique(np.concatenate(parts))
            xids = xids[~seen.sees(xids)]
            if len(xids):
                self._xids[name] = [xids]
            else:
                del self._xids[name]

    def of_table(self, table: TableId) -> Ints:
        """Return the transactions of a table."""
        return np.concatenate([NONE, *self._xids.get(table, ())])
