"""Conversion of Arrow arrays to one set of types, whichever engine wrote the file.

A Parquet file carries the Arrow types of its writer. deltalake writes ``string_view``, polars
``large_string`` and ``large_list``, pandas dictionaries. pyarrow has no kernels for some of them,
and its cast from ``list_view`` to ``list`` loses elements.
"""

from __future__ import annotations

from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

ArrowRows = TypeVar("ArrowRows", pa.Table, pa.RecordBatch)


def plain_type(kind: pa.DataType) -> pa.DataType:  # noqa: PLR0911 - one a kind
    """Return the type without variations that only concern the layout in memory."""
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if _is_binary(kind):
        return pa.binary()
    if pa.types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), plain_type(kind.item_type))
    if _is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    if pa.types.is_struct(kind):
        return pa.struct([_plain_field(field) for field in kind])
    return kind


def plain(rows: ArrowRows) -> ArrowRows:
    """Return the rows with each column converted to its `plain_type`."""
    schema = pa.schema([_plain_field(field) for field in rows.schema])
    if schema.equals(rows.schema):
        return rows
    columns = [
        _plain_column(column, field.type)
        for column, field in zip(rows.columns, schema, strict=True)
    ]
    return type(rows).from_arrays(columns, schema=schema)


def conformed(array: pa.Array, wanted: pa.DataType) -> pa.Array:  # noqa: PLR0911 - one a kind
    """Return the array in this type; struct fields match by name, missing ones become null."""
    kind = array.type
    if kind.equals(wanted):
        return array
    if pa.types.is_null(kind):
        return pa.nulls(len(array), wanted)
    if isinstance(kind, pa.BaseExtensionType):
        return conformed(array.storage, wanted)
    if pa.types.is_dictionary(kind):
        return conformed(array.dictionary_decode(), wanted)
    if pa.types.is_run_end_encoded(kind):
        return conformed(pc.run_end_decode(array), wanted)
    if pa.types.is_list(wanted) and _is_list(kind):
        lists = array if pa.types.is_list(kind) else _as_list(array)
        values = conformed(lists.values, wanted.value_type)
        found = pa.ListArray.from_arrays(lists.offsets, values, wanted)
        return found if lists.null_count == 0 else pc.if_else(pc.is_valid(lists), found, None)
    if not pa.types.is_struct(wanted):
        return array.cast(wanted)
    fields = []
    for field in wanted:
        index = kind.get_field_index(field.name)
        fields.append(
            pa.nulls(len(array), field.type)
            if index < 0
            else conformed(pc.struct_field(array, index), field.type)
        )
    return pa.StructArray.from_arrays(fields, fields=list(wanted), mask=pc.is_null(array))


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(plain_type(field.type))


def _plain_column(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([conformed(c, kind) for c in column.chunks], kind)
    return conformed(column, kind)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or (pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind))
    )


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
    )


def _as_list(array: pa.Array) -> pa.ListArray:
    """Return a list of another layout as a plain list: offsets and elements in order."""
    kind = array.type
    lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())
    ends = pc.cumulative_sum(lengths)
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends]).cast(pa.int32())
    mask = array.is_null() if array.null_count else None
    return pa.ListArray.from_arrays(
        offsets, pc.list_flatten(array), pa.list_(kind.value_field), mask=mask
    )
