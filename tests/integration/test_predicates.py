"""Predicates give the same rows, whether the server or the reader applies them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, get_args

import pyarrow as pa
import pytest

from ingestd.model.predicates import ColumnPredicate, IsNull, NotNull, OneOf, Operator, kept
from ingestd.model.row_checks import UNLIMITED_BYTES
from ingestd.model.schema import Mask
from ingestd.postgres.snapshot.ctid_splits import CtidSplits
from ingestd.postgres.snapshot.external_reader import CopyPageSource
from ingestd.postgres.snapshot.pushdown import condition
from tests.harness.collations import make_collations
from tests.integration.test_pages import WHOLE, exported, table_named

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ingestd.model.predicates import Predicate, PredicateValue
    from ingestd.model.schema import Table
    from ingestd.ports import Split
    from tests.harness.databases import Database

NAN, INFINITY = float("nan"), float("inf")
UUID = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"
NOON = datetime.fromisoformat("2024-02-29T12:00:00.5")
EARLIEST = datetime.fromisoformat("0001-01-01T00:00:00")
LATEST = datetime.fromisoformat("9999-12-31T23:59:59.999999")

COLUMNS: dict[str, tuple[str, list[str], list[PredicateValue]]] = {
    "i2": ("smallint", ["-32768", "0", "7"], [0, 7, 8, -40_000, 1 << 40]),
    "i4": ("int", ["-1", "0", "7"], [0, 7, 1 << 40]),
    "i8": ("bigint", ["-9223372036854775808", "7", "9223372036854775807"], [7, 8, (1 << 63) - 1]),
    "b": ("bool", ["true", "false"], [True, False]),
    "f4": ("float4", ["NaN", "0.1", "-0", "Infinity"], [0.1, 0.0, -0.0, INFINITY, NAN, 1e300]),
    "f8": ("float8", ["NaN", "0.1", "-0", "-Infinity"], [0.1, 0.0, -INFINITY, NAN, 5e-324]),
    "d": (
        "numeric(12,2)",
        ["NaN", "0", "-0.01", "9999999999.99", "1.50"],
        [Decimal("1.5"), Decimal("1.505"), Decimal("-0.01"), Decimal(0)],
    ),
    "n": ("numeric", ["NaN", "1.50", "1e-50"], ["1.50", "NaN"]),
    "t": ("text", ["", "a", "A", "a ", "é", "%_\\'\"", "z"], ["a", "A ", "", "é", "%_\\'\"", "b"]),
    "l": ("text COLLATE german", ["", "a", "A", "ä", "z"], ["a", "b", "ä"]),
    "g": ("text COLLATE ignoring", ["a", "A", "b"], ["a", "A"]),
    "v": ("varchar(9)", ["", "a", "a  "], ["a", "a  "]),
    "c": ("char(4)", ["", "a"], ["a", "a   "]),
    "u": ("uuid", [UUID, UUID.replace("a", "b")], [UUID, UUID.upper(), "nothing", UUID[:-1]]),
    "y": ("bytea", ["\\x", "\\x00ff", "\\x80"], [b"", b"\x00\xff", b"\x01"]),
    "day": (
        "date",
        ["infinity", "-infinity", "0044-03-15 BC", "0001-01-01", "9999-12-31", "10000-01-01"],
        [date.min, date.max, date(2024, 2, 29)],
    ),
    "ts": (
        "timestamp",
        ["infinity", "-infinity", "0044-03-15 BC", "2024-02-29 12:00:00.5", "10000-01-01"],
        [NOON, EARLIEST, LATEST],
    ),
    "tz": (
        "timestamptz",
        ["infinity", "-infinity", "0044-03-15 BC", "2024-02-29 12:00:00.5+00", "10000-01-01"],
        [NOON.replace(tzinfo=UTC), NOON.replace(tzinfo=timezone(timedelta(hours=-7)))],
    ),
    "j": ("jsonb", ["{}", "[1]"], ["{}"]),
    "m": ("mood", ["zebra", "ant"], ["zebra", "bear"]),
}
TO_THE_READER = {"n", "c", "j", "m"}
APPLIED: dict[str, set[Operator]] = {
    "b": {"=", "<>"},
    "f4": {"=", "<", "<="},
    "f8": {"=", "<", "<="},
    "t": {"="},
    "l": {"="},
    "g": {"="},
    "v": {"="},
}
"""Of the other columns all operators are applied."""


def make(database: Database) -> None:
    """Every column's values and null, side by side."""
    rows = 1 + max(len(values) for _, values, _ in COLUMNS.values())
    lines = []
    for i in range(rows):
        cells = [
            f"$v${values[i]}$v$" if i < len(values) else "NULL" for _, values, _ in COLUMNS.values()
        ]
        lines.append(f"({i}, {', '.join(cells)})")
    columns = ", ".join(f"{name} {kind}" for name, (kind, _, _) in COLUMNS.items())
    make_collations(database)
    database.execute(
        "CREATE TYPE mood AS ENUM ('zebra', 'ant')",
        f"CREATE TABLE p (id int PRIMARY KEY, {columns})",
        f"INSERT INTO p VALUES {', '.join(lines)}",
    )


async def read(
    database: Database, split: Split, predicates: Sequence[Predicate] = ()
) -> tuple[pa.Table, Sequence[Predicate]]:
    source = CopyPageSource(database.dsn, split, None, predicates, row_limit_bytes=UNLIMITED_BYTES)
    try:
        batches = [batch async for batch in source.batches()]
    finally:
        await source.close()
    return pa.Table.from_batches(batches) if batches else None, source.remaining


def ids(table: pa.Table | None, predicates: Sequence[Predicate]) -> list[int]:
    if table is None:
        return []
    return sorted(
        i for b in table.to_batches() for i in kept(b, predicates).column("id").to_pylist()
    )


def comparable(table: pa.Table, predicate: Predicate) -> bool:
    """Whether Arrow can compare these at all."""
    try:
        ids(table, [predicate])
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return True


def predicates_of(name: str) -> list[Predicate]:
    _, _, values = COLUMNS[name]
    found: list[Predicate] = [IsNull(name), NotNull(name), OneOf(name, ())]
    found += [ColumnPredicate(name, o, v) for v in values for o in get_args(Operator)]
    return [*found, OneOf(name, tuple(values)), OneOf(name, tuple(values[:1]))]


@pytest.mark.thorough
async def test_rows_are_those_that_the_lakes_values_want(database: Database) -> None:
    make(database)
    table = await table_named(database, "p")
    async with exported(database) as snapshot:
        [split] = await CtidSplits(database.dsn).splits(table, snapshot, WHOLE)
        everything, _ = await read(database, split)
        tried = 0
        for name in COLUMNS:
            for predicate in predicates_of(name):
                if comparable(everything, predicate):
                    found, remaining = await read(database, split, [predicate])
                    assert ids(found, remaining) == ids(everything, [predicate]), predicate
                    tried += 1
    assert tried > 300


async def test_what_both_understand_alike_is_applied(database: Database) -> None:
    make(database)
    table = await table_named(database, "p")
    async with exported(database) as snapshot:
        [split] = await CtidSplits(database.dsn).splits(table, snapshot, WHOLE)
    for name, (_, _, values) in COLUMNS.items():
        operators = APPLIED.get(name, set(get_args(Operator)))
        for operator in get_args(Operator):
            predicate = ColumnPredicate(name, operator, values[0])
            is_applied = name not in TO_THE_READER and operator in operators
            assert is_remaining(database, split, predicate) is not is_applied, predicate


async def test_predicates_with_server_dependent_meaning_remain(
    database: Database,
) -> None:
    make(database)
    table = await table_named(database, "p")
    async with exported(database) as snapshot:
        [split] = await CtidSplits(database.dsn).splits(table, snapshot, WHOLE)
    unsure: list[Predicate] = [
        ColumnPredicate("t", "=", "é"),  # may not exist in the database's encoding
        ColumnPredicate("t", "=", "\0"),
        OneOf("t", ("a", "é")),
        IsNull("t"),  # where the bytes are no UTF-8 the lake has null
        ColumnPredicate("u", "=", UUID.upper()),
        ColumnPredicate("f8", "=", NAN),
        ColumnPredicate("d", "=", Decimal("NaN")),
        ColumnPredicate("i4", "=", 1 << 70),
        ColumnPredicate("i4", "=", value=True),
        ColumnPredicate("i4", "=", 7.0),
        ColumnPredicate("day", "=", NOON),
        ColumnPredicate("ts", "=", NOON.replace(tzinfo=UTC)),
        ColumnPredicate("tz", "=", NOON),
        ColumnPredicate("tz", ">", EARLIEST.replace(tzinfo=timezone(timedelta(hours=1)))),
    ]
    for predicate in unsure:
        assert is_remaining(database, split, predicate), predicate


def is_remaining(database: Database, split: Split, predicate: Predicate) -> bool:
    return (
        predicate
        in CopyPageSource(
            database.dsn, split, None, [predicate], row_limit_bytes=UNLIMITED_BYTES
        ).remaining
    )


async def test_masked_and_overridden_columns_are_not_compared_remotely(
    database: Database,
) -> None:
    make(database)
    table = await table_named(database, "p")
    masked = changed(table, "i4", mask=Mask("sha256", b"k"), type=pa.string())
    hidden = changed(table, "i4", mask=Mask("null"))
    chosen = changed(table, "i4", type=pa.string(), is_override=True)
    async with exported(database) as snapshot:
        [split] = await CtidSplits(database.dsn).splits(table, snapshot, WHOLE)
    predicates: list[Predicate] = [IsNull("i4"), ColumnPredicate("i4", "=", 7), OneOf("i4", (7,))]
    for other in (masked, hidden, chosen):
        source = CopyPageSource(
            database.dsn,
            replace(split, table=other),
            ["id"],
            predicates,
            row_limit_bytes=UNLIMITED_BYTES,
        )
        assert list(source.remaining) == predicates


def changed(table: Table, name: str, **what: object) -> Table:
    columns = [replace(c, **what) if c.name == name else c for c in table.columns]  # type: ignore[arg-type]
    return replace(table, columns=tuple(columns))


async def test_an_index_serves_an_equal_text(database: Database) -> None:
    make_collations(database)
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, name text COLLATE german)",
        "INSERT INTO t SELECT i, 'n' || i FROM generate_series(1, 20000) i",
        "CREATE INDEX by_name ON t (name)",
        "ANALYZE t",
    )
    table = await table_named(database, "t")
    predicate = ColumnPredicate("name", "=", "n77")
    applied = condition(table.column("name"), predicate)
    assert applied is not None
    plan = database.rows(f"EXPLAIN SELECT FROM t WHERE {applied.as_string(None)}")
    assert "by_name" in str(plan)
    async with exported(database) as snapshot:
        splits = await CtidSplits(database.dsn).splits(table, snapshot, 100_000)
        found = [row for split in splits for row in await rows_of(database, split, predicate)]
    assert found == [77]


async def rows_of(database: Database, split: Split, predicate: Predicate) -> list[int]:
    found, remaining = await read(database, split, [predicate])
    return ids(found, remaining)
