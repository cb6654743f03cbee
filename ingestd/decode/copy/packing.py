"""How the server packs a table's columns, for the query that asks and the decoder that reads.

Each row of the COPY stands for a run of the table's rows, some thousands::

    first block   int8
    rows          int4
    each column   one field or two, by its `ColumnForm` and the `Packing`

So values are found without a step for each of them (MEASURED: but for nulls).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ingestd.decode.type_mapping import lake_type
from ingestd.model.schema import Column, Table

MOST_FIELDS = 1664
"""Source: MaxTupleAttributeNumber (src/include/access/htup_details.h)."""
BETWEEN, ABSENT = b"\x0e", b"\x0f"
"""What stands between texts, and for one that is null: characters that databases have no use of."""


class ColumnForm(Enum):
    """How the values of a column come."""

    FIXED = 1
    BYTES = 2
    TEXT = 3


class Packing(Enum):
    """What tells values from their neighbors, and nulls.

    MARKED      fixed: the values, one after the other, a mark for each null; where the column can
                be null: int4, how many are not.
                text: BETWEEN between the values, ABSENT for a null; int4, how many are not null.
                bytes: as MEASURED.
                A value that looks like a mark shows by these numbers, or by that of BETWEENs: then
                it must be re-read, MEASURED.
    MEASURED    fixed: an array of its own type, nulls among them.
                else: the values, one after the other; int4[], the length of each in bytes, null
                where it is null.
                For any value, but a third more work for the server.
    """

    MARKED = 1
    MEASURED = 2


@dataclass(frozen=True, slots=True)
class FixedType:
    """A type of fixed size: the numpy type of its binary form, the function that writes that.

    `mark`: stands for a null; of no value of the type, or a rare one.
    """

    dtype: str
    send: str
    mark: bytes

    @property
    def size(self) -> int:
        """Bytes of a value."""
        return len(self.mark)


_FIXED = {
    16: FixedType("|u1", "boolsend", b"\x02"),
    20: FixedType(">i8", "int8send", b"\x9d\x3c\x6b\x1f\xa5\xe2\xc4\x71"),
    21: FixedType(">i2", "int2send", b"\x9d\x3c"),
    23: FixedType(">i4", "int4send", b"\x9d\x3c\x6b\x1f"),
    26: FixedType(">u4", "oidsend", b"\xff\xff\x9d\x3c"),
    700: FixedType(">f4", "float4send", b"\xff\xc5\x9d\x3c"),  # NaN, but not the server's
    701: FixedType(">f8", "float8send", b"\xff\xf8\x9d\x3c\x6b\x1f\xa5\xe2"),
    # Below the first one, next to -infinity:
    1082: FixedType(">i4", "date_send", b"\x80\0\0\x01"),
    1114: FixedType(">i8", "timestamp_send", b"\x80\0\0\0\0\0\0\x01"),
    1184: FixedType(">i8", "timestamptz_send", b"\x80\0\0\0\0\0\0\x01"),
}
_BYTEA = 17


def form_of(column: Column) -> ColumnForm:
    """Say how a column comes: as text if its lake type is not the usual one of its type.

    So do masked values, whose text is hashed.
    """
    if column.mask is not None or column.is_override:
        return ColumnForm.TEXT
    if column.type != lake_type(column.type_oid, column.typmod):
        return ColumnForm.TEXT
    if column.type_oid in _FIXED:
        return ColumnForm.FIXED
    return ColumnForm.BYTES if column.type_oid == _BYTEA else ColumnForm.TEXT


def fixed(column: Column) -> FixedType:
    """Return what a column of form FIXED is."""
    return _FIXED[column.type_oid]


def packings_of(table: Table) -> list[Packing]:
    """Return those that a query can have, which gives at most MOST_FIELDS; the best first.

    None where no column has values: the number of rows would be all that is sent of them.
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
