"""An in-memory source: a log of transactions and their visibility.

As in Postgres, a transaction is in the log before others see it, and transactions may become
visible in another order than that of the log. Everything else follows from the log: a table's rows
at a position or for a snapshot, and the blocks that contain them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import numpy as np

from ingestd.model.changes import DELETE, TRUNCATE
from ingestd.model.errors import TableError
from ingestd.model.lsn import Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import Table, TableId
from ingestd.ports import Refused
from ingestd.process.clock import utc_now

UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
RECORD_BYTES = 16
BLOCK_ROWS = 2
"""Row versions in a block, for changes that do not set the block."""
REWRITE = "rewrite"
"""`op` of a log record of VACUUM FULL, which is not a change and is not streamed."""
_FIRST_XID = 700


@dataclass(frozen=True, slots=True)
class FakeChange:
    """One change: `op` c, u, d or t.

    `row` has the values that the columns then have in the source. `before`: the old key if an
    update changed it. `unchanged`: columns whose values the stream does not send (TOAST). `block`:
    the block of the row's new version; None appends it.
    """

    table: TableId
    op: str
    row: Mapping[str, object] = field(default_factory=dict)
    before: Mapping[str, object] | None = None
    unchanged: tuple[str, ...] = ()
    block: int | None = None


@dataclass(frozen=True, slots=True)
class FakeTransaction:
    """A committed transaction."""

    commit_lsn: Lsn
    end_lsn: Lsn
    xid: int
    at_us: int
    changes: tuple[FakeChange, ...]


@dataclass(frozen=True, slots=True)
class Version:
    """A row as a snapshot sees it, and its block."""

    row: Mapping[str, object]
    block: int


Condition = Callable[[Mapping[str, object]], bool]


def _every(_row: Mapping[str, object]) -> bool:
    return True


class FakeDatabase:
    """Tables with keys, a log of transactions and one slot. The test determines its lifetime."""

    def __init__(self, tables: Sequence[Table], server_id: str = "fake-1") -> None:
        self.tables = list(tables)
        self.refused: list[Refused] = []
        self.locked: set[TableId] = set()
        self.conditions: dict[str, Condition] = {}
        self.unreadable: dict[TableId, TableError] = {}
        self.server_id = server_id
        self.log: list[FakeTransaction] = []
        self.current = Lsn(1000)
        self.slot: Lsn | None = None
        self.holder: object | None = None
        self.asks_for_checkpoint = False
        self._next_xid = _FIRST_XID
        self._running: set[int] = set()
        self._ends: Counter[TableId] = Counter()
        self._grown = asyncio.Event()

    # --- writing ------------------------------------------------------------------------------

    def commit(self, *changes: FakeChange) -> FakeTransaction:
        """Commit a transaction that is visible at once."""
        xid = self.begin_transaction()
        made = self.write_commit(xid, *changes)
        self.end_transaction(xid)
        return made

    def begin_transaction(self) -> int:
        """Begin a transaction; return its id."""
        xid, self._next_xid = self._next_xid, self._next_xid + 1
        self._running.add(xid)
        return xid

    def write_commit(self, xid: int, *changes: FakeChange) -> FakeTransaction:
        """Write a transaction and its commit to the log: streamed from now on, not yet visible."""
        commit_lsn = self.current
        self.current = Lsn(self.current + RECORD_BYTES * (1 + len(changes)))
        now_us = (utc_now() - UNIX_EPOCH) // timedelta(microseconds=1)
        placed = tuple(self._place(change) for change in changes)
        made = FakeTransaction(commit_lsn, self.current, xid, now_us, placed)
        self.log.append(made)
        self._wake()
        return made

    def _place(self, change: FakeChange) -> FakeChange:
        """Return the change with its block, which is the same for all snapshots."""
        if change.op == TRUNCATE:
            self._ends[change.table] = 0
        if change.op in {TRUNCATE, DELETE, REWRITE} or change.block is not None:
            return change
        self._ends[change.table] += 1
        return replace(change, block=(self._ends[change.table] - 1) // BLOCK_ROWS)

    def end_transaction(self, xid: int) -> None:
        """Make a transaction visible; one that was not logged is aborted."""
        self._running.remove(xid)
        self._wake()

    def rewrite(self, table: TableId) -> None:
        """Move the table's rows to other blocks of another file, as VACUUM FULL does."""
        self.commit(FakeChange(table, REWRITE))

    def write_elsewhere(self, nbytes: int) -> None:
        """Write WAL without captured changes."""
        self.current = Lsn(self.current + nbytes)
        self._wake()

    # --- reading ------------------------------------------------------------------------------

    def visibility(self) -> PgSnapshot:
        """Return the visibility of a snapshot taken now."""
        oldest = min(self._running, default=self._next_xid)
        return PgSnapshot(oldest, self._next_xid, frozenset(self._running))

    @property
    def running(self) -> frozenset[int]:
        """The transactions that are not visible yet."""
        return frozenset(self._running)

    def writers(self, table: TableId) -> frozenset[int]:
        """Return the logged transactions that changed a table and are not visible yet."""
        logged = {
            transaction.xid
            for transaction in self.log
            if any(change.table == table for change in transaction.changes)
        }
        return frozenset(self._running & logged)

    async def ended(self, xids: Collection[int]) -> None:
        """Return when none of these transactions is running."""
        while self._running & set(xids):
            await self._grown.wait()

    def rows(self, table: Table, point: Lsn | None = None) -> list[dict[str, object]]:
        """Return the table's rows after all transactions below `point` (None: all of them)."""
        return [dict(version.row) for version in self.versions(table, point)]

    def versions(self, table: Table, point: Lsn | None = None) -> list[Version]:
        """Return the same rows with their blocks."""
        return _versions([t for t in self.log if point is None or t.commit_lsn < point], table)

    def seen_rows(self, table: Table, seen_by: PgSnapshot) -> list[Version]:
        """Return the table's rows for a snapshot."""
        if not self.log:
            return []
        seen = seen_by.sees(np.array([t.xid for t in self.log], np.int64)).tolist()
        return _versions([t for t, is_seen in zip(self.log, seen, strict=True) if is_seen], table)

    def condition(self, where: str | None) -> Condition:
        """Return the meaning of an SQL condition, from `conditions`; None: every row."""
        return _every if where is None else self.conditions[where]

    def blocks(self, table: Table) -> int:
        """Return how many blocks the table's file has."""
        return 1 + max((version.block for version in _versions(self.log, table)), default=-1)

    def filenode(self, table: TableId) -> int:
        """Return the number of the table's file, which a rewrite or TRUNCATE replaces."""
        ops = [c.op for t in self.log for c in t.changes if c.table == table]
        return 1 + sum(op in {REWRITE, TRUNCATE} for op in ops)

    @property
    def growth(self) -> asyncio.Event:
        """An event that the next write sets."""
        return self._grown

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()


def _versions(log: Sequence[FakeTransaction], table: Table) -> list[Version]:
    """Return the row versions after these transactions."""
    held: dict[tuple[object, ...], Version] = {}
    for transaction in log:
        for change in transaction.changes:
            if change.table == table.id:
                _apply(held, table, change)
    return list(held.values())


def _apply(held: dict[tuple[object, ...], Version], table: Table, change: FakeChange) -> None:
    key = _key(change.row, table)
    if change.op == TRUNCATE:
        held.clear()
    elif change.op == REWRITE:
        # VACUUM FULL holds an exclusive lock: a snapshot that sees it sees all earlier changes.
        for place, found in enumerate(reversed(held)):
            held[found] = Version(held[found].row, place // BLOCK_ROWS)
    elif change.op == DELETE:
        held.pop(key, None)
    else:
        if change.before is not None:
            held.pop(_key(change.before, table), None)
        held[key] = Version(change.row, change.block or 0)


def _key(row: Mapping[str, object], table: Table) -> tuple[object, ...]:
    return tuple(row.get(name) for name in table.key)
