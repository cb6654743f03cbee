"""The definition of a reference table, read from `_tables`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingestd.decode.lake_columns import allocate
from ingestd.decode.values.cast import cast
from ingestd.decode.values.text_column import ByteBuffer, TextColumn
from ingestd.lake.delta.types import arrow_type
from ingestd.model.errors import TableError
from ingestd.model.lake_state import TableState
from ingestd.model.schema import Column, TableId


@dataclass(frozen=True, slots=True)
class ReferenceColumn:
    """A column of the reference table; `raw`: the raw table's column with its values.

    Rows below `since_lsn` have the text `missing` in the source (None: null).
    """

    name: str
    raw: str
    type: pa.DataType
    source_name: str
    missing: str | None
    since_lsn: int


@dataclass(frozen=True, slots=True)
class ReferenceDefinition:
    """A table as last recorded. `is_live`: the fold of its raw table equals the source's table.

    `key`: the raw table's names of the columns by which changes find their rows; empty: by all
    columns. `key_since_lsn`: changes below it may use other key columns.
    """

    table: TableId
    is_live: bool
    columns: tuple[ReferenceColumn, ...]
    key: tuple[str, ...]
    key_since_lsn: int

    @property
    def schema(self) -> pa.Schema:
        """The reference table's schema."""
        return pa.schema([pa.field(c.name, c.type) for c in self.columns])

    @property
    def raw_schema(self) -> pa.Schema:
        """The same columns by their names in the raw table."""
        return pa.schema([pa.field(c.raw, c.type) for c in self.columns])

    @property
    def own_key(self) -> list[str]:
        """The key's columns by their names in the reference table."""
        names = {c.raw: c.name for c in self.columns}
        return [names[n] for n in self.key]

    def refusal(self, raw_name: str) -> TableError:
        """Return the error for a column that can't hold a value."""
        source = next((c.source_name for c in self.columns if c.raw == raw_name), raw_name)
        return unrepresentable_error(self.table, source)

    def with_missing(self, rows: pa.Table) -> pa.Table:
        """Fill in columns that were added after the rows were written, as the source has them."""
        for column in self.columns:
            if not column.since_lsn:
                continue
            is_before = pc.less(rows["_cdc_lsn"], column.since_lsn)
            if not pc.any(is_before).as_py():
                continue
            value = self._missing_value(column)
            index = rows.schema.get_field_index(column.raw)
            filled = _choose(is_before, value, rows.column(index))
            rows = rows.set_column(index, pa.field(column.raw, column.type), filled)
        return rows

    def _missing_value(self, column: ReferenceColumn) -> pa.Array:
        if column.missing is None:
            return pa.nulls(1, column.type)
        text = column.missing.encode()
        texts = TextColumn(ByteBuffer(text), np.zeros(1, np.int64), np.full(1, len(text), np.int64))
        array, refused = cast(texts, column.type)
        if len(refused):
            raise self.refusal(column.raw)
        return array


def unrepresentable_error(table: TableId, column: str) -> TableError:
    """Return the error for a column of a reference table that can't hold a value of the source."""
    return TableError(
        table,
        f"column {column!r} has a value that its type in the lake can't hold",
        remedy=f'set types = {{ {column} = "string" }} in the table\'s section: its text is kept',
    )


def _choose(mask: pa.ChunkedArray, value: pa.Array, column: pa.ChunkedArray) -> pa.Array:
    """Return `value` (of length one) where `mask`, else the column's own value; any type."""
    own = column.combine_chunks()
    places = np.arange(len(own))
    places[mask.to_numpy()] = len(own)
    return pa.concat_arrays([own, value]).take(pa.array(places))


def read_definition(table: TableId, events: Sequence[Mapping[str, Any]]) -> ReferenceDefinition:
    """Return the definition from a table's rows of `_tables`, ordered by time."""
    described = [e for e in events if e["columns"]]
    if not described:
        return ReferenceDefinition(table, False, (), (), 0)  # noqa: FBT003
    newest = described[-1]
    columns = newest["columns"]
    names = allocate(
        [
            Column(_source(c), c["type_oid"], c["typmod"], arrow_type(c["delta_type"]))
            for c in columns
        ],
        {},
    )
    return ReferenceDefinition(
        table=table,
        is_live=events[-1]["state"] == TableState.LIVE,
        columns=tuple(
            ReferenceColumn(
                name=own.lake_name,
                raw=c["name"],
                type=own.type,
                source_name=_source(c),
                missing=c["missing"],
                since_lsn=_since(_source(c), described),
            )
            for c, own in zip(columns, names, strict=True)
        ),
        key=_key(newest),
        key_since_lsn=_key_since(described),
    )


def _source(column: Mapping[str, Any]) -> str:
    name: str = column.get("source_name") or column["name"]
    return name


def _key(event: Mapping[str, Any]) -> tuple[str, ...]:
    flag = "key" if event["replica_identity"] == "f" else "identity"
    return tuple(c["name"] for c in event["columns"] if c.get(flag))


def _since(name: str, events: Sequence[Mapping[str, Any]]) -> int:
    """Return the LSN since which the source has had this column without a break; 0: always."""
    since, was_there = 0, True
    for event in events:
        is_there = any(_source(c) == name for c in event["columns"])
        if is_there and not was_there:
            since = event["at_lsn"]
        was_there = is_there
    return since


def _key_since(events: Sequence[Mapping[str, Any]]) -> int:
    since = 0
    for before, event in itertools.pairwise(events):
        if _key(event) != _key(before):
            since = event["at_lsn"]
    return since
