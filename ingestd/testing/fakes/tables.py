"""In-memory tables with their catalog, splits and readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from ingestd.model.changes import change_schema
from ingestd.model.errors import TransientError
from ingestd.model.predicates import Predicate
from ingestd.model.schema import Table, TableId
from ingestd.ports import Split, TableInfo

FakeRow = Mapping[str, object]

ROW_BYTES = 100
"""The size of a row that a fake reports."""


class FakeMetadata:
    """An in-memory catalog.

    `answers`: while this event is cleared, every call runs into the time limit.
    """

    def __init__(self, tables: Sequence[TableInfo], *, timeout_s: float = 10.0) -> None:
        self._tables = sorted(tables, key=lambda t: t.id)
        self._timeout_s = timeout_s
        self.answers = asyncio.Event()
        self.answers.set()

    async def schemas(self) -> Sequence[str]:
        """Return the schemas that have tables."""
        await self._answer()
        return sorted({t.id.schema for t in self._tables})

    async def tables(self, schema: str | None = None) -> Sequence[TableInfo]:
        """Return the tables of a schema, or all."""
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
        self._rows: dict[TableId, list[FakeRow]] = {}
        self._snapshots: dict[str, dict[TableId, tuple[FakeRow, ...]]] = {}

    def insert(self, table: TableId, rows: Sequence[FakeRow]) -> None:
        """Add rows: a value for each column, as pyarrow accepts it for the column's type."""
        self._rows.setdefault(table, []).extend(rows)

    def delete_all(self, table: TableId) -> None:
        """Remove all rows."""
        self._rows.pop(table, None)

    def export_snapshot(self) -> str:
        """Store the current tables under a new name."""
        name = f"fake-{len(self._snapshots) + 1}"
        self._snapshots[name] = {table: tuple(rows) for table, rows in self._rows.items()}
        return name

    def end_snapshot(self, name: str) -> None:
        """Remove a snapshot."""
        del self._snapshots[name]

    def seen_by(self, snapshot: str, table: TableId) -> tuple[FakeRow, ...]:
        """Return a table's rows under a snapshot. Raises TransientError (``snapshot_gone``)."""
        if snapshot not in self._snapshots:
            raise TransientError(
                f"snapshot {snapshot}: the session that exported it has ended",
                reason="snapshot_gone",
            )
        return self._snapshots[snapshot].get(table, ())


class FakeSplitManager:
    """Cuts tables by numbers of rows."""

    def __init__(self, tables: FakeTables) -> None:
        self._tables = tables

    async def splits(self, table: Table, snapshot: str, target_bytes: int) -> Sequence[Split]:
        """Cut a table into runs of rows."""
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
    """Reads a split of a `FakeTables`, in batches of `rows_per_batch` rows."""

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
        """Yield the rows."""
        start, end = map(int, self._split.where.split(":"))
        rows = self._tables.seen_by(self._split.snapshot, self._split.table.id)[start:end]
        for first in range(0, len(rows), self._rows_per_batch):
            if self._is_closed:
                return
            yield _batch(self._schema, rows[first : first + self._rows_per_batch])
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Stop returning rows."""
        self._is_closed = True


def _batch(schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    arrays = [pa.array([row.get(f.name) for row in rows], f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
