"""An in-memory source and a capture of it that keeps the whole contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from ingestd.changes import DELETE, SNAPSHOT, TRUNCATE, Chunk, TableBatch, change_schema, idle_chunk
from ingestd.errors import TableError, TransientError
from ingestd.ports import Continuity, Discovery, Fresh, Lag, Lost, Refused, Resumed, Snapshot
from ingestd.positions import ZERO, Lsn
from ingestd.recorded import Committed, RegisteredTable
from ingestd.schema import Table, TableId

_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RECORD_BYTES = 16


@dataclass(frozen=True, slots=True)
class FakeChange:
    """One change: `op` c, u, d or t; `row` has the columns' values."""

    table: TableId
    op: str
    row: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FakeTransaction:
    """A committed transaction."""

    commit_lsn: Lsn
    end_lsn: Lsn
    xid: int
    at_us: int
    changes: tuple[FakeChange, ...]


class FakeDatabase:
    """Tables with keys, a log of transactions, one slot. Lives as long as the test wants."""

    def __init__(self, tables: Sequence[Table], origin: str = "fake-1") -> None:
        self.tables = list(tables)
        self.refused: list[Refused] = []
        self.locked: set[TableId] = set()
        self.unreadable: dict[TableId, TableError] = {}
        self.origin = origin
        self.log: list[FakeTransaction] = []
        self.current = Lsn(1000)
        self.slot: Lsn | None = None
        self.holder: object | None = None
        self.asks_for_checkpoint = False
        self._grown = asyncio.Event()

    def commit(self, *changes: FakeChange) -> FakeTransaction:
        """Commit a transaction."""
        commit_lsn = self.current
        self.current = Lsn(self.current + _RECORD_BYTES * (1 + len(changes)))
        now_us = (datetime.now(UTC) - _UNIX_EPOCH) // timedelta(microseconds=1)
        made = FakeTransaction(
            commit_lsn, self.current, 700 + len(self.log), now_us, tuple(changes)
        )
        self.log.append(made)
        self._wake()
        return made

    def write_elsewhere(self, nbytes: int) -> None:
        """Write WAL that has nothing captured."""
        self.current = Lsn(self.current + nbytes)
        self._wake()

    def rows(self, table: Table, point: Lsn | None = None) -> list[dict[str, object]]:
        """The table's rows after the transactions with commit_lsn below `point` (None: all)."""
        held: dict[tuple[object, ...], dict[str, object]] = {}
        for transaction in self.log:
            if point is not None and transaction.commit_lsn >= point:
                break
            for change in transaction.changes:
                if change.table == table.id:
                    _apply(held, table, change)
        return list(held.values())

    @property
    def growth(self) -> asyncio.Event:
        """Set when something is written after this was asked for."""
        return self._grown

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()


def _apply(
    held: dict[tuple[object, ...], dict[str, object]], table: Table, change: FakeChange
) -> None:
    key = tuple(change.row.get(name) for name in table.key)
    if change.op == TRUNCATE:
        held.clear()
    elif change.op == DELETE:
        held.pop(key, None)
    else:
        held[key] = dict(change.row)


class FakeCapture:
    """A ChangeCapture of a `FakeDatabase`.

    `rows_per_chunk`: transactions with more changes come in several, open chunks.
    """

    supports_replay = True

    def __init__(self, database: FakeDatabase, *, rows_per_chunk: int = 1000) -> None:
        self._database = database
        self._rows_per_chunk = rows_per_chunk
        self._tables: dict[TableId, Table] = {}
        self._discovered: tuple[object, ...] = ()
        self._delivered = ZERO

    async def claim(self) -> None:
        """Take the database's only place."""
        if self._database.holder not in {None, self}:
            raise TransientError("another daemon works on the fake", reason="claimed")
        self._database.holder = self

    async def discover(self, known: Mapping[TableId, RegisteredTable]) -> Discovery:
        """Give all tables."""
        base = self._database
        self._discovered = self._seen()
        rewritten = {
            table.id: "rewritten"
            for table in base.tables
            if table.id in known and table.storage != known[table.id].storage
        }
        return Discovery(
            tuple(base.tables),
            tuple(base.refused),
            base.origin,
            rewritten=rewritten,
            lsn=base.current,
        )

    async def tables_changed(self) -> None:
        """Compare, whenever something is written, with what was last discovered."""
        while self._seen() == self._discovered:
            await self._database.growth.wait()

    async def continuity(self, committed: Committed) -> Continuity:
        """Compare the slot with the lake."""
        slot = self._database.slot
        if committed.position is None or not any(map(committed.is_live, committed.tables)):
            return Fresh()
        if slot is None or slot > committed.position:
            return Lost(f"the fake's slot is at {slot}")
        return Resumed()

    async def prepare(self, tables: Sequence[Table], *, renew: bool = False) -> frozenset[TableId]:
        """Make the slot."""
        locked = frozenset(t.id for t in tables if t.id in self._database.locked)
        self._tables = {t.id: t for t in tables if t.id not in locked}
        if renew or self._database.slot is None:
            self._database.slot = self._database.current
        return locked

    async def snapshot(self, tables: Sequence[Table]) -> Snapshot:
        """Read at the present end of the log."""
        point = self._database.current
        self._delivered = max(self._delivered, point)
        return FakeSnapshot(self._database, tables, point)

    async def live(self, after: Lsn | None) -> AsyncGenerator[Chunk, None]:
        """Give one transaction a chunk, or several open ones of a large one."""
        base = self._database
        self._check_claim()
        assert base.slot is not None
        position = max(after or ZERO, base.slot)
        yield self._deliver(idle_chunk(position))
        while True:
            self._check_claim()
            found = [t for t in base.log if t.commit_lsn >= position]
            growth, end = base.growth, base.current
            for transaction in found:
                for chunk in self._chunks(transaction, position):
                    yield self._deliver(chunk)
                position = transaction.end_lsn
            if position < end:
                position = end
                yield self._deliver(idle_chunk(position))
            await growth.wait()

    def checkpoint_requested(self) -> bool:
        """Whether the test asked for it."""
        return self._database.asks_for_checkpoint

    async def confirm(self, position: Lsn) -> None:
        """Move the slot."""
        if position > self._delivered:
            msg = f"{position} was not delivered"
            raise ValueError(msg)
        slot = self._database.slot
        assert slot is not None
        self._database.slot = max(slot, position)

    async def lag(self) -> Lag:
        """Compare the slot with the end of the log."""
        base = self._database
        behind = None if base.slot is None else base.current - base.slot
        return Lag(base.current, base.slot, behind, behind, None)

    async def health(self) -> None:
        """Look whether the claim is still ours."""
        self._check_claim()

    async def close(self) -> None:
        """Give the place back."""
        if self._database.holder is self:
            self._database.holder = None

    def _check_claim(self) -> None:
        if self._database.holder is not self:
            raise TransientError("the claim on the fake is lost", reason="connection_lost")

    def _seen(self) -> tuple[object, ...]:
        return tuple(self._database.tables), tuple(self._database.refused)

    def _deliver(self, chunk: Chunk) -> Chunk:
        self._delivered = max(self._delivered, chunk.position)
        return chunk

    def _chunks(self, transaction: FakeTransaction, position: Lsn) -> list[Chunk]:
        numbered = [
            (seq, change)
            for seq, change in enumerate(
                (c for c in transaction.changes if c.table in self._tables), start=1
            )
        ]
        if not numbered:
            return [idle_chunk(transaction.end_lsn)]
        size = self._rows_per_chunk
        parts = [numbered[i : i + size] for i in range(0, len(numbered), size)]
        last = len(parts) - 1
        return [
            Chunk(
                batches=tuple(self._batches(transaction, part)),
                position=transaction.end_lsn if number == last else position,
                is_open=number < last,
                first_lsn=transaction.commit_lsn,
                commit_times=np.array([transaction.at_us] * (number == last), np.int64),
                nbytes=_RECORD_BYTES * len(part),
            )
            for number, part in enumerate(parts)
        ]

    def _batches(
        self, transaction: FakeTransaction, part: Sequence[tuple[int, FakeChange]]
    ) -> list[TableBatch]:
        found: dict[TableId, list[dict[str, Any]]] = {}
        for seq, change in part:
            row = {
                **change.row,
                "_cdc_op": change.op,
                "_cdc_lsn": int(transaction.commit_lsn),
                "_cdc_seq": seq,
                "_cdc_xid": transaction.xid,
                "_cdc_ts": _UNIX_EPOCH + timedelta(microseconds=transaction.at_us),
            }
            found.setdefault(change.table, []).append(row)
        return [_batch(self._tables[name], rows) for name, rows in found.items()]


class FakeSnapshot:
    """The tables' rows at a point."""

    def __init__(self, database: FakeDatabase, tables: Sequence[Table], point: Lsn) -> None:
        self._database = database
        self._tables = tables
        self.point = point
        self.at = datetime.now(UTC)

    async def pages(self) -> AsyncGenerator[TableBatch | TableError, None]:
        """Give a page a table, none for an empty one."""
        for table in self._tables:
            if table.id in self._database.unreadable:
                yield self._database.unreadable[table.id]
                continue
            rows = [
                {
                    **row,
                    "_cdc_op": SNAPSHOT,
                    "_cdc_lsn": int(self.point),
                    "_cdc_seq": 0,
                    "_cdc_ts": self.at,
                }
                for row in self._database.rows(table, self.point)
            ]
            if rows:
                yield _batch(table, rows)

    def progress(self, table: TableId) -> float:
        """A table is one page."""
        del table
        return 1.0

    async def move_on(self) -> None:
        """Write something."""
        self._database.write_elsewhere(_RECORD_BYTES)

    async def close(self) -> None:
        """Nothing is held."""


def _batch(table: Table, rows: Sequence[Mapping[str, Any]]) -> TableBatch:
    schema = change_schema(table)
    arrays = [pa.array([row.get(f.name) for row in rows], f.type) for f in schema]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    return TableBatch(table, batch, _RECORD_BYTES * len(rows))
