"""How the server packs a table's columns, for the query that asks and the decoder that reads.

Each row of the COPY stands for a run of the table's rows, some thousands::

    first block   int8
    rows          int4
    nulls         int4[] for each 31 of the fixed columns that may be null: bit i is set where
                  the i-th of them is null
    each column   fixed: an array of its own type, any value where it is null
                  else:  the values, one after the other, and int4[], the length of each in
                  bytes, -1 where it is null

So everything has a constant stride and nothing must be walked.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ingestd.decode.types import lake_type
from ingestd.schema import Column, Table

MOST_FIELDS = 1664
"""Source: MaxTupleAttributeNumber (src/include/access/htup_details.h)."""
BITS = 31
"""Flags in an int4."""


class Form(Enum):
    """How the values of a column come."""

    FIXED = 1
    BYTES = 2
    TEXT = 3


@dataclass(frozen=True, slots=True)
class Fixed:
    """A type of fixed size: its name in SQL, the numpy type of its binary form, some value."""

    sql_name: str
    dtype: str
    some_value: str

    @property
    def size(self) -> int:
        """Bytes of a value."""
        return int(self.dtype[2:])


_FIXED = {
    16: Fixed("bool", "|u1", "false"),
    20: Fixed("int8", ">i8", "0"),
    21: Fixed("int2", ">i2", "0"),
    23: Fixed("int4", ">i4", "0"),
    26: Fixed("oid", ">u4", "0"),
    700: Fixed("float4", ">f4", "0"),
    701: Fixed("float8", ">f8", "0"),
    1082: Fixed("date", ">i4", "2000-01-01"),
    1114: Fixed("timestamp", ">i8", "2000-01-01 00:00:00"),
    1184: Fixed("timestamptz", ">i8", "2000-01-01 00:00:00+00"),
}
_BYTEA = 17


def form_of(column: Column) -> Form:
    """Say how a column comes: as text if its lake type is not the usual one of its type.

    So do masked values, whose text is hashed.
    """
    if column.mask is not None or column.is_override:
        return Form.TEXT
    if column.type != lake_type(column.type_oid, column.typmod):
        return Form.TEXT
    if column.type_oid in _FIXED:
        return Form.FIXED
    return Form.BYTES if column.type_oid == _BYTEA else Form.TEXT


def fixed(column: Column) -> Fixed:
    """Give what a column of form FIXED is."""
    return _FIXED[column.type_oid]


def flagged(table: Table) -> list[Column]:
    """Give the columns whose nulls are flags."""
    return [c for c in table.columns if c.nullable and form_of(c) is Form.FIXED]


def can_be_packed(table: Table) -> bool:
    """Say whether a query can: it gives at most MOST_FIELDS, and a text column takes two."""
    fields = 2 + flag_fields(table)
    fields += sum(1 if form_of(c) is Form.FIXED else 2 for c in table.columns)
    return bool(table.columns) and fields <= MOST_FIELDS


def flag_fields(table: Table) -> int:
    """Give the number of fields with flags."""
    return -(-len(flagged(table)) // BITS)
