"""In-memory reference tables, with their sources and sinks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from ingestd.model.changes import DELETE, RESERVED_PREFIX, change_schema
from ingestd.model.errors import IngestdError, TransientError
from ingestd.model.schema import Table, in_name_order
from ingestd.ports import ReferenceState

FakeRow = Mapping[str, object]


class FakeReferenceTable:
    """A keyed table with the log of its changes.

    `faults`: errors that the next polls of a snapshot raise, one each.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.faults: list[IngestdError] = []
        self.log: list[tuple[str, FakeRow]] = []

    def upsert(self, row: FakeRow) -> None:
        """Insert or update a row."""
        self.log.append(("u", row))

    def delete(self, row: FakeRow) -> None:
        """Delete the row with this key."""
        self.log.append(("d", row))

    def truncate(self) -> None:
        """Remove all rows."""
        self.log.append(("t", {}))

    def rows(self, version: int) -> list[FakeRow]:
        """Return the rows after the first `version` entries of the log."""
        held: dict[tuple[object, ...], FakeRow] = {}
        for op, row in self.log[:version]:
            if op == "t":
                held.clear()
                continue
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

    @property
    def key(self) -> Sequence[str]:
        """The table's key."""
        return self._reference.table.key

    @property
    def position(self) -> int:
        """The position in the log."""
        return self._version or 0

    async def poll_snapshot(self) -> pa.RecordBatch | None:
        """Return a part of the rows; the first poll determines the version."""
        if self._is_complete:
            return None
        if self._reference.faults:
            raise self._reference.faults.pop(0)
        if self._version is None:  # a real source also does this while the server prepares
            self._version = len(self._reference.log)
            return _batch(self._row_schema, [])
        rows = self._reference.rows(self._version)[self._given :][: self._rows_per_poll]
        self._given += len(rows)
        self._is_complete = not rows
        return _batch(self._row_schema, rows) if rows else None

    def is_snapshot_complete(self) -> bool:
        """Return whether `poll_snapshot` has returned None."""
        return self._is_complete

    async def poll_changes(self) -> pa.RecordBatch | None:
        """Return the changes logged since."""
        if not self._is_complete:
            return None
        if "t" in {op for op, _ in self._reference.log[self._version or 0 :]}:
            self._version, self._given, self._is_complete = None, 0, False
            return None
        assert self._version is not None
        found = self._reference.log[self._version :]
        self._version += len(found)
        key = self._reference.table.key
        last = {tuple(row[name] for name in key): (op, row) for op, row in found}
        rows = [
            {**(row if op == "u" else {name: row[name] for name in key}), "_cdc_op": op}
            for op, row in last.values()
        ]
        return _batch(self._change_schema, rows)

    def checkpoint(self) -> bytes:
        """Return the positions in the log and in the snapshot."""
        return json.dumps([self._version, self._given, self._is_complete]).encode()

    def restore(self, checkpoint: bytes) -> bool:
        """Resume at that position."""
        self._version, self._given, self._is_complete = json.loads(checkpoint)
        return True

    async def close(self) -> None:
        """Do nothing."""


class FakeReferenceLake:
    """The durable state of a `FakeReferenceSink`. `versions`: the rows of each version.

    `faults`: errors that the next merges raise, one each.
    """

    def __init__(self) -> None:
        self.faults: list[IngestdError] = []
        self.versions: list[list[dict[str, Any]]] = []
        self.schema: pa.Schema | None = None
        self.position: int | None = None

    def state(self) -> ReferenceState | None:
        """Return the current state."""
        if self.schema is None:
            return None
        version = len(self.versions) - 1
        return ReferenceState(version, len(self.versions[-1]), self.schema, self.position)

    def _commit(self, rows: list[dict[str, Any]], position: int | None) -> ReferenceState:
        self.versions.append(rows)
        self.position = self.position if position is None else position
        state = self.state()
        assert state is not None
        return replace(state, is_new=True)


class FakeReferenceSink:
    """A ReferenceSink of a `FakeReferenceLake`, which outlives it."""

    def __init__(self, lake: FakeReferenceLake) -> None:
        self._lake = lake

    async def open(self) -> ReferenceState | None:
        """Return the current state."""
        return self._lake.state()

    async def replace(
        self, batches: AsyncIterator[pa.RecordBatch], *, position: int | None = None
    ) -> ReferenceState:
        """Replace all rows."""
        rows: list[dict[str, Any]] = []
        schema: pa.Schema | None = None
        async for batch in batches:
            schema = batch.schema
            rows += batch.to_pylist()
        if schema is None:
            msg = "no batch, not even an empty one"
            raise ValueError(msg)
        lake, state = self._lake, self._lake.state()
        is_same = state is not None and _types(schema) == _types(state.schema)
        is_same = is_same and _sorted(rows) == _sorted(lake.versions[-1])
        if state is not None and is_same and position is None:
            return state
        lake.schema = schema
        return lake._commit(rows, position)  # noqa: SLF001 - its own

    async def merge(
        self, changes: pa.RecordBatch, key: Sequence[str], *, position: int
    ) -> ReferenceState:
        """Apply changes."""
        if self._lake.faults:
            raise self._lake.faults.pop(0)
        state = self._lake.state()
        names = [n for n in changes.schema.names if not n.startswith(RESERVED_PREFIX)]
        if state is None or set(names) != set(state.schema.names):
            msg = "the changes have other columns than the table"
            raise ValueError(msg)
        if state.position is not None and position <= state.position:
            return state
        before = {tuple(row[n] for n in key): row for row in self._lake.versions[-1]}
        after = dict(before)
        found = changes.to_pylist()
        for change in found:
            after.pop(tuple(change[n] for n in key), None)
        for change in found:
            if change["_cdc_op"] == DELETE:
                continue
            own = tuple(change[n] for n in key)
            row = {n: change[n] for n in names}
            for name in change.get("_cdc_unchanged") or ():
                old = change.get("_cdc_before") or {}
                base = before.get(tuple(old[n] for n in key) if old else own)
                if base is None:
                    raise TransientError("a row that changed is missing", reason="row_missing")
                row[name] = base[name]
            after[own] = row
        return self._lake._commit(list(after.values()), position)  # noqa: SLF001 - its own

    async def close(self) -> None:
        """Do nothing."""


def _batch(schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    arrays = [pa.array([row.get(f.name) for row in rows], f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _types(schema: pa.Schema) -> dict[str, pa.DataType]:
    return {field.name: in_name_order(field.type) for field in schema}


def _sorted(rows: list[dict[str, Any]]) -> list[str]:
    return sorted(repr(_by_name(row)) for row in rows)


def _by_name(value: object) -> object:
    """Return structs as lists of their fields, ordered by name."""
    if isinstance(value, dict):
        return sorted((name, _by_name(own)) for name, own in value.items())
    return [_by_name(own) for own in value] if isinstance(value, list) else value
