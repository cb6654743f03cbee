"""Which Arrow type the lake has for a Postgres type (design section 8.5).

Source of the OIDs: PostgreSQL, src/include/catalog/pg_type.dat; they never change. Of the typmod of
numeric: src/backend/utils/adt/numeric.c, make_numeric_typmod.
"""

from __future__ import annotations

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


def lake_type(type_oid: int, typmod: int) -> pa.DataType:
    """Give the Arrow type for values of a built-in type; string where nothing holds it better.

    A string column has the text of the type's output function.
    """
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
