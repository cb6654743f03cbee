"""The mapping of Postgres types to Arrow types of the lake (design section 8.5).

Source of the OIDs, which never change: PostgreSQL, src/include/catalog/pg_type.dat. Of numeric's
typmod: src/backend/utils/adt/numeric.c, make_numeric_typmod. Of the names of overrides: Delta
transaction log protocol, "Primitive Types".
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from ingestd.decode.lake_columns import folded
from ingestd.model.schema import TIMESTAMP, TIMESTAMP_NTZ, lake_type_name

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
    """A type from pg_type whose component types determine its lake type.

    `of`: an array's element type, or a domain's base type, whose typmod is `typmod`. `delimiter`:
    the separator in an array's text. `attributes`: of a composite type.
    """

    oid: int
    kind: Literal["array", "domain", "composite", "other"]
    of: int = 0
    typmod: int = -1
    delimiter: str = ","
    attributes: tuple[Attribute, ...] = ()


MOST_DEPTH = 30
"""Limit for lists and structs in one another. Arrow, Parquet and Spark handle types recursively."""
MOST_FIELDS = 2_000
"""Limit for the fields of a column's structs: composite types in one another multiply theirs."""
_MOST_CHAIN = 10_000

Types = Mapping[int, PgType]
"""Types by OID. A type that is neither in it nor built in is text."""

# One entry per line would fill two screens.
# fmt: off
_ELEMENTS = {
    143: 142, 199: 114, 271: 5069, 629: 628, 651: 650, 719: 718, 775: 774, 791: 790, 1000: 16,
    1001: 17, 1002: 18, 1003: 19, 1005: 21, 1006: 22, 1007: 23, 1008: 24, 1009: 25, 1010: 27,
    1011: 28, 1012: 29, 1013: 30, 1014: 1042, 1015: 1043, 1016: 20, 1017: 600, 1018: 601, 1019: 602,
    1020: 603, 1021: 700, 1022: 701, 1027: 604, 1028: 26, 1034: 1033, 1040: 829, 1041: 869,
    1115: 1114, 1182: 1082, 1183: 1083, 1185: 1184, 1187: 1186, 1231: 1700, 1270: 1266, 1561: 1560,
    1563: 1562, 2201: 1790, 2207: 2202, 2208: 2203, 2209: 2204, 2210: 2205, 2211: 2206, 2949: 2970,
    2951: 2950, 3221: 3220, 3643: 3614, 3644: 3642, 3645: 3615, 3735: 3734, 3770: 3769, 3807: 3802,
    3905: 3904, 3907: 3906, 3909: 3908, 3911: 3910, 3913: 3912, 3927: 3926, 4073: 4072, 4090: 4089,
    4097: 4096, 4192: 4191, 5039: 5038, 6150: 4451, 6151: 4532, 6152: 4533, 6153: 4534, 6155: 4535,
    6157: 4536,
}
# fmt: on
"""Element types of the built-in array types. (int2vector and oidvector are not included: their
texts have no braces.)"""
_BOXES_OID = 1020

BUILT_IN: Types = {
    oid: PgType(oid, "array", of, delimiter=";" if oid == _BOXES_OID else ",")
    for oid, of in _ELEMENTS.items()
}
"""Types that every server has."""


def lake_type(
    type_oid: int, typmod: int, types: Types = BUILT_IN, *, as_struct: bool = False
) -> pa.DataType:
    """Return the Arrow type for values of a type; string if no other fits.

    A string column has the text of the type's output function; so has one whose type nests too
    deeply (`is_too_deep`). `as_struct`: return composite types, also nested ones, as structs;
    raises ValueError with the reason if Delta can't have that struct.
    """
    return _Mapping(types, as_struct=as_struct).of(type_oid, typmod)


def is_too_deep(type_oid: int, types: Types) -> bool:
    """Return whether values of the type are lists in lists, more than MOST_DEPTH levels."""
    chain = _chain(type_oid, types, {"domain", "array"})
    arrays = itertools.takewhile(lambda t: t.kind == "domain" or t.delimiter == ",", chain)
    return sum(t.kind == "array" for t in arrays) > MOST_DEPTH


def without_domains(type_oid: int, types: Types) -> int:
    """Return the innermost base type of a domain; any other type itself."""
    return _without_domains(type_oid, -1, types)[0]


def innermost(type_oid: int, types: Types) -> int:
    """Return the type of a value, or of an array's elements, without its domains."""
    for known in _chain(type_oid, types, {"domain", "array"}):
        type_oid = known.of
    return type_oid


def _without_domains(type_oid: int, typmod: int, types: Types) -> tuple[int, int]:
    """Return the innermost base type and its typmod."""
    for known in _chain(type_oid, types, {"domain"}):
        type_oid, typmod = known.of, known.typmod if known.typmod != -1 else typmod
    return type_oid, typmod


def _chain(type_oid: int, types: Types, kinds: Collection[str]) -> Iterator[PgType]:
    """Yield a type and the types that it consists of, as long as they are of these kinds.

    A server that lies may send types that contain themselves.
    """
    for _ in range(_MOST_CHAIN):
        known = types.get(type_oid)
        if known is None or known.kind not in kinds:
            return
        yield known
        type_oid = known.of


class _Mapping:
    """The mapping of one column's type. Its depth and the number of its fields are limited."""

    def __init__(self, types: Types, *, as_struct: bool = False) -> None:
        self._types = types
        self._as_struct = as_struct
        self._fields = 0

    def of(self, type_oid: int, typmod: int, depth: int = 0) -> pa.DataType:
        """Return the type's Arrow type. Raises ValueError."""
        type_oid, typmod = _without_domains(type_oid, typmod, self._types)
        known = self._types.get(type_oid)
        if known is None or known.kind == "other":
            if type_oid == NUMERIC_OID:
                return _numeric(typmod)
            return _SIMPLE.get(type_oid, pa.string())
        if known.kind == "array" and known.delimiter == ",":
            if depth >= MOST_DEPTH or is_too_deep(type_oid, self._types):
                return pa.string()
            return _list_of(self.of(known.of, typmod, depth + 1))
        if known.kind == "composite" and self._as_struct:
            return self.struct(known, depth)
        return pa.string()

    def struct(self, composite: PgType, depth: int = 0) -> pa.DataType:
        """Return a composite type as a struct. Raises ValueError."""
        names = [a.name for a in composite.attributes]
        if not names:
            raise ValueError("a composite type without attributes can't be a struct, only string")
        if len({folded(n) for n in names}) < len(names):
            raise ValueError(
                "attributes whose names differ only by case can't be fields of one struct: "
                f"{', '.join(names)}; the column can be string"
            )
        self._fields += len(names)
        if depth >= MOST_DEPTH or self._fields > MOST_FIELDS:
            raise ValueError(
                f"a struct has at most {MOST_FIELDS:,} fields, with those of structs in it, and "
                f"{MOST_DEPTH} levels; the column can be string"
            )
        fields = [
            pa.field(a.name, self.of(a.type_oid, a.typmod, depth + 1)) for a in composite.attributes
        ]
        return pa.struct(fields)


def _list_of(element: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", element))


def _numeric(typmod: int) -> pa.DataType:
    """Return decimal if precision and scale are declared and Delta supports them, else text.

    From PostgreSQL 15 on a scale may be negative or above the precision, which Delta does not
    support.
    """
    declared = _declared(typmod)
    if declared is None:
        return pa.string()
    precision, scale = declared
    if not (1 <= precision <= MAX_DECIMAL_PRECISION and 0 <= scale <= precision):
        return pa.string()
    return pa.decimal128(precision, scale)


def _declared(typmod: int) -> tuple[int, int] | None:
    """Return a numeric's precision and scale."""
    if typmod < _VARHDRSZ:
        return None
    packed = typmod - _VARHDRSZ
    scale = packed & _SCALE_MASK
    if scale >> _SCALE_BITS - 1:
        scale -= 1 << _SCALE_BITS
    return packed >> 16 & _PRECISION_MASK, scale


# --- overrides -------------------------------------------------------------------------------

_INTEGERS = {
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
}
_SCALARS = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    **_INTEGERS,
    "float": pa.float32(),
    "double": pa.float64(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": TIMESTAMP,
    "timestamp_ntz": TIMESTAMP_NTZ,
}
_INTEGER_OIDS = {20, 21, 23, 26}
_TEXT_OIDS = {18, 19, 25, 705, 1042, 1043}
_FIRST_USER_OID = 16_384
"""PostgreSQL, src/include/access/transam.h, FirstNormalObjectId."""
_DECIMAL = re.compile(r"decimal\((\d{1,4}),(\d{1,4})\)", re.ASCII)
_ARRAY = re.compile(r"array<(.*)>", re.ASCII)


def override_type(text: str, type_oid: int, typmod: int, types: Types = BUILT_IN) -> pa.DataType:
    """Parse a lake type of the config for a column: a Delta name, `struct`, `array<...>`.

    Raises ValueError with the reason if the type does not exist, or could never hold the column's
    values exactly. If only some values fit, each is decided separately; the others go to
    `_cdc_raw`.
    """
    name = "".join(text.split()).lower()
    _check_name(name, text)
    return _override(name, type_oid, typmod, types)


def is_number(type_oid: int, types: Types) -> bool:
    """Return whether the server compares values, or their elements, as integers or numerics."""
    oid = innermost(type_oid, types)
    return oid in _INTEGER_OIDS or oid == NUMERIC_OID


def _check_name(name: str, text: str) -> None:
    array = _ARRAY.fullmatch(name)
    if array is not None:
        _check_name(array[1], text)
        return
    decimal = _DECIMAL.fullmatch(name)
    if decimal is None:
        if name != "struct" and name not in _SCALARS:
            known = ", ".join([*_SCALARS, "decimal(p,s)", "struct", "array<...>"])
            raise ValueError(f"unknown type {text!r}; valid types: {known}")
        return
    precision, scale = int(decimal[1]), int(decimal[2])
    if not (1 <= precision <= MAX_DECIMAL_PRECISION and scale <= precision):
        raise ValueError(
            f"{text!r}: a decimal has a precision of 1 to {MAX_DECIMAL_PRECISION}, "
            "and a scale of at most the precision"
        )


def _override(name: str, type_oid: int, typmod: int, types: Types) -> pa.DataType:
    if name == "string":
        return pa.string()
    type_oid, typmod = _without_domains(type_oid, typmod, types)
    known = types.get(type_oid)
    if known is None or known.kind == "other":
        return _scalar_override(name, type_oid, typmod)
    array = _ARRAY.fullmatch(name)
    if known.kind == "array" and known.delimiter == ",":
        if array is None:
            raise ValueError(f"an array can't be {name}; it can be array<...> or string")
        return _list_of(_override(array[1], known.of, typmod, types))
    if known.kind == "composite":
        if name != "struct":
            raise ValueError(f"a composite value can't be {name}; it can be struct or string")
        return _Mapping(types, as_struct=True).struct(known)
    raise ValueError(f"an array delimited by {known.delimiter!r} can be string only, not {name}")


def _scalar_override(name: str, type_oid: int, typmod: int) -> pa.DataType:
    if _ARRAY.fullmatch(name) or name == "struct":
        raise ValueError(f"{name} is for {_OF_KIND[name == 'struct']} only")
    decimal = _DECIMAL.fullmatch(name)
    wanted = pa.decimal128(int(decimal[1]), int(decimal[2])) if decimal else _SCALARS[name]
    own = lake_type(type_oid, typmod)
    if wanted == own or type_oid in _TEXT_OIDS or type_oid >= _FIRST_USER_OID:
        return wanted
    if type_oid in _INTEGER_OIDS:
        can_be = "another integer type, decimal(p,s) or string"
        fits = decimal is not None or name in _INTEGERS
    elif type_oid == NUMERIC_OID:
        declared = _declared(typmod)
        whole = declared is None or declared[1] <= 0
        can_be = "decimal(p,s), an integer type or string" if whole else "decimal(p,s) or string"
        fits = decimal is not None or (whole and name in _INTEGERS)
    else:
        can_be = "string" if own == pa.string() else f"{lake_type_name(own)} or string"
        fits = False
    if not fits:
        raise ValueError(f"{name} can't hold the column's values exactly; it can be {can_be}")
    return wanted


_OF_KIND = {True: "composite types", False: "arrays"}
