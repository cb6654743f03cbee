"""Ranges of the key on a server: of every type, in the order and collation of its index."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.model.errors import TableError, TableReplacedError
from ingestd.model.predicates import ColumnPredicate
from ingestd.model.row_checks import UNLIMITED_BYTES
from ingestd.model.schema import Mask
from ingestd.postgres.snapshot.external_reader import CopyPageSource
from ingestd.postgres.snapshot.key_range import KeyRange
from ingestd.postgres.snapshot.key_splits import KeySplits
from tests.harness.collations import make_collations
from tests.integration.test_pages import REWRITES, exported, table_named

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ingestd.model.schema import Table
    from ingestd.ports import Split
    from tests.harness.databases import Database

SMALL = 20_000
WHOLE = 1 << 40

KEYS: dict[str, tuple[str, str]] = {
    "bigint, negative and zero": ("id bigint PRIMARY KEY", "i - 1500"),
    "smallint": ("id smallint PRIMARY KEY", "i - 1500"),
    "numeric, NaN and infinity": (
        "id numeric PRIMARY KEY",
        "CASE i WHEN 1 THEN 'NaN' WHEN 2 THEN '-5e-30' ELSE (i - 1500) / 7.0 END",
    ),
    "float8": (
        "id float8 PRIMARY KEY",
        "CASE i WHEN 1 THEN 'NaN' WHEN 2 THEN '-Infinity' WHEN 3 THEN 0.1 ELSE (i - 99) / 7.0 END",
    ),
    "text, default collation": ("id text PRIMARY KEY", "chr(65 + i % 58) || '-' || i"),
    "text, odd characters": (
        "id text PRIMARY KEY",
        r"""(ARRAY[E'''"\\%s{}', '日本', '', E'\n'])[1 + i % 4] || i""",
    ),
    "text, C": ('id text COLLATE "C" PRIMARY KEY', "CASE i % 2 WHEN 0 THEN 'a' ELSE 'B' END || i"),
    "text, a language": (
        "id text COLLATE german PRIMARY KEY",
        "CASE i % 4 WHEN 0 THEN 'ä' WHEN 1 THEN 'A' WHEN 2 THEN 'z' ELSE 'Z' END || i",
    ),
    "text, case ignored": (
        "id text COLLATE ignoring PRIMARY KEY",
        "CASE i % 2 WHEN 0 THEN 'a' ELSE 'A' END || i",
    ),
    "varchar": ("id varchar(20) PRIMARY KEY", "'v' || i"),
    "char": ("id char(12) PRIMARY KEY", "'c' || i"),
    "name": ("id name PRIMARY KEY", "'n' || i"),
    "uuid": ("id uuid PRIMARY KEY", "md5(i::text)::uuid"),
    "bytea": ("id bytea PRIMARY KEY", "decode(md5(i::text), 'hex')"),
    "bool": ("id bool, n int, PRIMARY KEY (id, n)", "i % 2 = 0, i"),
    "date": ("id date PRIMARY KEY", "date '0044-03-15 BC' + i * 37"),
    "timestamp": (
        "id timestamp PRIMARY KEY",
        """CASE i WHEN 1 THEN 'infinity' WHEN 2 THEN '-infinity'
             ELSE timestamp '1999-12-31 23:59:59.999999' + i * interval '1 microsecond' END""",
    ),
    "timestamptz": (
        "id timestamptz PRIMARY KEY", "timestamptz '2024-03-31' + i * interval '7 minutes'"
    ),
    "time": ("id time PRIMARY KEY", "time '00:00' + i * interval '11.5 seconds'"),
    "interval": ("id interval PRIMARY KEY", "(i - 1500) * interval '1 day 1.5 seconds'"),
    "inet": ("id inet PRIMARY KEY", "inet '10.0.0.0/30' + i"),
    "bit": ("id bit(12) PRIMARY KEY", "i::bit(12)"),
    "jsonb": ("id jsonb PRIMARY KEY", "jsonb_build_object('n', i, 't', 'x''y')"),
    "enum": (
        "id mood, n int, PRIMARY KEY (id, n)",
        "(ARRAY['zebra', 'so so', 'ant'])[1 + i % 3]::mood, i",
    ),
    "domain": ("id code PRIMARY KEY", "'c' || i"),
    "domain over an enum": (
        "id mood_of, n int, PRIMARY KEY (id, n)",
        "(ARRAY['zebra', 'so so', 'ant'])[1 + i % 3]::mood, i",
    ),
    "domain over a domain over an enum, falling": ("id my_mood NOT NULL, n int NOT NULL",
        "(ARRAY['zebra', 'so so', 'ant'])[1 + i % 3]::mood, i"),
    "domain over an array": ("id ints PRIMARY KEY", "ARRAY[i % 7, NULL, i]"),
    "domain over a range": ("id span PRIMARY KEY", "int4range(i, i + 5)"),
    "domain over a composite value": ("id pair_of PRIMARY KEY", "ROW(i % 7, 'x y' || i)::pair"),
    "domain whose check not all values pass": (
        "id unchecked, n int, PRIMARY KEY (id, n)", "'c' || i % 9, i"
    ),
    "array": ("id int[] PRIMARY KEY", "ARRAY[i % 7, NULL, i]"),
    "composite value": ("id pair PRIMARY KEY", "ROW(i % 7, 'x y' || i)::pair"),
    "range": ("id int4range PRIMARY KEY", "int4range(i, i + 5)"),
    "two columns": ("id int, n text, PRIMARY KEY (id, n)", "i % 3 - 1, 'n' || i"),
    "two columns, another order": ("n text, id int, PRIMARY KEY (id, n)", "'n' || i, i % 3 - 1"),
    "three columns": ("id int, n uuid, m date, PRIMARY KEY (m, id, n)",
                      "i % 3, md5(i::text)::uuid, date '2024-01-01' + i % 5"),
    "identity index": (
        "id bigint NOT NULL UNIQUE, CHECK (id < 0)", "i - 9000000"
    ),
    "identity index of other operators": ("id text NOT NULL", "'x' || i"),
    "identity index of mixed operators": ("id text NOT NULL, n int NOT NULL", "'x' || i % 50, i"),
    "odd names": ('"Sch\'lüssel ""1"" %s {}" int PRIMARY KEY', "i"),
}  # fmt: skip
ROWS = 3000

PREPARE = (
    "CREATE TYPE mood AS ENUM ('zebra', 'so so', 'ant')",
    "CREATE DOMAIN code AS varchar(9) CHECK (value LIKE 'c%')",
    "CREATE TYPE pair AS (a int, b text)",
    "CREATE DOMAIN mood_of AS mood",
    "CREATE DOMAIN my_mood AS mood_of",
    "CREATE DOMAIN ints AS int[]",
    "CREATE DOMAIN span AS int4range",
    "CREATE DOMAIN pair_of AS pair",
    "CREATE DOMAIN unchecked AS text",
)
AFTER = {
    "domain whose check not all values pass": (
        "ALTER DOMAIN unchecked ADD CHECK (value = 'no') NOT VALID",
    ),
    "domain over a domain over an enum, falling": (
        "CREATE UNIQUE INDEX by_id ON t (id DESC, n)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX by_id",
    ),
    "identity index": ("ALTER TABLE t REPLICA IDENTITY USING INDEX t_id_key",),
    "identity index of other operators": (
        "CREATE UNIQUE INDEX by_id ON t (id text_pattern_ops)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX by_id",
    ),
    "identity index of mixed operators": (
        "CREATE UNIQUE INDEX by_id ON t (id text_pattern_ops, n)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX by_id",
    ),
}


async def cut(database: Database, table: Table, snapshot: str, target: int = SMALL) -> list[Split]:
    return list(await KeySplits(database.dsn).splits(table, snapshot, target))


async def numbers(database: Database, splits: Sequence[Split]) -> list[list[int]]:
    """`number` of the rows of each split."""
    found = []
    for split in splits:
        source = CopyPageSource(database.dsn, split, ["number"], row_limit_bytes=UNLIMITED_BYTES)
        rows: list[int] = []
        async for batch in source.batches():
            rows += batch.column("number").to_pylist()
        await source.close()
        found.append(rows)
    return found


def make(database: Database, columns: str, values: str, rows: int = ROWS) -> None:
    database.execute(
        f"CREATE TABLE t ({columns}, number int, filler text)",
        f"INSERT INTO t SELECT {values}, i, repeat('f', 60) FROM generate_series(1, {rows}) i",
    )


@pytest.mark.parametrize("case", KEYS)
async def test_exactly_once_every_row_in_ranges_of_any_key(database: Database, case: str) -> None:
    database.execute(*PREPARE)
    make_collations(database)
    make(database, *KEYS[case])
    database.execute(*AFTER.get(case, ()))
    table = await table_named(database, "t")
    async with exported(database) as snapshot:
        splits = await cut(database, table, snapshot)
        found = await numbers(database, splits)
    assert len(splits) > 10
    assert sorted(n for rows in found for n in rows) == list(range(1, ROWS + 1))
    assert max(map(len, found)) < ROWS / 4


async def test_ranges_follow_the_order_of_the_index(database: Database) -> None:
    make_collations(database)
    make(database, *KEYS["text, a language"])
    database.execute("ANALYZE t")
    table = await table_named(database, "t")
    async with exported(database) as snapshot:
        splits = await cut(database, table, snapshot)
        found = await numbers(database, splits)
    order = database.rows("SELECT number FROM t ORDER BY id")
    places = {n: place for place, (n,) in enumerate(order)}
    assert [sorted(places[n] for n in rows) for rows in found] == _consecutive(map(len, found))
    keys = KeyRange.parse(splits[3].where)
    assert keys is not None
    condition = " AND ".join(bound.as_string(None) for bound in keys.bounds)
    assert "Index Cond" in str(database.rows(f"EXPLAIN SELECT * FROM t WHERE {condition}"))


def _consecutive(sizes: Iterable[int]) -> list[list[int]]:
    counter = itertools.count()
    return [list(itertools.islice(counter, size)) for size in sizes]


async def test_a_large_table_is_sampled_and_cut_evenly(database: Database) -> None:
    rows = 200_000
    make(database, "id uuid PRIMARY KEY", "md5(i::text)::uuid", rows)
    table = await table_named(database, "t")
    async with exported(database) as snapshot:
        splits = await cut(database, table, snapshot, 4 << 20)
        found = [len(part) for part in await numbers(database, splits)]
    assert sum(found) == rows
    assert len(splits) == pytest.approx(5, abs=1)
    assert max(found) < 1.3 * rows / len(splits)


async def test_every_partition_is_split_on_its_own(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int, at date, number int, PRIMARY KEY (id,at)) PARTITION BY RANGE(at)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM ('2024-01-01') TO ('2025-01-01')",
        "CREATE TABLE t2 PARTITION OF t FOR VALUES FROM ('2025-01-01') TO ('2026-01-01')",
        "INSERT INTO t SELECT i, date '2024-01-01' + i % 700, i FROM generate_series(1, 3000) i",
    )
    table = await table_named(database, "t")
    async with exported(database) as snapshot:
        splits = await cut(database, table, snapshot)
        found = await numbers(database, splits)
    assert {json.loads(split.where)["name"] for split in splits} == {"t1", "t2"}
    assert len(splits) > 6
    assert sorted(n for rows in found for n in rows) == list(range(1, 3001))


async def test_rows_of_children_are_not_the_tables(database: Database) -> None:
    make(database, "id int PRIMARY KEY", "i")
    database.execute("CREATE TABLE child () INHERITS (t)", "INSERT INTO child VALUES (5, 5000)")
    table = await table_named(database, "t")
    async with exported(database) as snapshot:
        found = await numbers(database, await cut(database, table, snapshot))
    assert sorted(n for rows in found for n in rows) == list(range(1, ROWS + 1))


@pytest.mark.parametrize(
    "columns", ["id int", "id int, UNIQUE (id)", "id int, EXCLUDE USING btree (id WITH =)"]
)
async def test_without_a_key_it_is_one_split(database: Database, columns: str) -> None:
    make(database, columns, "i")
    table = await table_named(database, "t")
    async with exported(database) as snapshot:
        splits = await cut(database, table, snapshot)
        [rows] = await numbers(database, splits)
    assert sorted(rows) == list(range(1, ROWS + 1))


@pytest.mark.parametrize("hidden", ["masked", "left out"])
async def test_no_value_of_a_hidden_column_is_in_a_split(database: Database, hidden: str) -> None:
    make(database, "n int, id text, PRIMARY KEY (n, id)", "i % 100, 'secret' || i")
    table = await table_named(database, "t")
    name = table.column("id")
    others = tuple(c for c in table.columns if c is not name)
    if hidden == "masked":
        others += (replace(name, mask=Mask("sha256", b"k")),)
    table = replace(table, columns=others, key=())
    async with exported(database) as snapshot:
        splits = await cut(database, table, snapshot)
        found = await numbers(database, splits)
    assert len(splits) > 10
    assert not any("secret" in split.where for split in splits)
    assert sorted(n for rows in found for n in rows) == list(range(1, ROWS + 1))


async def test_a_range_has_the_same_rows_at_a_later_snapshot(database: Database) -> None:
    make(database, "id int PRIMARY KEY", "i")
    table = await table_named(database, "t")
    async with exported(database) as snapshot:
        splits = await cut(database, table, snapshot)
        first = await numbers(database, splits)
    database.execute("UPDATE t SET filler = 'moved' WHERE id % 2 = 0", "VACUUM FULL t")
    async with exported(database) as snapshot:
        later = await numbers(database, [replace(s, snapshot=snapshot) for s in splits])
    assert [sorted(rows) for rows in later] == [sorted(rows) for rows in first]


@pytest.mark.parametrize("name", ["vacuum full", "cluster"])
async def test_snapshot_boundary_moved_rows_are_still_in_their_range(
    database: Database, name: str
) -> None:
    make(database, "id int PRIMARY KEY", "i")
    table = await table_named(database, "t")
    async with exported(database) as snapshot:
        splits = await cut(database, table, snapshot)
        database.execute(REWRITES[name])
        found = await numbers(database, splits)
    assert sorted(n for rows in found for n in rows) == list(range(1, ROWS + 1))


async def test_snapshot_boundary_a_rewrite_between_ranges_is_detected(
    database: Database,
) -> None:
    make(database, "id int PRIMARY KEY", "i")
    table = await table_named(database, "t")
    async with exported(database) as snapshot:
        splits = await cut(database, table, snapshot)
        database.execute(REWRITES["type"])
        with pytest.raises(TableReplacedError):
            await numbers(database, splits)


async def test_the_row_filter_and_predicates_hold_in_every_range(database: Database) -> None:
    make(database, "id int PRIMARY KEY", "i")
    table = replace(await table_named(database, "t"), row_filter="(number % 2) = 0 OR id < 5")
    predicate = ColumnPredicate("id", "<=", 1000)
    found: list[Any] = []
    async with exported(database) as snapshot:
        for split in await cut(database, table, snapshot):
            source = CopyPageSource(
                database.dsn, split, ["id"], [predicate], row_limit_bytes=UNLIMITED_BYTES
            )
            assert source.remaining == ()
            async for batch in source.batches():
                found += batch.column("id").to_pylist()
            await source.close()
    assert sorted(found) == [i for i in range(1, 1001) if i % 2 == 0 or i < 5]


async def test_keys_of_a_database_without_an_encoding(database: Database) -> None:
    name = f"{database.name}_raw"
    database.execute(f"CREATE DATABASE {name} ENCODING 'SQL_ASCII' TEMPLATE template0")
    raw = replace(database, name=name)
    try:
        make(raw, "id text PRIMARY KEY", r"""convert_from('\xe9', 'SQL_ASCII') || i""", 100)
        raw.execute("INSERT INTO t SELECT 'e' || i, i FROM generate_series(101, 3000) i")
        table = await table_named(raw, "t")
        async with exported(raw) as snapshot:
            splits = await cut(raw, table, snapshot)
            found = await numbers(raw, splits)
        assert sorted(n for rows in found for n in rows) == list(range(1, ROWS + 1))
    finally:
        database.execute(f"DROP DATABASE {name} (FORCE)")


async def test_what_is_no_table_is_refused(database: Database) -> None:
    make(database, "id int PRIMARY KEY", "i", 1)
    database.execute("CREATE VIEW v AS SELECT 1 AS id")
    table = await table_named(database, "t")
    view = replace(table, oid=database.value("SELECT 'v'::regclass::oid::int8"))
    async with exported(database) as snapshot:
        with pytest.raises(TableError, match="not a table"):
            await cut(database, view, snapshot)
        with pytest.raises(TableError, match="does not exist"):
            await cut(database, replace(table, oid=1), snapshot)
