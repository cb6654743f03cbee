"""In-memory tables, and what reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from ingestd.changes import change_schema
from ingestd.errors import TransientError
from ingestd.ports import Split, TableInfo
from ingestd.predicates import Predicate
from ingestd.schema import Table, TableId

Row = Mapping[str, object]

ROW_BYTES = 100
"""What a fake says that a row weighs."""


class FakeMetadata:
    """The catalog of a database that never was.

    `answers`: unset it, and every question runs into the time limit.
    """

    def __init__(self, tables: Sequence[TableInfo], *, timeout_s: float = 10.0) -> None:
        self._tables = sorted(tables, key=lambda t: t.id)
        self._timeout_s = timeout_s
        self.answers = asyncio.Event()
        self.answers.set()

    async def schemas(self) -> Sequence[str]:
        """Give the schemas that have tables."""
        await self._answer()
        return sorted({t.id.schema for t in self._tables})

    async def tables(self, schema: str | None = None) -> Sequence[TableInfo]:
        """Give the tables of a schema, or all."""
        await self._answer()
        return [t for t in self._tables if schema in {None, t.id.schema}]

    async def _answer(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.answers.wait()
        except TimeoutError as error:
            msg = f"fake metadata: no answer within {self._timeout_s:g} s"
            raise TransientError(msg, reason="timeout") from error


class FakeTables:
    """Tables with rows, and snapshots of them."""

    def __init__(self) -> None:
        self._rows: dict[TableId, list[Row]] = {}
        self._snapshots: dict[str, dict[TableId, tuple[Row, ...]]] = {}

    def insert(self, table: TableId, rows: Sequence[Row]) -> None:
        """Add rows: a value for each column, as pyarrow takes it for the column's type."""
        self._rows.setdefault(table, []).extend(rows)

    def delete_all(self, table: TableId) -> None:
        """Remove all rows."""
        self._rows.pop(table, None)

    def export_snapshot(self) -> str:
        """Keep the tables as they are now, under a name."""
        name = f"fake-{len(self._snapshots) + 1}"
        self._snapshots[name] = {table: tuple(rows) for table, rows in self._rows.items()}
        return name

    def end_snapshot(self, name: str) -> None:
        """Forget a snapshot."""
        del self._snapshots[name]

    def seen_by(self, snapshot: str, table: TableId) -> tuple[Row, ...]:
        """Give a table's rows under a snapshot. Raises TransientError (``snapshot_gone``)."""
        if snapshot not in self._snapshots:
            raise TransientError(
                f"snapshot {snapshot}: whoever exported it has ended", reason="snapshot_gone"
            )
        return self._snapshots[snapshot].get(table, ())


class FakeSplitManager:
    """Cuts by numbers of rows."""

    def __init__(self, tables: FakeTables) -> None:
        self._tables = tables

    async def splits(self, table: Table, snapshot: str, target_bytes: int) -> Sequence[Split]:
        """Cut into runs of rows."""
        if target_bytes <= 0:
            msg = f"target_bytes must be above 0, not {target_bytes}"
            raise ValueError(msg)
        count = len(self._tables.seen_by(snapshot, table.id))
        step = max(1, target_bytes // ROW_BYTES)
        return [
            Split(table, snapshot, f"{start}:{start + step}", ROW_BYTES * min(step, count - start))
            for start in range(0, max(1, count), step)
        ]


class FakePageSource:
    """Reads a split of a `FakeTables`, some rows a batch."""

    def __init__(
        self,
        tables: FakeTables,
        split: Split,
        columns: Sequence[str] | None = None,
        predicates: Sequence[Predicate] = (),
        *,
        rows_per_batch: int = 100,
    ) -> None:
        table = split.table
        self._tables = tables
        self._split = split
        self._names = [c.name for c in table.columns] if columns is None else list(columns)
        schema = change_schema(table)
        self._schema = pa.schema([schema.field(n) for n in [*self._names, "_cdc_raw"]])
        self._remaining = tuple(predicates)
        for predicate in predicates:
            table.column(predicate.column)
        self._rows_per_batch = rows_per_batch
        self._is_closed = False

    @property
    def remaining(self) -> Sequence[Predicate]:
        """All predicates."""
        return self._remaining

    async def batches(self) -> AsyncIterator[pa.RecordBatch]:
        """Give the rows."""
        start, end = map(int, self._split.where.split(":"))
        rows = self._tables.seen_by(self._split.snapshot, self._split.table.id)[start:end]
        for first in range(0, len(rows), self._rows_per_batch):
            if self._is_closed:
                return
            yield _batch(self._schema, rows[first : first + self._rows_per_batch])
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Give no more."""
        self._is_closed = True


class FakeReferenceTable:
    """A keyed table with the log of what was done to it."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.log: list[tuple[str, Row]] = []

    def upsert(self, row: Row) -> None:
        """Insert or update a row."""
        self.log.append(("u", row))

    def delete(self, row: Row) -> None:
        """Delete the row with this key."""
        self.log.append(("d", row))

    def rows(self, version: int) -> list[Row]:
        """Give the rows after the first `version` entries of the log."""
        held: dict[tuple[object, ...], Row] = {}
        for op, row in self.log[:version]:
            key = tuple(row[name] for name in self.table.key)
            if op == "d":
                held.pop(key, None)
            else:
                held[key] = row
        return list(held.values())


class FakeReferenceTableSource:
    """A ReferenceTableSource of a `FakeReferenceTable`, which outlives it.

    Changes have the table's columns and `_cdc_op`: `u` (insert or update) or `d` (the key only).
    """

    def __init__(self, reference: FakeReferenceTable, *, rows_per_poll: int = 2) -> None:
        self._reference = reference
        self._rows_per_poll = rows_per_poll
        schema = change_schema(reference.table)
        columns = [schema.field(c.name) for c in reference.table.columns]
        self._row_schema = pa.schema(columns)
        self._change_schema = pa.schema([*columns, schema.field("_cdc_op")])
        self._version: int | None = None
        self._given = 0
        self._is_complete = False

    async def poll_snapshot(self) -> pa.RecordBatch | None:
        """Give some rows; the first poll settles which."""
        if self._is_complete:
            return None
        if self._version is None:  # what a real source does while the server prepares
            self._version = len(self._reference.log)
            return _batch(self._row_schema, [])
        rows = self._reference.rows(self._version)[self._given :][: self._rows_per_poll]
        self._given += len(rows)
        self._is_complete = not rows
        return _batch(self._row_schema, rows) if rows else None

    def is_snapshot_complete(self) -> bool:
        """Whether `poll_snapshot` gave None."""
        return self._is_complete

    async def poll_changes(self) -> pa.RecordBatch | None:
        """Give what was logged since."""
        if not self._is_complete:
            return None
        assert self._version is not None
        found = self._reference.log[self._version :]
        self._version += len(found)
        key = self._reference.table.key
        rows = [
            {**(row if op == "u" else {name: row[name] for name in key}), "_cdc_op": op}
            for op, row in found
        ]
        return _batch(self._change_schema, rows)

    def checkpoint(self) -> bytes:
        """Give the place in the log and in the snapshot."""
        return json.dumps([self._version, self._given, self._is_complete]).encode()

    def restore(self, checkpoint: bytes) -> None:
        """Go on there."""
        self._version, self._given, self._is_complete = json.loads(checkpoint)

    async def close(self) -> None:
        """Nothing is held."""


def _batch(schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    arrays = [pa.array([row.get(f.name) for row in rows], f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
