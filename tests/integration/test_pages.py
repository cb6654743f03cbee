"""What COPY reads of real tables: every value, every row, and what happens when it can't."""

from __future__ import annotations

import asyncio
import gc
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from ingestd.model.changes import change_schema
from ingestd.model.errors import TableChangedError, TableError, TableReplacedError, TransientError
from ingestd.model.lsn import Lsn
from ingestd.model.row_checks import UNLIMITED_BYTES
from ingestd.model.schema import Column, Table, TableId
from ingestd.ports import Split
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.tables import describe, list_tables
from ingestd.postgres.connection.session import connect
from ingestd.postgres.snapshot.ctid_splits import CtidSplits
from ingestd.postgres.snapshot.read_view import ExportedView, ReadPoint
from ingestd.postgres.snapshot.table_pages import TablePages
from ingestd.testing.embedded.waiting import await_until
from ingestd.testing.oracle.server_text import FLOAT_TEXTS, text_function
from tests.harness.databases import Database

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from ingestd.model.changes import TableBatch

POINT = Lsn(0x1_0000_0000)
AT = datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
WHOLE = 1 << 40


async def table_named(database: Database, name: str) -> Table:
    async with await connect(database.dsn) as connection:
        rows = [r for r in await list_tables(connection) if r.name == name]
        [table] = await describe(connection, rows, before_full=False)
    return table


@asynccontextmanager
async def exported(database: Database) -> AsyncGenerator[str, None]:
    async with await connect(database.dsn, autocommit=False) as connection:
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor = await connection.execute("SELECT pg_export_snapshot()")
        row: Any = await cursor.fetchone()
        yield row[0]


def pages_of(dsn: str, split: Split, **more: Any) -> TablePages:
    return TablePages(
        dsn,
        split,
        ExportedView(dsn, split.snapshot, ReadPoint(POINT, AT)),
        row_limit_bytes=UNLIMITED_BYTES,
        **more,
    )


async def read(database: Database, splits: Sequence[Split], **more: Any) -> list[TableBatch]:
    found = []
    for split in splits:
        pages = pages_of(database.dsn, split, **more)
        found += [page.batch async for page in pages.pages()]
        await pages.close()
    return found


async def read_whole(
    database: Database, name: str, target_bytes: int = WHOLE, **more: Any
) -> list[Any]:
    """All rows of a table as dicts."""
    table = await table_named(database, name)
    async with exported(database) as snapshot:
        splits = await CtidSplits(database.dsn).splits(table, snapshot, target_bytes)
        batches = await read(database, splits, **more)
    for batch in batches:
        batch.rows.validate(full=True)
        assert batch.rows.schema == change_schema(table)
    return [row for b in batches for row in b.rows.to_pylist(maps_as_pydicts="strict")]


# --- values ----------------------------------------------------------------------------------

VALUES: dict[str, list[str]] = {
    "bool": ["true", "false"],
    "int2": ["-32768", "0", "32767"],
    "int4": ["-2147483648", "-1", "2147483647"],
    "int8": ["-9223372036854775808", "0", "9223372036854775807"],
    "oid": ["0", "4294967295"],
    "float4": ["NaN", "Infinity", "-Infinity", "-0", "0.1", "1e-38", "3.4028235e38", "16777217"],
    "float8": ["NaN", "-Infinity", "-0", "0.1", "1e-300", "1.7976931348623157e308", "1e15"],
    "numeric(12,2)": ["NaN", "0", "-0.01", "9999999999.99"],
    "numeric(38,10)": ["1234567890123456789012345678.0123456789", "-0.0000000001"],
    "numeric": ["NaN", "Infinity", "1e-50", "123456789012345678901234567890123456789012345.6"],
    "text": ["", "a", "é\n\t\\", "日本語", "NULL", "\\N"],
    "varchar(5)": ["", "ab  ", "日本"],
    "char(6)": ["", "ab", "日本", "abcdef"],
    "name": ["", "größe"],
    '"char"': ["a", ""],
    "bytea": ["\\x", "\\x00", "\\xdeadbeef00ff"],
    "date": ["infinity", "-infinity", "2024-02-29", "0001-01-01", "0001-01-01 BC",
             "4713-01-01 BC", "5874897-12-31", "9999-12-31", "10000-01-01", "1900-02-28",
             "2000-02-29", "0005-02-29 BC", "0401-03-01 BC"],
    "timestamp": ["infinity", "-infinity", "2024-02-29 23:59:59.999999", "0001-01-01",
                  "0044-03-15 12:00:00.5 BC", "294276-12-31 23:59:59.999999", "4713-01-01 BC",
                  "9999-12-31 23:59:59.999999", "10000-01-01", "1969-12-31 23:59:59.9"],
    "timestamptz": ["infinity", "-infinity", "2024-02-29 23:59:59.5+00", "0044-03-15 BC",
                    "294276-12-31 23:59:59.999999+00", "2024-07-01 12:00+05:30",
                    "0001-01-01 00:00:00+00", "10000-01-01 00:00:00+00"],
    "time": ["00:00", "24:00:00", "12:34:56.789"],
    "timetz": ["12:34:56.789+05:30"],
    "interval": ["1 year 2 mons -3 days 04:05:06.7", "0", "-1 day"],
    "uuid": ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "json": ['{"b": 1,  "a": [null, "é"]}', "null"],
    "jsonb": ['{"b": 1,  "a": [null, "é"]}', "null"],
    "xml": ["<a>é</a>", '<?xml version="1.0" encoding="UTF-8"?><a/>'],
    "inet": ["10.0.0.1", "10.0.0.1/24", "::1"],
    "cidr": ["10.0.0.0/8"],
    "macaddr": ["08:00:2b:01:02:03"],
    "money": ["-1234.5"],
    "bit(3)": ["101"],
    "varbit": ["", "1"],
    "point": ["(1,0.1)"],
    "tsvector": ["'a':1 'b'"],
    "int4range": ["empty", "[1,5)"],
    "int4[]": ["{}", "{1,NULL,3}", "[0:1]={1,2}"],
    "text[]": ['{"",NULL,"NULL","a,b"}'],
    "regclass": ["pg_class"],
    "pg_lsn": ["16/B374D848"],
    "mood": ["sad", "so so"],
    "price": ["1.50"],
    "code": ["ab"],
    "pair": ["(1,)", "(,)", '(2,"x y")'],
}  # fmt: skip

TYPES = (
    "CREATE TYPE mood AS ENUM ('sad', 'so so')",
    "CREATE DOMAIN price AS numeric(6,2)",
    "CREATE DOMAIN code AS char(4)",
    "CREATE TYPE pair AS (a int, b text)",
    # a cast to text is not the output function
    "CREATE FUNCTION mood_text(mood) RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT 'x' $$",
    "CREATE CAST (mood AS text) WITH FUNCTION mood_text(mood)",
)


def texts_in_copy_format(database: Database, query: str) -> list[tuple[str | None, ...]]:
    """The output functions' texts, by another way: COPY in text format."""
    options = (
        "-c datestyle=iso -c timezone=UTC -c intervalstyle=iso_8601 -c bytea_output=hex "
        "-c extra_float_digits=3"
    )
    with database.connect() as connection:
        for setting in options.split("-c ")[1:]:
            connection.execute(f"SET {setting}".encode())
        with connection.cursor() as cursor, cursor.copy(f"COPY ({query}) TO STDOUT") as copy:
            return list(copy.rows())


def text_in_the_lake(row: dict[str, Any], table: Table, name: str) -> str | None:
    """The text that column and `_cdc_raw` give back (I7)."""
    raw = (row["_cdc_raw"] or {}).get(name)
    if raw is not None:
        assert row[name] is None, "a value both in its column and in _cdc_raw"
        return str(raw)
    value = row[name]
    return None if value is None else text_function(table.column(name).type)(value)


def canonical(text: str | None, column: Column) -> str | None:
    """The server's text as `text_in_the_lake` writes it: floats have several for one value."""
    function = text_function(column.type)
    return function(text) if text is not None and function in FLOAT_TEXTS else text


def has_xml(database: Database) -> bool:
    """Some builds of the server have none."""
    try:
        database.execute("SELECT '<a/>'::xml")
    except psycopg.errors.FeatureNotSupported:
        return False
    return True


@pytest.fixture
def typed(database: Database) -> Database:
    """Table `typed`: a column for each type; row i has the i-th value of each, or null."""
    database.execute(*TYPES)
    values_of = {name: v for name, v in VALUES.items() if name != "xml" or has_xml(database)}
    columns = ", ".join(f'"c {i}" {name}' for i, name in enumerate(values_of))
    database.execute(f"CREATE TABLE typed (id int PRIMARY KEY, {columns})")
    for i in range(max(map(len, VALUES.values())) + 1):
        values = [v[i] if i < len(v) else None for v in values_of.values()]
        literals = ", ".join("NULL" if v is None else f"$q${v}$q$" for v in values)
        database.execute(f"INSERT INTO typed VALUES ({i}, {literals})")
    return database


async def is_packed(database: Database, name: str) -> bool:
    table = await table_named(database, name)
    async with exported(database) as snapshot:
        splits = await CtidSplits(database.dsn).splits(table, snapshot, WHOLE)
    return all(BlockRange.parse(s.where).is_packed for s in splits)


@pytest.mark.parametrize("has_toast", [False, True])
async def test_lossless_every_type_gives_the_output_functions_text(
    typed: Database, *, has_toast: bool
) -> None:
    if has_toast:  # then rows are read one by one
        typed.execute(
            """ALTER TABLE typed ADD toasted text""",
            """ALTER TABLE typed ALTER toasted SET STORAGE EXTERNAL""",
            """UPDATE typed SET toasted = repeat('é', 5000) WHERE id = 1""",
        )
    assert await is_packed(typed, "typed") is not has_toast
    table = await table_named(typed, "typed")
    expected = texts_in_copy_format(typed, "SELECT * FROM typed ORDER BY id")
    rows = sorted(await read_whole(typed, "typed"), key=lambda r: r["id"])
    names = [c.name for c in table.columns]
    found = [tuple(text_in_the_lake(row, table, n) for n in names) for row in rows]
    assert len(found) == len(expected)
    wrong = [
        (table.columns[i].pg_type, there, here)
        for row, lake in zip(expected, found, strict=True)
        for i, (there, here) in enumerate(zip(row, lake, strict=True))
        if canonical(there, table.columns[i]) != here
    ]
    assert wrong == []


async def test_what_a_column_holds_is_in_it_and_not_in_cdc_raw(database: Database) -> None:
    database.execute(
        "CREATE TABLE plain (id int PRIMARY KEY, n bigint, f float8, b bool, d date, t timestamptz,"
        " u timestamp, x bytea, s text, p numeric(9,3))",
        "INSERT INTO plain VALUES (1, -5, 'NaN', true, '2024-02-29', '2024-02-29 10:00+02',"
        " '1969-12-31 23:59:59.9', '\\x00ff', '', 1.5)",
        "INSERT INTO plain (id) VALUES (2)",
    )
    full, empty = sorted(await read_whole(database, "plain"), key=lambda r: r["id"])
    assert full["_cdc_raw"] is None
    assert (full["n"], full["b"], str(full["d"]), full["x"]) == (-5, True, "2024-02-29", b"\0\xff")
    assert full["f"] != full["f"]
    assert full["t"] == datetime(2024, 2, 29, 8, tzinfo=UTC)
    assert full["u"] == datetime(1969, 12, 31, 23, 59, 59, 900_000)  # noqa: DTZ001
    assert (full["s"], str(full["p"])) == ("", "1.500")
    assert {empty[n] for n in "nfbdtuxsp"} == {None}
    assert empty["_cdc_raw"] is None


async def test_rows_stand_at_the_point_of_the_snapshot(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    [row] = await read_whole(database, "t")
    row.pop("_cdc_raw")
    assert row == {
        "id": 1, "_cdc_op": "r", "_cdc_lsn": int(POINT), "_cdc_seq": 0, "_cdc_xid": None,
        "_cdc_ts": AT, "_cdc_before": None, "_cdc_unchanged": None,
    }  # fmt: skip


async def test_nulls_in_many_columns(database: Database) -> None:
    columns = ", ".join(f"c{i} int" for i in range(70))
    database.execute(f"CREATE TABLE wide (id int PRIMARY KEY, {columns})")
    for i in range(70):
        database.execute(f"INSERT INTO wide (id, c{i}) VALUES ({i}, {i * 1000})")
    rows = await read_whole(database, "wide")
    assert len(rows) == 70
    for row in rows:
        present = {n: row[n] for n in row if n.startswith("c") and row[n] is not None}
        assert present == {f"c{row['id']}": row["id"] * 1000}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "odd"),
    [
        ("smallint", "-25284"),
        ("int", "-1656984801"),
        ("bigint", "-7116695538068470671"),
        ("oid", "4294941000"),
        ("text", "chr(14)"),
        ("text", "chr(15)"),
        ("text", "'a' || chr(15) || chr(14)"),
    ],
)
async def test_values_that_look_like_marks_are_read_as_they_are(
    database: Database, kind: str, odd: str
) -> None:
    database.execute(
        f"CREATE TABLE t (id int PRIMARY KEY, v {kind})",
        f"INSERT INTO t SELECT i, (i % 30000)::{kind} FROM generate_series(1, 20000) i",
        f"INSERT INTO t VALUES (20001, {odd}), (20002, null), (20003, {odd})",
        "INSERT INTO t SELECT i, null FROM generate_series(20004, 30000) i",
    )
    rows = await read_whole(database, "t")
    found = sorted((row["id"], None if row["v"] is None else str(row["v"])) for row in rows)
    expected = database.rows("SELECT id, v::text FROM t ORDER BY id")
    assert found == [tuple(row) for row in expected]


async def test_a_null_where_none_was_announced_is_read_as_one(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int, v int NOT NULL)",
        "INSERT INTO t SELECT i, i FROM generate_series(1, 30000) i",
    )
    table = await table_named(database, "t")
    database.execute("ALTER TABLE t ALTER v DROP NOT NULL", "INSERT INTO t VALUES (30001, NULL)")
    async with exported(database) as snapshot:
        splits = await CtidSplits(database.dsn).splits(table, snapshot, WHOLE)
        batches = await read(database, splits)
    rows = [(r["id"], r["v"]) for b in batches for r in b.rows.to_pylist()]
    assert sorted(rows) == [*((i, i) for i in range(1, 30001)), (30001, None)]


# --- rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("target_bytes", [WHOLE, 100_000])
async def test_exactly_once_every_row_of_a_partitioned_table(
    database: Database, target_bytes: int
) -> None:
    database.execute(
        "CREATE TABLE p (id int, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 (v text, id int NOT NULL)",  # other order
        "ALTER TABLE p ATTACH PARTITION p1 FOR VALUES FROM (0) TO (5000)",
        "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (5000) TO (99999) PARTITION BY HASH (id)",
        "CREATE TABLE p2a PARTITION OF p2 FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
        "CREATE TABLE p2b PARTITION OF p2 FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
        "ALTER TABLE p REPLICA IDENTITY FULL",
        "INSERT INTO p SELECT i, 'v' || i FROM generate_series(0, 19999) i",
    )
    rows = await read_whole(database, "p", target_bytes)
    found = sorted((row["id"], row["v"]) for row in rows)
    assert found == [(i, f"v{i}") for i in range(20_000)]


async def test_a_partitioned_table_without_partitions_is_empty(database: Database) -> None:
    database.execute("CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id)")
    assert await read_whole(database, "p") == []


async def test_a_parent_has_its_own_rows_only(database: Database) -> None:
    database.execute(
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent)",
        "INSERT INTO parent VALUES (1)",
        "INSERT INTO child VALUES (2)",
    )
    assert [row["id"] for row in await read_whole(database, "parent")] == [1]
    assert [row["id"] for row in await read_whole(database, "child")] == [2]


async def test_names_that_need_quotes(database: Database) -> None:
    database.execute(
        'CREATE SCHEMA "Ü. ""x"',
        """CREATE TABLE "Ü. ""x"."%s {t}" ("a""b %s {0}" int PRIMARY KEY, "ünï" text)""",
        """INSERT INTO "Ü. ""x"."%s {t}" VALUES (1, 'x')""",
    )
    [row] = await read_whole(database, "%s {t}")
    assert (row['a"b %s {0}'], row["ünï"]) == (1, "x")


@pytest.mark.thorough
@pytest.mark.parametrize("large_bytes", [1, 12_000_000, 1 << 30])
async def test_values_of_many_megabytes(database: Database, large_bytes: int) -> None:
    """Whether or not the next block is read before one is done with."""
    database.execute(
        "CREATE TABLE big (id int PRIMARY KEY, body text)",
        "INSERT INTO big SELECT i, repeat(i::text, 9000000) FROM generate_series(1, 4) i",
    )
    rows = await read_whole(database, "big", large_block_bytes=large_bytes)
    assert sorted((r["id"], r["body"][0], len(r["body"])) for r in rows) == [
        (i, str(i), 9_000_000) for i in range(1, 5)
    ]


@pytest.mark.thorough
async def test_bounded_batches_of_values_that_are_small_on_disk_only(database: Database) -> None:
    database.execute(
        "CREATE TABLE bomb (id int PRIMARY KEY, body text)",
        "INSERT INTO bomb SELECT i, repeat('x', 100000) FROM generate_series(1, 2000) i",
    )
    assert await is_packed(database, "bomb")
    table = await table_named(database, "bomb")
    async with exported(database) as snapshot:
        [split] = await CtidSplits(database.dsn).splits(table, snapshot, WHOLE)
        async with aclosing(pages_of(database.dsn, split).pages()) as batches:
            sizes = [(b.rows.num_rows, b.nbytes) for b in [p.batch async for p in batches]]
    assert sum(rows for rows, _ in sizes) == 2000
    assert max(nbytes for _, nbytes in sizes) < 60 << 20


# --- tables replaced while they are read (I6) ------------------------------------------------

REWRITES = {
    "vacuum full": "VACUUM FULL t",
    "cluster": "CLUSTER t USING t_pkey",
    "type": "ALTER TABLE t ALTER id TYPE bigint",
    "same type, other values": "ALTER TABLE t ALTER v TYPE text USING v || 'x'",
    "volatile default": "ALTER TABLE t ADD at float8 DEFAULT random()",
    "unlogged": "ALTER TABLE t SET UNLOGGED",
}


@pytest.mark.thorough
@pytest.mark.parametrize("statement", REWRITES.values(), ids=REWRITES)
async def test_snapshot_boundary_a_rewrite_between_splits_is_detected(
    database: Database, statement: str
) -> None:
    await fill(database, 3000)
    table = await table_named(database, "t")
    async with exported(database) as snapshot:
        first, *others = await CtidSplits(database.dsn).splits(table, snapshot, 100_000)
        assert sum(b.rows.num_rows for b in await read(database, [first])) > 0
        database.execute(statement)
        with pytest.raises(TableReplacedError):
            await read(database, others)


@pytest.mark.parametrize("statement", [REWRITES["vacuum full"], REWRITES["cluster"]])
async def test_snapshot_boundary_one_split_survives_moved_rows(
    database: Database, statement: str
) -> None:
    await fill(database, 3000)
    database.execute("UPDATE t SET v = 'u' WHERE id % 3 = 0")
    table = await table_named(database, "t")
    async with exported(database) as snapshot:
        splits = await CtidSplits(database.dsn).splits(table, snapshot, WHOLE)
        database.execute(statement)
        batches = await read(database, splits)
    ids = [i for b in batches for i in b.rows.column("id").to_pylist()]
    assert sorted(ids) == list(range(1, 3001))


async def test_snapshot_boundary_a_truncated_table_is_empty(database: Database) -> None:
    await fill(database, 3000)
    table = await table_named(database, "t")
    async with exported(database) as snapshot:
        splits = await CtidSplits(database.dsn).splits(table, snapshot, 100_000)
        database.execute("TRUNCATE t", "INSERT INTO t VALUES (1, 'later')")
        assert await read(database, splits) == []


async def test_snapshot_boundary_other_ddl_is_no_rewrite(database: Database) -> None:
    await fill(database, 3000)
    table = await table_named(database, "t")
    async with exported(database) as snapshot:
        splits = await CtidSplits(database.dsn).splits(table, snapshot, 100_000)
        database.execute("ALTER TABLE t ADD n int DEFAULT 5", "CREATE INDEX ON t (v)", "VACUUM t")
        batches = await read(database, splits)
    assert sum(b.rows.num_rows for b in batches) == 3000


# --- faults ----------------------------------------------------------------------------------


async def test_no_right_to_read_stops_the_table_and_says_which_grant(database: Database) -> None:
    user = f"u_{database.name}"
    database.execute(
        f"CREATE ROLE {user} LOGIN",
        "CREATE TABLE secret (id int PRIMARY KEY)",
    )
    table = await table_named(database, "secret")
    dsn = database.server.dsn(database.name, user=user)
    try:
        async with exported(database) as snapshot:
            [split] = await CtidSplits(dsn).splits(table, snapshot, WHOLE)
            with pytest.raises(TableError, match="permission denied") as caught:
                await drain(pages_of(dsn, split))
        grant = 'GRANT SELECT ON "public"."secret" TO'
        assert caught.value.table == TableId("public", "secret")
        assert grant in (caught.value.remedy or "")
        database.execute(*(caught.value.remedy or "").rstrip(";").split(";"))
        async with exported(database) as snapshot:
            [split] = await CtidSplits(dsn).splits(table, snapshot, WHOLE)
            assert await drain(pages_of(dsn, split)) == []
    finally:
        database.execute(f"DROP OWNED BY {user}", f"DROP ROLE {user}")


async def test_the_right_to_the_root_alone_is_enough(database: Database) -> None:
    user = f"u_{database.name}"
    database.execute(
        "CREATE TABLE p (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (5000)",
        "INSERT INTO p VALUES (1), (2)",
        f"CREATE ROLE {user} LOGIN",
        f"GRANT SELECT ON p TO {user}",
    )
    table = await table_named(database, "p")
    dsn = database.server.dsn(database.name, user=user)
    try:
        async with exported(database) as snapshot:
            splits = await CtidSplits(dsn).splits(table, snapshot, WHOLE)
            batches = [b for s in splits for b in await drain(pages_of(dsn, s))]
    finally:
        database.execute(f"DROP OWNED BY {user}", f"DROP ROLE {user}")
    assert sorted(i for b in batches for i in b.rows.column("id").to_pylist()) == [1, 2]


async def test_rows_hidden_by_a_policy_are_an_error_not_missing(database: Database) -> None:
    user = f"u_{database.name}"
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "INSERT INTO t VALUES (1), (2)",
        "ALTER TABLE t ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY odd ON t USING (id = 1)",
        f"CREATE ROLE {user} LOGIN",
        f"GRANT SELECT ON t TO {user}",
    )
    table = await table_named(database, "t")
    dsn = database.server.dsn(database.name, user=user)
    try:
        async with exported(database) as snapshot:
            [split] = await CtidSplits(dsn).splits(table, snapshot, WHOLE)
            with pytest.raises(TableError, match="row-level security") as caught:
                await drain(pages_of(dsn, split))
        assert "BYPASSRLS" in (caught.value.remedy or "")
    finally:
        database.execute(f"DROP OWNED BY {user}", f"DROP ROLE {user}")


async def test_a_dropped_table_ends_its_reading(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    table = await table_named(database, "t")
    async with exported(database) as snapshot:
        [split] = await CtidSplits(database.dsn).splits(table, snapshot, WHOLE)
        database.execute("DROP TABLE t")
        with pytest.raises(TableError):
            await drain(pages_of(database.dsn, split))
    async with exported(database) as snapshot:
        with pytest.raises(TableChangedError, match="does not exist"):  # no fault of anybody
            await CtidSplits(database.dsn).splits(table, snapshot, WHOLE)


async def test_a_view_is_refused(database: Database) -> None:
    database.execute("CREATE VIEW v AS SELECT 1 AS id", "CREATE TABLE t (id int PRIMARY KEY)")
    oid = database.value("SELECT 'v'::regclass::oid::int8")
    table = replace(await table_named(database, "t"), oid=oid)
    async with exported(database) as snapshot:
        with pytest.raises(TableError, match="not a table"):
            await CtidSplits(database.dsn).splits(table, snapshot, WHOLE)


async def test_a_server_that_goes_away_is_transient(database: Database) -> None:
    await fill(database, 300_000)
    table = await table_named(database, "t")
    async with exported(database) as snapshot:
        [split] = await CtidSplits(database.dsn).splits(table, snapshot, WHOLE)
        async with aclosing(pages_of(database.dsn, split).pages()) as batches:
            await anext(batches)
            database.rows(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND query LIKE 'COPY%'"
            )
            with pytest.raises(TransientError) as caught:
                [batch async for batch in batches]
    assert caught.value.reason in {"server_restarting", "connection_lost"}


async def test_closing_early_ends_the_session_at_the_server(database: Database) -> None:
    await fill(database, 300_000)
    table = await table_named(database, "t")
    async with exported(database) as snapshot:
        [split] = await CtidSplits(database.dsn).splits(table, snapshot, WHOLE)
        for _ in range(3):
            pages = pages_of(database.dsn, split)
            async with aclosing(pages.pages()) as batches:
                await anext(batches)
                await pages.close()
                await pages.close()
        await asyncio.to_thread(await_until, lambda: not copies(database), 10)


async def test_cancelling_the_reader_ends_the_session_at_the_server(database: Database) -> None:
    await fill(database, 300_000)
    table = await table_named(database, "t")
    async with exported(database) as snapshot:
        [split] = await CtidSplits(database.dsn).splits(table, snapshot, WHOLE)
        begun = asyncio.Event()

        async def reader() -> None:
            async with aclosing(pages_of(database.dsn, split).pages()) as batches:
                async for _ in batches:
                    begun.set()
                    await asyncio.Event().wait()

        task = asyncio.create_task(reader())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gc.collect()
        await asyncio.to_thread(await_until, lambda: not copies(database), 10)


def copies(database: Database) -> int:
    return int(
        database.value(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND query LIKE 'COPY%' AND state = 'active'"
        )
    )


async def fill(database: Database, rows: int) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        f"INSERT INTO t SELECT i, repeat(i::text, 20) FROM generate_series(1, {rows}) i",
    )


async def drain(pages: TablePages) -> list[TableBatch]:
    return [page.batch async for page in pages.pages()]
