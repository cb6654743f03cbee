"""Which Arrow type the lake has for a Postgres type (design section 8.5).

Source of the OIDs: PostgreSQL, src/include/catalog/pg_type.dat; they never change. Of the typmod of
numeric: src/backend/utils/adt/numeric.c, make_numeric_typmod.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from ingestd.schema import TIMESTAMP, TIMESTAMP_NTZ

NUMERIC_OID = 1700
MAX_DECIMAL_PRECISION = 38
"""Delta transaction log protocol, "Primitive Types"."""

_VARHDRSZ = 4
_SCALE_BITS = 11
_SCALE_MASK = (1 << _SCALE_BITS) - 1
_PRECISION_MASK = 0xFFFF

_SIMPLE = {
    16: pa.bool_(),
    17: pa.binary(),
    20: pa.int64(),
    21: pa.int16(),
    23: pa.int32(),
    26: pa.int64(),  # oid: unsigned 32 bits
    700: pa.float32(),
    701: pa.float64(),
    1082: pa.date32(),
    1114: TIMESTAMP_NTZ,
    1184: TIMESTAMP,
}


@dataclass(frozen=True, slots=True)
class Attribute:
    """A field of a composite type."""

    name: str
    type_oid: int
    typmod: int


@dataclass(frozen=True, slots=True)
class PgType:
    """A type as pg_type has it, where what it is made of decides its lake type.

    `of`: an array's element type, or a domain's base type, whose typmod is `typmod`. `delimiter`:
    what separates the elements in an array's text. `attributes`: of a composite type.
    """

    oid: int
    kind: Literal["array", "domain", "composite", "other"]
    of: int = 0
    typmod: int = -1
    delimiter: str = ","
    attributes: tuple[Attribute, ...] = ()


Types = Mapping[int, PgType]
"""Types by OID. What is not in it, and not built in, is text."""

BUILT_IN: Types = {}
"""Types that every server has."""


def lake_type(
    type_oid: int, typmod: int, types: Types = BUILT_IN, *, as_struct: bool = False
) -> pa.DataType:
    """Give the Arrow type for values of a type; string where nothing holds it better.

    A string column has the text of the type's output function. `as_struct`: composite types, also
    inside others, as structs.
    """
    known = types.get(type_oid)
    if known is not None and known.kind == "domain":
        inner = known.typmod if known.typmod != -1 else typmod
        return lake_type(known.of, inner, types, as_struct=as_struct)
    if known is not None and known.kind == "array" and known.delimiter == ",":
        element = lake_type(known.of, typmod, types, as_struct=as_struct)
        return pa.list_(pa.field("element", element))
    if type_oid == NUMERIC_OID:
        return _numeric(typmod)
    return _SIMPLE.get(type_oid, pa.string())


def _numeric(typmod: int) -> pa.DataType:
    """Decimal where precision and scale are declared and Delta can hold them.

    From PostgreSQL 15 on a scale may be negative or above the precision: text then.
    """
    if typmod < _VARHDRSZ:
        return pa.string()
    packed = typmod - _VARHDRSZ
    precision = packed >> 16 & _PRECISION_MASK
    scale = packed & _SCALE_MASK
    if scale >> _SCALE_BITS - 1:
        scale -= 1 << _SCALE_BITS
    if not (1 <= precision <= MAX_DECIMAL_PRECISION and 0 <= scale <= precision):
        return pa.string()
    return pa.decimal128(precision, scale)
