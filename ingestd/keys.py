"""What identifies the rows of a batch, as texts that Postgres reads back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from ingestd.schema import Table

Key = tuple[str | None, ...]
"""Texts of the values of `Table.identifying`, in that order."""

_OF_BEFORE = "_cdc_before."


def new_keys(table: Table, rows: pa.RecordBatch) -> Iterator[Key]:
    """Give the key of each of these change rows."""
    columns = [rows.column(n) for n in _lake_names(table)]
    return _keys(columns, rows.column("_cdc_raw"), _lake_names(table))


def old_keys(table: Table, rows: pa.RecordBatch) -> Iterator[Key]:
    """Give the key that each row had before; of rows that all have `_cdc_before`."""
    before = rows.column("_cdc_before")
    names = _lake_names(table)
    columns = [pc.struct_field(before, n) for n in names]
    return _keys(columns, rows.column("_cdc_raw"), [_OF_BEFORE + n for n in names])


def key_columns(table: Table) -> list[str]:
    """Name the columns of the change schema that `key_rows` looks at."""
    return list(dict.fromkeys([*_lake_names(table), "_cdc_before", "_cdc_raw"]))


def key_rows(table: Table, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Give of these change rows what `new_keys` and `old_keys` look at, and no more to hold."""
    before = rows.column("_cdc_before")
    names = _lake_names(table)
    fields = [pc.struct_field(before, name) for name in names]
    cut = pa.StructArray.from_arrays(fields, names=names, mask=before.is_null())
    columns = [*(rows.column(name) for name in names), cut, rows.column("_cdc_raw")]
    return pa.RecordBatch.from_arrays(columns, names=[*names, "_cdc_before", "_cdc_raw"])


def _lake_names(table: Table) -> list[str]:
    return [table.column(n).lake_name for n in table.identifying]


def _keys(columns: Sequence[pa.Array], raw: pa.Array, names: Sequence[str]) -> Iterator[Key]:
    """Join the columns' texts; what a column can't hold is in `raw`."""
    texts = [_texts(column) for column in columns]
    if raw.null_count < len(raw):
        for row, kept in enumerate(raw.to_pylist(maps_as_pydicts="lossy")):
            for text, name in zip(texts, names, strict=True):
                if kept and name in kept:
                    text[row] = kept[name]
    return zip(*texts, strict=True)


def _texts(column: pa.Array) -> list[str | None]:
    if pa.types.is_binary(column.type):
        return [None if v is None else "\\x" + v.hex() for v in column.to_pylist()]
    if pa.types.is_nested(column.type):
        return [None if v is None else str(v) for v in column.to_pylist()]
    texts: list[str | None] = column.cast(pa.string()).to_pylist()
    return texts
