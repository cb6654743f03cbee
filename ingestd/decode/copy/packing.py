"""The server-side packing of a table's columns, shared by the query and the decoder.

Each row of the COPY represents a run of some thousand rows of the table::

    first block   int8
    rows          int4
    each column   one or two fields, depending on its `ColumnForm` and the `Packing`

So values are located without a step for each of them (except for nulls in MEASURED).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ingestd.decode.type_mapping import lake_type
from ingestd.model.schema import Column, Table

MOST_FIELDS = 1664
"""Source: MaxTupleAttributeNumber (src/include/access/htup_details.h)."""
BETWEEN, ABSENT = b"\x0e", b"\x0f"
"""The separator between texts, and the mark for a null: characters that databases do not use."""


class ColumnForm(Enum):
    """The format in which a column's values are sent."""

    FIXED = 1
    BYTES = 2
    TEXT = 3


class Packing(Enum):
    """How values are separated, and nulls marked.

    MARKED      fixed: consecutive values, with a mark for each null; if the column is nullable,
                int4: the number of values that are not null.
                text: values separated by BETWEEN, ABSENT for a null; int4: the number of values
                that are not null.
                bytes: as MEASURED.
                These counts, or that of BETWEENs, reveal a value that looks like a mark. It must
                then be re-read with MEASURED.
    MEASURED    fixed: an array of the type, including nulls.
                else: consecutive values; int4[], the length of each in bytes, null for a null.
                Works for any value, but costs the server a third more work.
    """

    MARKED = 1
    MEASURED = 2


@dataclass(frozen=True, slots=True)
class FixedType:
    """A type of fixed size: the numpy type of its binary format, and its send function.

    `mark`: represents a null; not a value of the type, or a rare one.
    """

    dtype: str
    send: str
    mark: bytes

    @property
    def size(self) -> int:
        """Size of a value in bytes."""
        return len(self.mark)


_FIXED = {
    16: FixedType("|u1", "boolsend", b"\x02"),
    20: FixedType(">i8", "int8send", b"\x9d\x3c\x6b\x1f\xa5\xe2\xc4\x71"),
    21: FixedType(">i2", "int2send", b"\x9d\x3c"),
    23: FixedType(">i4", "int4send", b"\x9d\x3c\x6b\x1f"),
    26: FixedType(">u4", "oidsend", b"\xff\xff\x9d\x3c"),
    700: FixedType(">f4", "float4send", b"\xff\xc5\x9d\x3c"),  # a NaN that the server never sends
    701: FixedType(">f8", "float8send", b"\xff\xf8\x9d\x3c\x6b\x1f\xa5\xe2"),
    # Below the first value, next to -infinity:
    1082: FixedType(">i4", "date_send", b"\x80\0\0\x01"),
    1114: FixedType(">i8", "timestamp_send", b"\x80\0\0\0\0\0\0\x01"),
    1184: FixedType(">i8", "timestamptz_send", b"\x80\0\0\0\0\0\0\x01"),
}
_BYTEA = 17


def form_of(column: Column) -> ColumnForm:
    """Return a column's form. It is text if its lake type is not the default of its type.

    Masked values are text, too: the text is hashed.
    """
    if column.mask is not None or column.is_override:
        return ColumnForm.TEXT
    if column.type != lake_type(column.type_oid, column.typmod):
        return ColumnForm.TEXT
    if column.type_oid in _FIXED:
        return ColumnForm.FIXED
    return ColumnForm.BYTES if column.type_oid == _BYTEA else ColumnForm.TEXT


def fixed(column: Column) -> FixedType:
    """Return the type of a column of form FIXED."""
    return _FIXED[column.type_oid]


def packings_of(table: Table) -> list[Packing]:
    """Return the packings that fit in a query of at most MOST_FIELDS fields, the best first.

    Empty if no column has values: only the number of rows would be sent.
    """
    if all(c.mask is not None and c.mask.kind == "null" for c in table.columns):
        return []
    return [packing for packing in Packing if fields_of(table, packing) <= MOST_FIELDS]


def fields_of(table: Table, packing: Packing) -> int:
    """Return the number of fields of a run."""
    return 2 + sum(width(column, packing) for column in table.columns)


def width(column: Column, packing: Packing) -> int:
    """Return the number of fields of a column."""
    is_one = form_of(column) is ColumnForm.FIXED and (
        packing is Packing.MEASURED or not column.nullable
    )
    return 1 if is_one else 2
