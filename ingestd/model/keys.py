"""The keys that identify the rows of a batch, as texts that Postgres parses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from ingestd.model.changes import OF_BEFORE, field_of

if TYPE_CHECKING:
    from ingestd.model.schema import Table

Key = tuple[str | bytes | None, ...]
"""Texts of the values of `Table.identifying`, in that order; bytes if a text is not UTF-8."""


def new_keys(table: Table, rows: pa.RecordBatch) -> Iterator[Key]:
    """Yield the key of each change row; values not sent (TOASTed) come from the old row."""
    columns = [rows.column(n) for n in _lake_names(table)]
    keys = _keys(columns, rows.column("_cdc_raw"), _lake_names(table))
    # Rows of a snapshot have no old row, and all their values were sent.
    if "_cdc_before" not in rows.schema.names or not any(c.null_count for c in columns):
        return keys
    both = zip(keys, old_keys(table, rows), strict=True)
    return (
        tuple(was if now is None else now for now, was in zip(new, old, strict=True))
        for new, old in both
    )


def old_keys(table: Table, rows: pa.RecordBatch) -> Iterator[Key]:
    """Yield the key that each row had before; nulls for those without `_cdc_before`."""
    before = rows.column("_cdc_before")
    names = _lake_names(table)
    columns = [field_of(before, n) for n in names]
    return _keys(columns, rows.column("_cdc_raw"), [OF_BEFORE + n for n in names])


def key_columns(table: Table) -> list[str]:
    """Return the columns of the change schema that `key_rows` reads."""
    return list(dict.fromkeys([*_lake_names(table), "_cdc_before", "_cdc_raw"]))


def key_rows(table: Table, rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return only the columns of these rows that `new_keys` and `old_keys` read, to save memory."""
    before = rows.column("_cdc_before")
    names = _lake_names(table)
    fields = [field_of(before, name) for name in names]
    cut = pa.StructArray.from_arrays(fields, names=names, mask=before.is_null())
    columns = [*(rows.column(name) for name in names), cut, rows.column("_cdc_raw")]
    return pa.RecordBatch.from_arrays(columns, names=[*names, "_cdc_before", "_cdc_raw"])


def _lake_names(table: Table) -> list[str]:
    return [table.column(n).lake_name for n in table.identifying]


def _keys(columns: Sequence[pa.Array], raw: pa.Array, names: Sequence[str]) -> Iterator[Key]:
    """Join the columns' texts; `raw` has values that they can't hold: of a text, its bytes."""
    texts = [_texts(column) for column in columns]
    if raw.null_count < len(raw):
        are_texts = [pa.types.is_string(column.type) for column in columns]
        for row, kept in enumerate(raw.to_pylist(maps_as_pydicts="lossy")):
            for text, name, is_text in zip(texts, names, are_texts, strict=True):
                if kept and name in kept:
                    value = kept[name]
                    is_hex = is_text and value.startswith("\\x")
                    text[row] = bytes.fromhex(value[2:]) if is_hex else value
    return zip(*texts, strict=True)


def _texts(column: pa.Array) -> list[str | bytes | None]:
    if pa.types.is_binary(column.type):
        return [None if v is None else "\\x" + v.hex() for v in column.to_pylist()]
    if pa.types.is_nested(column.type):
        return [None if v is None else str(v) for v in column.to_pylist()]
    texts: list[str | bytes | None] = column.cast(pa.string()).to_pylist()
    return texts
