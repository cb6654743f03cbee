"""Lake types that the config sets for columns, and the values that they can represent."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from tests.harness.types import Type
from tests.harness.user_types import PAIRS
from tests.harness.wide_tables import STREAMED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.harness.databases import Database

PAIR = "struct<a:integer,b:string>"
NEST = f"struct<p:{PAIR},ints:array<integer>,day:date>"
CHOSEN = "chosen"
WITH_STRUCTS = (
    (Type("pair", PAIR, PAIRS), "struct"),
    (Type("filled_pair", PAIR, ("(1,x)",)), "struct"),
    (Type("parts", "struct<a:integer,d:date>", ("(1,2024-02-29)",), ("(,infinity)",)), "struct"),
    (
        Type(
            "nest",
            NEST,
            ('("(1,""x \\\\ y"")","{1,NULL}",2024-02-29)', "(,,)", '("(,)",{},)'),
            ('(,"{{1},{2}}",)', "(,,infinity)"),
        ),
        "struct",
    ),
    (
        Type(
            "pair[]",
            f"array<{PAIR}>",
            ("{}", '{"(1,)",NULL,"(,\\"x \\\\\\\\ \\"\\" y\\")"}'),
            ('{{"(1,)"},{"(2,)"}}', '[0:0]={"(1,)"}'),
        ),
        "array<struct>",
    ),
    (
        Type("nest[]", f"array<{NEST}>", ('{"(,\\"{1,2}\\",)"}',), ('{"(,,-infinity)"}',)),
        "array<struct>",
    ),
    (Type("int4", "long", ("-2147483648", "2147483647")), "long"),
    (Type("int2[]", "array<long>", ("{1,NULL,-32768}",), ("[2:2]={1}",)), "array<long>"),
    (Type("oid", "decimal(10,0)", ("0", "4294967295")), "decimal(10,0)"),
    (Type("price", "string", ("1.5", "NaN")), "string"),
    (Type("timestamptz", "string", ("infinity", "2024-02-29 01:02:03.45+05")), "string"),
    (Type("tags", "string", ("{a,NULL}", "{{a},{b}}")), "string"),
)
"""Types, and the lake types that the config sets for them."""

NARROWED = "narrowed"
HUGE = "9" * 29
NARROW: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (
        "amount",
        "numeric",
        "decimal(38,9)",
        {
            "0": Decimal("0E-9"),
            "1.5": Decimal("1.500000000"),
            "-0.100": Decimal("-0.100000000"),
            "0.0000000010000": Decimal("0.000000001"),
            f"{HUGE}.123456789": Decimal(f"{HUGE}.123456789"),
            f"-{HUGE}": Decimal(f"-{HUGE}.000000000"),
            f"1{HUGE}": None,
            "0.0000000001": None,
            "1.0000000001": None,
            "NaN": None,
            "Infinity": None,
            "-Infinity": None,
        },
    ),
    (
        "whole",
        "numeric",
        "decimal(3,0)",
        {"0": Decimal(0), "-999": Decimal(-999), "7.00": Decimal(7), "1000": None, "0.5": None},
    ),
    (
        "amounts",
        "numeric[]",
        "array<decimal(10,2)>",
        {
            "{1.5,NULL,-0}": [Decimal("1.50"), None, Decimal("0.00")],
            "{1,0.001}": None,
            "{NaN}": None,
        },
    ),
    ("few", "int8", "short", {"-32768": -32768, "32768": None, "-9223372036854775808": None}),
    ("count", "text", "long", {"12": 12, "-3": -3, "007": None, "+1": None, " 1": None, "": None}),
    ("day", "varchar", "date", {"2024-02-29": date(2024, 2, 29), "2023-02-29": None, "x": None}),
    ("is_so", "text", "boolean", {"t": True, "f": False, "true": None, "T": None}),
    ("ratio", "text", "double", {"0.5": 0.5, "1e400": None, "0x10": None, "nan": None}),
    (
        "at",
        "text",
        "timestamp",
        {
            "2024-02-29 23:59:59.5+00": datetime(2024, 2, 29, 23, 59, 59, 500_000, UTC),
            "2024-02-29 23:59:59.5": None,
            "2024-02-29T23:59:59Z": None,
        },
    ),
)
"""Column, type, its lake type in the config, and its value for each text (None: in `_cdc_raw`).

A decimal accepts any number of trailing zeros in the source; all others need the exact text.
"""


def create_narrowed(database: Database) -> None:
    columns = [f"{name} {pg_type}" for name, pg_type, _, _ in NARROW]
    database.execute(f"CREATE TABLE {NARROWED} (id int PRIMARY KEY, {', '.join(columns)})")
    with database.connect() as connection:
        for i in range(max(len(values) for *_, values in NARROW)):
            texts = [([*values] + [None] * 99)[i] for *_, values in NARROW]
            places = ", ".join(f"%s::text::{pg_type}" for _, pg_type, _, _ in NARROW)
            query = f"INSERT INTO {NARROWED} VALUES ({i}, {places})"
            connection.execute(query.encode(), texts)


def change_narrowed(database: Database) -> None:
    names = ", ".join(name for name, *_ in NARROW)
    database.execute(f"INSERT INTO {NARROWED} SELECT id + {STREAMED}, {names} FROM {NARROWED}")


def types_of(tables: Mapping[str, Mapping[str, str]]) -> str:
    """Return TOML that sets lake types for columns, by table."""
    lines = []
    for table, types in tables.items():
        lines += [f'[sources.shop.table."public.{table}".types]']
        lines += [f'{column} = "{wanted}"' for column, wanted in types.items()]
    return "\n".join(lines)
