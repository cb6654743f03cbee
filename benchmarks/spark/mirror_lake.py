"""Raw tables of any size, written by the daemon's sink without a server, and the expected rows.

A row's values are computed from its id and its *turn*, the change that wrote it (0: the first
load). So the rows that a mirror must have can be computed without reading any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ingestd.lake.delta_lake import DeltaLake
from ingestd.model.changes import (
    DELETE,
    INSERT,
    SNAPSHOT,
    UPDATE,
    EpochSummary,
    TableBatch,
    change_schema,
    marker_batch,
)
from ingestd.model.lake_state import TableEvent, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TIMESTAMP, Column, Table, TableId

Ints = NDArray[np.int64]

UNSENT = "payload"
"""The column that the server does not send if an update does not change it (TOASTed)."""
NEVER = -1

_NUMERIC_12_2 = ((12 << 16) | 2) + 4
_COLUMNS = (
    Column("id", 20, -1, pa.int64(), "bigint", identity=True, nullable=False),
    Column("customer", 23, -1, pa.int32(), "integer"),
    Column("amount", 1700, _NUMERIC_12_2, pa.decimal128(12, 2), "numeric(12,2)"),
    Column("status", 1043, 24, pa.string(), "character varying(20)"),
    Column("note", 25, -1, pa.string(), "text"),
    Column("is_open", 16, -1, pa.bool_(), "boolean"),
    Column("created", 1184, -1, TIMESTAMP, "timestamp with time zone"),
    Column("due", 1082, -1, pa.date32(), "date"),
    Column("score", 701, -1, pa.float64(), "double precision"),
    Column(UNSENT, 3802, -1, pa.string(), "jsonb"),
)
COLUMNS = tuple(c.name for c in _COLUMNS)
_AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
_EPOCH_2024_US, _EPOCH_2024_DAYS = 1_704_067_200_000_000, 19_723


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of one transaction, in order: operation, id, and whether UNSENT is sent."""

    ops: list[str]
    ids: Ints
    is_sent: NDArray[np.bool_]


@dataclass(slots=True)
class MadeTable:
    """A table of `rows` rows, and the turns that wrote each row, by id - 1; NEVER: no such row.

    `turn`: the row's last change; `sent`: the last one that sent UNSENT.
    """

    name: str
    rows: int
    room: int
    turn: Ints = field(init=False)
    sent: Ints = field(init=False)
    turns: int = 0

    def __post_init__(self) -> None:
        self.turn = np.full(self.rows + self.room, NEVER, np.int64)
        self.turn[: self.rows] = 0
        self.sent = self.turn.copy()
        self._next_id = self.rows + 1

    _next_id: int = 0

    @property
    def table(self) -> Table:
        """The source's table."""
        return Table(TableId("public", self.name), 1, _COLUMNS, "d", ("id",), ("id",))

    def updates(self, rng: np.random.Generator, count: int, unsent: float) -> Changes:
        """Draw updates of random rows, also repeated; a share does not change UNSENT."""
        there = np.flatnonzero(self.turn != NEVER) + 1
        ids = there[rng.integers(0, len(there), count)]
        return Changes([UPDATE] * count, ids, rng.random(count) >= unsent)

    def mixed(self, rng: np.random.Generator, count: int, unsent: float) -> Changes:
        """Draw updates, a tenth inserts, a tenth deletes; each row at most once."""
        tenth = count // 10
        there = rng.permutation(np.flatnonzero(self.turn != NEVER) + 1)[: count - tenth]
        new = np.arange(self._next_id, self._next_id + tenth)
        self._next_id += tenth
        ops = [DELETE] * tenth + [UPDATE] * (count - 2 * tenth) + [INSERT] * tenth
        is_sent = rng.random(count) >= unsent
        is_sent[-tenth:] = True
        return Changes(ops, np.concatenate([there, new]), is_sent)

    def load(self, lsn: int) -> TableBatch:
        """Return the rows of the first load."""
        ids = np.arange(1, self.rows + 1)
        turns = np.zeros(self.rows, np.int64)
        ops = [SNAPSHOT] * self.rows
        return self._batch(ops, _values(ids, turns, turns), lsn, np.zeros(self.rows, np.int64))

    def take(self, changes: Changes, lsn: int) -> TableBatch:
        """Record the changes, and return them as rows."""
        count = len(changes.ids)
        turns = np.arange(self.turns + 1, self.turns + 1 + count)
        self.turns += count
        places = changes.ids - 1
        is_deleted = np.array([op == DELETE for op in changes.ops])
        # numpy assigns in order, so the last of several assignments to an index wins.
        self.turn[places] = np.where(is_deleted, NEVER, turns)
        self.sent[places[changes.is_sent]] = turns[changes.is_sent]
        values = _values(changes.ids, turns, np.where(changes.is_sent, turns, NEVER))
        if is_deleted.any():
            gone = pa.array(is_deleted)
            for name in COLUMNS[1:]:
                values[name] = pc.if_else(gone, pa.scalar(None, values[name].type), values[name])
        unchanged = ~changes.is_sent & ~is_deleted
        return self._batch(changes.ops, values, lsn, np.arange(1, count + 1), unchanged)

    def write_expected(self, path: Path) -> None:
        """Write the current rows as Parquet."""
        there = np.flatnonzero(self.turn != NEVER)
        values = _values(there + 1, self.turn[there], self.sent[there])
        pq.write_table(pa.table(values), path)

    def _batch(
        self,
        ops: list[str],
        values: dict[str, pa.Array],
        lsn: int,
        seqs: Ints,
        unchanged: NDArray[np.bool_] | None = None,
    ) -> TableBatch:
        schema, count = change_schema(self.table), len(ops)
        made = {
            **values,
            "_cdc_op": pa.array(ops),
            "_cdc_lsn": pa.array(np.full(count, lsn)),
            "_cdc_seq": pa.array(seqs),
            "_cdc_xid": pa.array(np.full(count, 7)),
            "_cdc_ts": pa.array([_AT] * count, TIMESTAMP),
        }
        if unchanged is not None:
            made["_cdc_unchanged"] = _lists(unchanged, schema.field("_cdc_unchanged").type)
        arrays = [made[f.name] if f.name in made else pa.nulls(count, f.type) for f in schema]
        rows = pa.RecordBatch.from_arrays(arrays, schema=schema)
        return TableBatch(self.table, rows, rows.nbytes)


def _lists(is_unchanged: NDArray[np.bool_], type_: pa.DataType) -> pa.Array:
    """Return ``[UNSENT]`` where it is unchanged, else null."""
    offsets = np.concatenate([[0], np.cumsum(is_unchanged)]).astype(np.int32)
    elements = pa.array([UNSENT] * int(offsets[-1]), pa.string())
    mask = pa.array(~is_unchanged)
    return pa.ListArray.from_arrays(pa.array(offsets), elements, type=type_, mask=mask)


def _values(ids: Ints, turns: Ints, sent: Ints) -> dict[str, pa.Array]:
    """Return the columns of rows written by these turns; UNSENT by those of `sent`, NEVER: null."""
    id_text, turn_text = pa.array(ids).cast(pa.string()), pa.array(turns).cast(pa.string())
    cents = pa.array((ids * 7 + turns) % 99_999).cast(pa.decimal128(19, 0))
    payload = _join('{"k": ', id_text, ', "v": ', pa.array(sent).cast(pa.string()), "}")
    return {
        "id": pa.array(ids),
        "customer": pa.array(((ids + turns) % 10_000).astype(np.int32)),
        "amount": pc.multiply(cents, Decimal("0.01")).cast(pa.decimal128(12, 2)),
        "status": _join("status-", pa.array((ids + turns) % 7).cast(pa.string())),
        "note": _join("note number ", id_text, " of turn ", turn_text),
        "is_open": pa.array((ids + turns) % 3 == 0),
        "created": pa.array(_EPOCH_2024_US + (ids + turns) * 1_000_000).cast(TIMESTAMP),
        "due": pa.array((_EPOCH_2024_DAYS + (ids + turns) % 365).astype(np.int32), pa.date32()),
        "score": pa.array((ids + turns) / 7.0),
        UNSENT: pc.if_else(pa.array(sent == NEVER), pa.scalar(None, pa.string()), payload),
    }


def _join(*parts: str | pa.Array) -> pa.Array:
    scalars = [pa.scalar(part) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*scalars, "")


class MadeLake:
    """A source's lake at `uri`, written epoch by epoch, with increasing positions."""

    def __init__(self, uri: Path, source: str) -> None:
        self.uri = uri
        self.source = source
        self._lsn = 0

    def load(self, tables: Sequence[MadeTable]) -> None:
        """Commit the first load of these tables, in one epoch, and record them as live."""
        asyncio.run(self._load(tables))

    def change(self, changes: Sequence[tuple[MadeTable, Changes]]) -> None:
        """Commit one epoch of one transaction with these changes."""
        lsn = self._next_lsn()
        asyncio.run(self._commit([table.take(these, lsn) for table, these in changes], lsn))

    def _next_lsn(self) -> int:
        self._lsn += 1_000
        return self._lsn

    async def _load(self, tables: Sequence[MadeTable]) -> None:
        lsn = self._next_lsn()
        batches = []
        for made in tables:
            batches += [marker_batch(made.table, Lsn(lsn), _AT), made.load(lsn)]
        events = [
            TableEvent(made.table, TableState.LIVE, datetime.now(UTC), Lsn(lsn), Lsn(lsn))
            for made in tables
        ]
        await self._commit(batches, lsn, events, is_read=True)

    async def _commit(
        self,
        batches: Sequence[TableBatch],
        lsn: int,
        events: Sequence[TableEvent] = (),
        *,
        is_read: bool = False,
    ) -> None:
        sink = DeltaLake(str(self.uri), self.source)
        try:
            await sink.open()
            await sink.adopt("7000000000000000001")
            writer = sink.begin_epoch()
            for batch in batches:
                await writer.append_batch(batch, from_snapshot=is_read)
            nbytes = sum(batch.nbytes for batch in batches)
            await writer.commit(EpochSummary(Lsn(lsn), Lsn(lsn + 10), _AT, 1, nbytes))
            await sink.record(events)
        finally:
            await sink.close()
