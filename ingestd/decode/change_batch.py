"""Builds a batch's columns from walked tuples: typed columns, and the `_cdc_*` columns.

Of the latter it decides `_cdc_before`, `_cdc_unchanged` (TOASTed values that were not sent) and
`_cdc_raw`.

A cast takes a fifth of a millisecond, however few values it has. If many tables have a few rows
each, `cast_batched` casts their columns of one type as one column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingestd.decode.values.cast import cast, raw_texts
from ingestd.decode.values.masks import masked
from ingestd.decode.values.text_column import Field, TextColumn
from ingestd.model.changes import OF_BEFORE, TableBatch, change_schema
from ingestd.model.schema import TIMESTAMP, Column, Table

Rows = NDArray[np.int64]
Fields = Mapping[str, Field]
"""Walked columns by name."""


@dataclass(frozen=True, slots=True)
class CdcColumns:
    """The `_cdc_*` values that every row has, in row order. `xid`: None for snapshot rows."""

    op: NDArray[np.uint8]
    lsn: Rows
    seq: Rows
    xid: Rows | None
    ts: Rows

    def __len__(self) -> int:
        return len(self.op)


@dataclass(frozen=True, slots=True)
class CastColumn:
    """A column's values, with the rows that it could not hold (null there) and their texts."""

    array: pa.Array
    refused: Rows
    texts: TextColumn


@dataclass(frozen=True, slots=True)
class Tuples:
    """Walked tuples, and the row (ascending) of each; None: one per row.

    `values`: the columns that are already cast, by name.
    """

    fields: Fields
    rows: Rows | None = None
    values: Mapping[str, CastColumn] = field(default_factory=dict)


@dataclass(slots=True)
class _Raw:
    """Values that their column could not hold: for each of `keys`, the texts of some rows."""

    keys: list[str] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    values: list[pa.StringArray] = field(default_factory=list)

    def add(self, key: str, refused: TextColumn, rows: Rows) -> None:
        self.keys.append(key)
        self.rows.append(rows)
        self.values.append(raw_texts(refused))

    def array(self, rows: int, kind: pa.DataType) -> pa.Array:
        if not self.rows:
            return pa.nulls(rows, kind)
        at = np.concatenate(self.rows)
        order = np.argsort(at, kind="stable")
        offsets, mask = _list_bounds(at, rows)
        which = np.repeat(np.arange(len(self.keys)), [len(r) for r in self.rows])
        keys = pa.array(self.keys, pa.string()).take(pa.array(which[order]))
        items = pa.concat_arrays(self.values).take(pa.array(order))
        return pa.MapArray.from_arrays(_nullable_offsets(offsets, mask), keys, items, kind)


def table_batch(
    table: Table, places: CdcColumns, new: Tuples, old: Tuples | None, nbytes: int
) -> TableBatch:
    """Build a table's rows: `new` contains the columns, `old` the tuples for `_cdc_before`.

    A column of the table that was not walked is null.
    """
    schema = change_schema(table)
    count, raw = len(places), _Raw()
    columns = [_column(c, new, count, raw, "") for c in table.columns]
    kinds = {f.name: f.type for f in list(schema)[len(table.columns) :]}
    before = _before(table, old, count, kinds["_cdc_before"], raw)
    arrays = [
        *columns,
        _ops(places.op),
        pa.array(places.lsn),
        pa.array(places.seq),
        pa.nulls(count, pa.int64()) if places.xid is None else pa.array(places.xid),
        pa.array(places.ts).view(TIMESTAMP),
        before,
        _unchanged(table, new, count, kinds["_cdc_unchanged"]),
        raw.array(count, kinds["_cdc_raw"]),
    ]
    return TableBatch(table, pa.RecordBatch.from_arrays(arrays, schema=schema), nbytes)


def _column(column: Column, tuples: Tuples, count: int, raw: _Raw, prefix: str) -> pa.Array:
    found = _values(column, tuples)
    if found is None:
        return pa.nulls(count, column.type)
    if isinstance(found, CastColumn):
        if len(found.refused):
            rows = found.refused if tuples.rows is None else tuples.rows[found.refused]
            raw.add(prefix + column.lake_name, found.texts, rows)
        found = found.array
    return found if tuples.rows is None else _spread(found, tuples.rows, count)


def _values(column: Column, tuples: Tuples) -> CastColumn | pa.Array | None:
    """Return a column's values; None if it was not walked. `Column.mask` is applied here, only."""
    if column.name in tuples.values:
        return tuples.values[column.name]
    walked = tuples.fields.get(column.name)
    if walked is None:
        return None
    if column.mask is not None:
        return None if column.mask.kind == "null" else masked(walked.texts, column.mask)
    return cast_column(walked.texts, column)


def cast_column(texts: TextColumn, column: Column) -> CastColumn:
    """Cast the texts to the column's type."""
    array, refused = cast(texts, column.type, is_override=column.is_override)
    return CastColumn(array, refused, texts[refused])


def _spread(array: pa.Array, rows: Rows, count: int) -> pa.Array:
    """Return `count` rows with item i at row rows[i] and null elsewhere."""
    index = np.zeros(count, np.int64)
    index[rows] = np.arange(len(rows))
    absent = np.ones(count, np.bool_)
    absent[rows] = False
    return array.take(pa.array(index, mask=absent))


def _before(
    table: Table, old: Tuples | None, count: int, kind: pa.StructType, raw: _Raw
) -> pa.Array:
    if old is None or not table.before:
        return pa.nulls(count, kind)
    columns = [_column(c, old, count, raw, OF_BEFORE) for c in table.before_columns]
    absent = np.zeros(count, np.bool_)
    if old.rows is not None:
        absent[:] = True
        absent[old.rows] = False
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=pa.array(absent))


def _unchanged(table: Table, new: Tuples, count: int, kind: pa.DataType) -> pa.Array:
    names, rows, which = _unsent(table, new)
    if not names:
        return pa.nulls(count, kind)
    order = np.argsort(rows, kind="stable")
    offsets, mask = _list_bounds(rows, count)
    values = pa.array(names, pa.string()).take(pa.array(which[order]))
    return pa.ListArray.from_arrays(_nullable_offsets(offsets, mask), values, type=kind)


def _unsent(table: Table, new: Tuples) -> tuple[list[str], Rows, Rows]:
    """Return the columns with unsent values; and, for each such value, its row and column."""
    names: list[str] = []
    rows: list[Rows] = []
    for column in table.columns:
        if column.mask is not None and column.mask.kind == "null":  # its values are not kept
            continue
        walked = new.fields.get(column.name)
        if walked is not None and walked.unchanged is not None and walked.unchanged.any():
            at = np.flatnonzero(walked.unchanged)
            names.append(column.lake_name)
            rows.append(at if new.rows is None else new.rows[at])
    if not names:
        empty = np.empty(0, np.int64)
        return names, empty, empty
    which = np.repeat(np.arange(len(names)), [len(r) for r in rows])
    return names, np.concatenate(rows), which


def _list_bounds(rows: Rows, count: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Return the offsets of lists whose items belong to these rows, and which lists are null."""
    sizes = np.bincount(rows, minlength=count)
    offsets = np.zeros(count + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return offsets, sizes == 0


def _nullable_offsets(offsets: NDArray[np.int32], absent: NDArray[np.bool_]) -> pa.Array:
    """Return the offsets of lists or maps, null where the list is: as Arrow expects."""
    return pa.array(offsets, mask=np.append(absent, False))


def _ops(letters: NDArray[np.uint8]) -> pa.Array:
    offsets = np.arange(len(letters) + 1, dtype=np.int32)
    buffers: Sequence[pa.Buffer | None] = [
        None,
        pa.py_buffer(offsets),
        pa.py_buffer(np.ascontiguousarray(letters)),
    ]
    return pa.StringArray.from_buffers(len(letters), *buffers[1:])


# --- several tables together ---------------------------------------------------------------------

Wanted = tuple[Tuples, Iterable[Column]]
"""Walked tuples, and the columns to cast in them."""

_Member = tuple[int, str, TextColumn]
"""Index of the tuples, name of the column, its values."""


def cast_batched(wanted: Sequence[Wanted]) -> list[Tuples]:
    """Return the tuples with cast values for these columns. All have the same source.

    Masked columns are skipped; the row builder handles them.
    """
    groups: dict[tuple[pa.DataType, bool], list[_Member]] = {}
    for index, (tuples, columns) in enumerate(wanted):
        for column in columns:
            walked = tuples.fields.get(column.name)
            if walked is not None and column.mask is None:
                group = groups.setdefault((column.type, column.is_override), [])
                group.append((index, column.name, walked.texts))
    found = [dict(tuples.values) for tuples, _ in wanted]
    for (to, is_override), members in groups.items():
        casts = _cast([texts for *_, texts in members], to, is_override=is_override)
        for (index, name, _), values in zip(members, casts, strict=True):
            found[index][name] = values
    return [
        replace(tuples, values=values) for (tuples, _), values in zip(wanted, found, strict=True)
    ]


def _cast(parts: Sequence[TextColumn], to: pa.DataType, *, is_override: bool) -> list[CastColumn]:
    """Cast the parts as one column, and return each part's result.

    The values are cast in source order, because their start offsets must ascend.
    """
    if len(parts) == 1:
        array, refused = cast(parts[0], to, is_override=is_override)
        return [CastColumn(array, refused, parts[0][refused])]
    texts, bounds = _joined(parts)
    order = np.argsort(texts.starts, kind="stable")
    array, refused = cast(texts[order], to, is_override=is_override)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    array = array.take(pa.array(rank))
    refused = np.sort(order[refused])
    cuts = np.searchsorted(refused, bounds).tolist()
    # Each gets its own copy: shared memory would only be freed once all of them are written.
    found = []
    for i, (start, end) in enumerate(pairwise(bounds.tolist())):
        own = refused[cuts[i] : cuts[i + 1]] - start
        values = pa.concat_arrays([array.slice(start, end - start)])
        found.append(CastColumn(values, own, parts[i][own]))
    return found


def _joined(parts: Sequence[TextColumn]) -> tuple[TextColumn, NDArray[np.int64]]:
    """Return all values in sequence, and the bounds of the parts."""
    present = heads = None
    if any(part.present is not None for part in parts):
        present = np.concatenate(
            [np.ones(len(p), np.bool_) if p.present is None else p.present for p in parts]
        )
    known = [part.heads for part in parts if part.heads is not None]
    if len(known) == len(parts):
        heads = np.concatenate(known)
    starts = np.concatenate([part.starts for part in parts])
    lengths = np.concatenate([part.lengths for part in parts])
    bounds = np.cumsum([0, *(len(part) for part in parts)])
    return TextColumn(parts[0].source, starts, lengths, present, heads), bounds
