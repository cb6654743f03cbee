"""The lake type of every kind of type, and of what the config wants instead."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ingestd.decode.type_mapping import BUILT_IN, Attribute, PgType, lake_type, override_type
from ingestd.model.schema import TIMESTAMP, TIMESTAMP_NTZ

NUMERIC_10_2 = (10 << 16 | 2) + 4
MONEY, MONEYS, ENUM, ENUMS, POINT3, POINTS3, EMPTY, CASES, LIST, NEST = range(20_000, 20_010)
TYPES = {
    **BUILT_IN,
    MONEY: PgType(MONEY, "domain", 1700, NUMERIC_10_2),
    MONEYS: PgType(MONEYS, "array", MONEY),
    LIST: PgType(LIST, "domain", 1231, NUMERIC_10_2),
    ENUM: PgType(ENUM, "other"),
    ENUMS: PgType(ENUMS, "array", ENUM),
    POINT3: PgType(
        POINT3, "composite", attributes=(Attribute("x", 701, -1), Attribute("at", MONEYS, -1))
    ),
    POINTS3: PgType(POINTS3, "array", POINT3),
    EMPTY: PgType(EMPTY, "composite"),
    CASES: PgType(CASES, "composite", attributes=(Attribute("a", 23, -1), Attribute("A", 23, -1))),
    NEST: PgType(NEST, "composite", attributes=(Attribute("inner", POINTS3, -1),)),
}
STRUCT = pa.struct(
    [
        pa.field("x", pa.float64()),
        pa.field("at", pa.list_(pa.field("element", pa.decimal128(10, 2)))),
    ]
)


def list_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind))


@pytest.mark.parametrize(
    ("type_oid", "typmod", "kind"),
    [
        (26, -1, pa.int64()),
        (19, -1, pa.string()),
        (1042, 14, pa.string()),
        (2950, -1, pa.string()),
        (22, -1, pa.string()),
        (30, -1, pa.string()),
        (1020, -1, pa.string()),  # box[]: its delimiter is a semicolon
        (1007, -1, list_of(pa.int32())),
        (1009, -1, list_of(pa.string())),
        (2951, -1, list_of(pa.string())),
        (1231, -1, list_of(pa.string())),
        (1231, NUMERIC_10_2, list_of(pa.decimal128(10, 2))),
        (1185, 3, list_of(TIMESTAMP)),
        (99_999, -1, pa.string()),
        (MONEY, -1, pa.decimal128(10, 2)),
        (MONEYS, -1, list_of(pa.decimal128(10, 2))),
        (LIST, -1, list_of(pa.decimal128(10, 2))),
        (ENUM, -1, pa.string()),
        (ENUMS, -1, list_of(pa.string())),
        (POINT3, -1, pa.string()),
        (POINTS3, -1, list_of(pa.string())),
        (1700, -1, pa.string()),
        (1700, (38 << 16) + 4, pa.decimal128(38, 0)),
        (1700, (39 << 16) + 4, pa.string()),
        (1700, (3 << 16 | 5) + 4, pa.string()),  # scale above precision
        (1700, (3 << 16 | 0x7FE) + 4, pa.string()),  # scale -2
        (1114, 3, TIMESTAMP_NTZ),
        (1184, -1, TIMESTAMP),
    ],
)
def test_lake_type(type_oid: int, typmod: int, kind: pa.DataType) -> None:
    assert lake_type(type_oid, typmod, TYPES) == kind


def test_composite_as_struct() -> None:
    assert lake_type(POINT3, -1, TYPES, as_struct=True) == STRUCT
    assert lake_type(POINTS3, -1, TYPES, as_struct=True) == list_of(STRUCT)
    nest = lake_type(NEST, -1, TYPES, as_struct=True)
    assert nest == pa.struct([pa.field("inner", list_of(STRUCT))])


@pytest.mark.parametrize(("type_oid", "reason"), [(EMPTY, "without attributes"), (CASES, "a, A")])
def test_composite_that_no_struct_can_hold(type_oid: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        lake_type(type_oid, -1, TYPES, as_struct=True)
    with pytest.raises(ValueError, match=reason):
        override_type("struct", type_oid, -1, TYPES)


@pytest.mark.parametrize(
    ("text", "type_oid", "typmod", "kind"),
    [
        ("string", 20, -1, pa.string()),
        ("string", 1007, -1, pa.string()),
        ("string", POINT3, -1, pa.string()),
        ("string", 1020, -1, pa.string()),
        ("decimal(12,2)", 1700, -1, pa.decimal128(12, 2)),
        (" Decimal( 38 , 9 ) ", 1700, NUMERIC_10_2, pa.decimal128(38, 9)),
        ("decimal(12,2)", 23, -1, pa.decimal128(12, 2)),
        ("decimal(12,2)", MONEY, -1, pa.decimal128(12, 2)),
        ("long", 1700, -1, pa.int64()),
        ("long", 1700, (20 << 16) + 4, pa.int64()),
        ("long", 23, -1, pa.int64()),
        ("short", 20, -1, pa.int16()),
        ("integer", 26, -1, pa.int32()),
        ("double", 701, -1, pa.float64()),
        ("float", 700, -1, pa.float32()),
        ("boolean", 25, -1, pa.bool_()),
        ("timestamp", 1043, 24, TIMESTAMP),
        ("timestamp_ntz", 1114, -1, TIMESTAMP_NTZ),
        ("date", ENUM, -1, pa.date32()),
        ("array<string>", 1007, -1, list_of(pa.string())),
        ("array<decimal(20,2)>", LIST, -1, list_of(pa.decimal128(20, 2))),
        ("array<struct>", POINTS3, -1, list_of(STRUCT)),
        ("struct", POINT3, -1, STRUCT),
    ],
)
def test_override(text: str, type_oid: int, typmod: int, kind: pa.DataType) -> None:
    assert override_type(text, type_oid, typmod, TYPES) == kind


@pytest.mark.parametrize(
    ("text", "type_oid", "typmod", "reason"),
    [
        ("decmal(12,2)", 1700, -1, "unknown type 'decmal\\(12,2\\)'; valid types: string"),
        ("decimal", 1700, -1, "unknown type"),
        ("array<int>", 1007, -1, "unknown type"),
        ("decimal(39,2)", 1700, -1, "precision of 1 to 38"),
        ("decimal(2,3)", 1700, -1, "precision of 1 to 38"),
        ("decimal(0,0)", 1700, -1, "precision of 1 to 38"),
        ("array<decimal(39,2)>", 1231, -1, "precision of 1 to 38"),
        ("long", 1700, NUMERIC_10_2, "can be decimal\\(p,s\\) or string"),
        ("double", 1700, -1, "can be decimal\\(p,s\\), an integer type or string"),
        ("double", 700, -1, "can be float or string"),
        ("double", 20, -1, "another integer type"),
        ("boolean", 23, -1, "another integer type"),
        ("timestamp_ntz", 1184, -1, "can be timestamp or string"),
        ("binary", 2950, -1, "it can be string"),
        ("long", 1007, -1, "can be array<...> or string"),
        ("struct", 1007, -1, "can be array<...> or string"),
        ("array<boolean>", 1007, -1, "another integer type"),
        ("array<long>", 20, -1, "for arrays only"),
        ("array<array<long>>", 1007, -1, "for arrays only"),
        ("struct", 20, -1, "for composite types only"),
        ("long", POINT3, -1, "can be struct or string"),
        ("array<string>", 1020, -1, "delimited by ';' can be string only"),
    ],
)
def test_override_that_could_never_hold_the_values(
    text: str, type_oid: int, typmod: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        override_type(text, type_oid, typmod, TYPES)
