"""Columns that are left out, masked or of another type; column lists and row filters."""

from __future__ import annotations

import hashlib
import hmac
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from ingestd.config import TableSettings
from ingestd.decode.type_mapping import BUILT_IN
from ingestd.lake.delta.read import read_raw
from ingestd.lake.fold.plain import Row, fold
from ingestd.model.lsn import Lsn
from ingestd.model.row_checks import UNLIMITED_BYTES
from ingestd.model.schema import Table, TableId
from ingestd.ports import Split
from ingestd.postgres.captured.columns import as_published, controlled
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.publication import published
from ingestd.postgres.catalog.published_filters import with_row_filters
from ingestd.postgres.catalog.tables import describe, list_tables
from ingestd.postgres.connection.session import connect
from ingestd.postgres.snapshot.read_view import ExportedView, ReadPoint
from ingestd.postgres.snapshot.table_pages import TablePages
from ingestd.testing.oracle.comparison import await_caught_up
from tests.harness.compare import registry
from tests.harness.config import wal_config
from tests.harness.databases import skip_without_lists
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

PEOPLE = TableId("public", "people")
KEY = b"open sesame"
LIMIT_S = 60.0
EXCLUDED = 'exclude_columns = ["email"]'
NEEDLE = "hidden-needle"
"""In every value that must not be seen."""


@pytest.fixture
def people(database: Database) -> Database:
    skip_without_lists(database)
    database.execute(
        "CREATE TABLE people"
        " (id int PRIMARY KEY, email text, salary numeric, born date, note text)",
        "INSERT INTO people SELECT i, 'p' || i || '@example.com', i * 1.50, '2000-01-01', 'secret'"
        " FROM generate_series(1, 10) i",
    )
    return database


def hashed(text: str) -> str:
    return hmac.new(KEY, text.encode(), hashlib.sha256).hexdigest()


async def described(database: Database, name: str = "people", **controls: Any) -> Table:
    async with await connect(database.dsn) as connection:
        rows = [r for r in await list_tables(connection) if r.name == name]
        [table] = await describe(connection, rows, before_full=False)
    return controlled(table, TableSettings.model_validate(controls), KEY, BUILT_IN)


# --- snapshots -------------------------------------------------------------------------------


async def snapshot(database: Database, table: Table, *, is_packed: bool) -> list[dict[str, Any]]:
    async with await connect(database.dsn, autocommit=False) as connection:
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor = await connection.execute("SELECT pg_export_snapshot()")
        row: Any = await cursor.fetchone()
        blocks = BlockRange(table.id.schema, table.id.name, is_packed=is_packed, oid=table.oid)
        split = Split(table, row[0], blocks.to_text(), 0)
        view = ExportedView(database.dsn, row[0], ReadPoint(Lsn(1), datetime.now(UTC)))
        pages = TablePages(database.dsn, split, view, row_limit_bytes=UNLIMITED_BYTES)
        batches = [page.batch async for page in pages.pages()]
        await pages.close()
    return [row for batch in batches for row in batch.rows.to_pylist()]


packed_or_not = pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "rows"])


@packed_or_not
async def test_a_snapshot_has_no_excluded_and_no_masked_value(
    people: Database,
    is_packed: bool,  # noqa: FBT001
) -> None:
    masks = {"email": "sha256", "salary": "null", "born": "null"}
    table = await described(people, exclude_columns=["note"], mask_columns=masks)
    rows = await snapshot(people, table, is_packed=is_packed)
    assert [r["id"] for r in rows] == list(range(1, 11))
    assert [r["email"] for r in rows] == [hashed(f"p{i}@example.com") for i in range(1, 11)]
    for row in rows:
        assert row["salary"] is row["born"] is None
        assert not row["_cdc_raw"]
        assert "note" not in row


@packed_or_not
async def test_a_snapshot_has_the_rows_that_the_filter_lets_by(
    people: Database,
    is_packed: bool,  # noqa: FBT001
) -> None:
    people.execute(
        "CREATE PUBLICATION partial FOR TABLE people (id, email)"
        " WHERE (id > 7 OR email LIKE 'p2%' OR email = '{}%s')"
    )
    async with await connect(people.dsn) as connection:
        found = await published(connection, "partial", connection.info.server_version)
        found = await with_row_filters(connection, found)
    sent = found[PEOPLE]
    table = as_published(await described(people), sent.columns, sent.row_filter)
    rows = await snapshot(people, table, is_packed=is_packed)
    assert sorted(r["id"] for r in rows) == [2, 8, 9, 10]
    assert "note" not in rows[0]


@packed_or_not
async def test_columns_may_be_called_as_the_query_calls_its_own(
    database: Database,
    is_packed: bool,  # noqa: FBT001
) -> None:
    names = ["id", "first", "run", "n", "packed", "rows", "source", "c0", "c1", "last"]
    columns = ", ".join(f'"{name}" int' for name in names)
    database.execute(
        f"CREATE TABLE run ({columns}, PRIMARY KEY (id))",
        f"INSERT INTO run SELECT {', '.join(f'i + {j}' for j in range(len(names)))}"
        " FROM generate_series(1, 20000) i",
    )
    rows = await snapshot(database, await described(database, "run"), is_packed=is_packed)
    assert len(rows) == 20000
    assert all([r[name] for name in names] == list(range(r["id"], r["id"] + 10)) for r in rows)


# --- a running daemon ------------------------------------------------------------------------


def config(
    database: Database, lake: Path, section: str, source_extra: str = "", table: str = "people"
) -> str:
    names = f"""slot = "{database.name}"
publication = "{database.name}"
discover_interval = "500ms"
mask_key = "{KEY.decode()}"
{source_extra}"""
    sections = f'[sources.shop.table."public.{table}"]\n{section}'
    return wal_config(lake=lake, dsn=database.dsn, source_extra=names, extra=sections)


def settle(database: Database, daemon: Daemon) -> None:
    """Wait until the lake has what is written now."""
    with database.connect() as connection:
        try:
            await_caught_up(connection, database.name, LIMIT_S)
        except TimeoutError as error:
            raise TimeoutError(daemon.tail()) from error


def raw(lake: Path, table: str = "people") -> list[Row]:
    """The rows of a raw table in the order of their positions."""
    rows = read_raw(str(lake), "shop", TableId("public", table)).to_pylist(maps_as_pydicts="strict")
    return sorted(rows, key=lambda r: (r["_cdc_lsn"], r["_cdc_seq"]))


def current(
    lake: Path, key: Sequence[str] = ("id",), table: str = "people"
) -> list[dict[str, Any]]:
    return fold(read_raw(str(lake), "shop", TableId("public", table)), key)


def stopped(daemon: Daemon, table: str = "people") -> str | None:
    """Why a table is stopped, None while it is not."""
    status = daemon.status()
    tables = [] if status is None else status["sources"]["shop"]["tables"]
    reasons = [
        t["reason"] for t in tables if t["table"] == f"public.{table}" and t["state"] == "stopped"
    ]
    return str(reasons[0]) if reasons else None


def assert_unseen(lake: Path, daemon: Daemon, words: Iterable[str] = (NEEDLE,)) -> None:
    """None of the words is in a value, a name, statistics, `_tables` or the log."""
    shown = repr(raw(lake)) + repr(registry(lake)) + daemon.log_path.read_text("utf-8")
    files = b"".join(f.read_bytes() for f in lake.rglob("*") if f.is_file())
    for word in words:
        assert word not in shown
        assert word.encode() not in files


@pytest.mark.thorough
@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_what_is_masked_or_left_out_is_nowhere_in_the_lake(
    database: Database, lake: Path, make_daemon: MakeDaemon, identity: str
) -> None:
    database.execute(
        "CREATE TABLE people (id int PRIMARY KEY, email text, phone int, note text)",
        f"ALTER TABLE people REPLICA IDENTITY {identity}",
        f"INSERT INTO people VALUES (1, '{NEEDLE}', 987654321, '{NEEDLE}'), (2, NULL, NULL, NULL)",
        f"ALTER TABLE people ADD COLUMN since text DEFAULT '{NEEDLE}'",
        "ALTER TABLE people ADD COLUMN late int DEFAULT 987654321",
    )
    section = """exclude_columns = ["note"]
mask_columns = { email = "sha256", since = "sha256", phone = "null", late = "null" }"""
    daemon = make_daemon(config(database, lake, section, 'before = "full"'))
    daemon.start_ready()
    database.execute(
        f"INSERT INTO people VALUES (3, '{NEEDLE}', 987654321, '{NEEDLE}')",
        f"UPDATE people SET note = note || '{NEEDLE}', email = '{NEEDLE}2' WHERE id = 3",
        "UPDATE people SET id = 4 WHERE id = 3",
        "DELETE FROM people WHERE id = 4",
    )
    settle(database, daemon)
    assert daemon.sigterm() == 0
    assert_unseen(lake, daemon, [NEEDLE, "987654321"])
    rows = raw(lake)
    assert [r["_cdc_op"] for r in rows] == ["t", "r", "r", "c", "u", "u", "d"]
    assert "note" not in rows[0]
    assert all(r["phone"] is None and r["late"] is None for r in rows)
    first, second = hashed(NEEDLE), hashed(f"{NEEDLE}2")
    _, one, two, inserted, updated, moved, deleted = rows
    assert (one["email"], two["email"], inserted["email"]) == (first, None, first)
    assert (one["since"], inserted["since"]) == (first, first)
    assert (updated["email"], moved["email"]) == (second, second)
    if identity == "FULL":
        assert (updated["_cdc_before"]["email"], deleted["_cdc_before"]["email"]) == (first, second)
        assert "note" not in updated["_cdc_before"]
    assert not any(r["_cdc_raw"] for r in rows)
    columns = {c["name"]: c for c in registry(lake)[-1]["columns"]}
    assert (columns["since"]["missing"], columns["late"]["missing"]) == (first, None)
    assert (columns["email"]["delta_type"], columns["phone"]["delta_type"]) == ("string", "integer")


@pytest.mark.thorough
@pytest.mark.parametrize("scope", ["listed", "all tables"])
def test_hidden_values_that_were_not_sent(
    database: Database, lake: Path, make_daemon: MakeDaemon, scope: str
) -> None:
    """A toasted masked value is unchanged as others are; an excluded column is not listed."""
    database.execute(
        "CREATE TABLE people (id int PRIMARY KEY, n int, email text, note text)",
        "ALTER TABLE people ALTER email SET STORAGE EXTERNAL, ALTER note SET STORAGE EXTERNAL",
        f"INSERT INTO people SELECT 1, 1, x, x FROM repeat('{NEEDLE}', 500) x",
    )
    if scope == "all tables":
        database.execute(f'CREATE PUBLICATION "{database.name}" FOR ALL TABLES')
    section = """exclude_columns = ["note"]
mask_columns = { email = "sha256" }"""
    daemon = make_daemon(config(database, lake, section))
    daemon.start_ready()
    database.execute("UPDATE people SET n = 2", "UPDATE people SET email = 'short'")
    settle(database, daemon)
    assert_unseen(lake, daemon)
    _, read, unsent, sent = raw(lake)
    assert (read["email"], sent["email"]) == (hashed(NEEDLE * 500), hashed("short"))
    assert (unsent["email"], unsent["_cdc_unchanged"]) == (None, ["email"])
    assert not sent["_cdc_unchanged"]


def test_a_key_may_be_hashed(database: Database, lake: Path, make_daemon: MakeDaemon) -> None:
    database.execute(
        "CREATE TABLE people (id text PRIMARY KEY, n int)",
        f"INSERT INTO people VALUES ('{NEEDLE}1', 1), ('{NEEDLE}2', 2), ('{NEEDLE}3', 3)",
    )
    daemon = make_daemon(config(database, lake, 'mask_columns = { id = "sha256" }'))
    daemon.start_ready()
    database.execute(
        f"UPDATE people SET id = '{NEEDLE}4' WHERE n = 1",
        "DELETE FROM people WHERE n = 2",
        "UPDATE people SET n = 33 WHERE n = 3",
    )
    settle(database, daemon)
    assert_unseen(lake, daemon)
    rows = {row["id"]: row["n"] for row in current(lake)}
    assert rows == {hashed(f"{NEEDLE}4"): 1, hashed(f"{NEEDLE}3"): 33}


def test_an_overridden_type_keeps_values_out_of_range_as_text(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    values = ["12.5", "12.500", "-0.01", "12.505", "1e9", "NaN", "99999999999.99", "7"]
    inserts = [f"INSERT INTO people VALUES ({i}, '{v}', '{v}')" for i, v in enumerate(values)]
    database.execute("CREATE TABLE people (id int PRIMARY KEY, amount numeric, code text)")
    database.execute(*inserts, "INSERT INTO people VALUES (99, NULL, NULL)")
    section = 'types = { amount = "decimal(12,2)", code = "long" }'
    daemon = make_daemon(config(database, lake, section))
    daemon.start_ready()
    database.execute(*(i.replace("VALUES (", "VALUES (10") for i in inserts))
    settle(database, daemon)
    there = dict(database.rows("SELECT id, amount::text FROM people"))
    for row in raw(lake)[1:]:
        text, kept = there[row["id"]], row["_cdc_raw"] or {}
        fits = text not in {None, "12.505", "NaN", "99999999999.99"}
        assert row["amount"] == (Decimal(text) if fits else None)
        assert kept.get("amount") == (None if fits else text)
        code = None if text is None else values[row["id"] % 100]
        assert row["code"] == (7 if code == "7" else None)
        assert kept.get("code") == (None if code == "7" else code)
    assert len(raw(lake)) == 2 * len(values) + 2


def test_a_publication_by_hand_decides_columns_and_rows(
    people: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    people.execute(
        f"""CREATE PUBLICATION "{people.name}" FOR TABLE people (id, email) WHERE (id > 5)
            WITH (publish_via_partition_root = true)""",
        f"SELECT pg_create_logical_replication_slot('{people.name}', 'pgoutput')",
    )
    daemon = make_daemon(config(people, lake, "", "manage = false"))
    daemon.start_ready()
    people.execute(
        "INSERT INTO people VALUES (20, 'new'), (-1, 'unseen')",
        "UPDATE people SET id = 30 WHERE id = 1",  # now it passes the filter
        "UPDATE people SET id = 2 - id WHERE id = 7",  # and this one does not any more
        "UPDATE people SET email = 'changed' WHERE id = 9",
    )
    settle(people, daemon)
    assert set(raw(lake)[0]) & {"salary", "born", "note"} == set()
    found = sorted((row["id"], row["email"]) for row in current(lake))
    assert found == people.rows("SELECT id, email FROM people WHERE id > 5 ORDER BY id")


def test_whole_rows_without_a_column_are_a_multiset_still(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    database.execute(
        "CREATE TABLE people (a int, b text, note text)",
        "ALTER TABLE people REPLICA IDENTITY FULL",
        f"INSERT INTO people SELECT i % 3, 'b', '{NEEDLE}' || i FROM generate_series(1, 9) i",
    )
    daemon = make_daemon(config(database, lake, 'exclude_columns = ["note"]'))
    daemon.start_ready()
    database.execute(
        f"DELETE FROM people WHERE note = '{NEEDLE}3'",
        f"UPDATE people SET b = 'c' WHERE note = '{NEEDLE}6'",
        f"UPDATE people SET note = '{NEEDLE}' WHERE a = 1",
    )
    settle(database, daemon)
    assert_unseen(lake, daemon)
    there = database.rows("SELECT a, b FROM people ORDER BY 1, 2")
    assert sorted((r["a"], r["b"]) for r in current(lake, ())) == there


def listed_columns(database: Database) -> list[str]:
    """The columns that are published of the only table, none if it is not published."""
    query = "SELECT attnames::text[] FROM pg_publication_tables WHERE pubname = %s"
    return [name for (names,) in database.rows(query, database.name) for name in names]


def test_a_new_column_joins_the_list_and_brings_its_old_values(
    people: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(config(people, lake, 'exclude_columns = ["note"]'))
    daemon.start_ready()
    assert listed_columns(people) == ["id", "email", "salary", "born"]
    people.execute(
        "ALTER TABLE people ADD COLUMN more int DEFAULT 5",
        "INSERT INTO people VALUES (11, 'e', 1, NULL, 'secret', 6)",
        "UPDATE people SET more = 7 WHERE id = 2",
    )
    await_until(lambda: "more" in listed_columns(people), LIMIT_S, daemon.tail)
    people.execute("UPDATE people SET more = 8 WHERE id = 3")
    there = people.rows("SELECT id, more FROM people ORDER BY id")

    def is_there() -> bool:
        found = [(r["id"], r.get("more")) for r in current(lake)]
        return sorted(found) == there

    await_until(is_there, LIMIT_S, lambda: f"{there}, not {current(lake)}\n{daemon.tail()}")
    assert_unseen(lake, daemon, ["secret"])


def test_ddl_that_a_column_list_forbids_is_done_without_it(
    people: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(config(people, lake, 'exclude_columns = ["note"]'))
    daemon.start_ready()
    with pytest.raises(psycopg.errors.DependentObjectsStillExist):
        people.execute("ALTER TABLE people DROP COLUMN born")
    with people.connect(autocommit=False) as session:
        session.execute(f'ALTER PUBLICATION "{people.name}" DROP TABLE people'.encode())
        session.execute("ALTER TABLE people DROP COLUMN born")
        session.execute("INSERT INTO people VALUES (11, 'unseen', 1, 'secret')")
    await_until(lambda: listed_columns(people) == ["id", "email", "salary"], LIMIT_S, daemon.tail)
    people.execute("UPDATE people SET email = 'new' WHERE id = 2")
    there = people.rows("SELECT id, email FROM people ORDER BY id")

    def is_there() -> bool:
        return sorted((r["id"], r["email"]) for r in current(lake)) == there

    await_until(is_there, LIMIT_S, lambda: f"{there}, not {current(lake)}\n{daemon.tail()}")


def test_a_list_goes_as_soon_as_whole_rows_are_the_identity(
    people: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """Until then the server refuses the source's own UPDATE and DELETE."""
    daemon = make_daemon(config(people, lake, 'exclude_columns = ["note"]', 'before = "full"'))
    daemon.start_ready()
    people.execute("ALTER TABLE people REPLICA IDENTITY FULL")
    with pytest.raises(psycopg.errors.InvalidColumnReference):
        people.execute("UPDATE people SET email = 'refused' WHERE id = 2")
    await_until(lambda: "note" in listed_columns(people), LIMIT_S, daemon.tail)
    people.execute(
        "UPDATE people SET email = 'new' WHERE id = 2", "DELETE FROM people WHERE id = 3"
    )
    settle(people, daemon)
    there = people.rows("SELECT id, email FROM people ORDER BY id")
    assert sorted((r["id"], r["email"]) for r in current(lake)) == there
    assert_unseen(lake, daemon, ["secret"])
    assert [r["_cdc_before"]["email"] for r in raw(lake) if r["_cdc_op"] == "d"] == [
        "p3@example.com"
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_a_column_taken_back_in_brings_its_old_values(
    people: Database, lake: Path, make_daemon: MakeDaemon, identity: str
) -> None:
    people.execute(f"ALTER TABLE people REPLICA IDENTITY {identity}")
    daemon = make_daemon(config(people, lake, 'exclude_columns = ["note"]'))
    daemon.start_ready()
    assert daemon.sigterm() == 0
    daemon.write_config(config(people, lake, ""))
    daemon.start_ready()
    people.execute("UPDATE people SET note = 'now' WHERE id = 3")
    settle(people, daemon)
    there = people.rows("SELECT id, note FROM people ORDER BY id")
    assert sorted((r["id"], r["note"]) for r in current(lake)) == there
    if identity == "DEFAULT":  # the table's entry in the publication is another, made by ingestd
        entry = people.value("SELECT oid::text FROM pg_publication_rel")
        await_until(
            lambda: registry(lake)[-1]["storage"].split("|")[4] == entry, LIMIT_S, daemon.tail
        )
    assert daemon.sigterm() == 0
    daemon.start_ready()  # and not once more
    assert daemon.sigterm() == 0
    assert [r["_cdc_op"] for r in raw(lake)].count("t") == 2


def test_a_publication_of_another_owner_decides_columns_and_rows(
    people: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    role = f"r_{people.name}"
    people.execute(
        f"CREATE ROLE {role} LOGIN REPLICATION",
        f"GRANT SELECT ON people TO {role}",
        f"""CREATE PUBLICATION "{people.name}" FOR TABLE people (id, email)
            WITH (publish_via_partition_root = true)""",
    )
    try:
        dsn = people.server.dsn(people.name, user=role)
        daemon = make_daemon(config(people, lake, "").replace(people.dsn, dsn))
        daemon.start_ready()
        people.execute("UPDATE people SET email = 'new' WHERE id = 3")
        settle(people, daemon)
        found = sorted((row["id"], row["email"]) for row in current(lake))
        assert found == people.rows("SELECT id, email FROM people ORDER BY id")
        assert "note" not in raw(lake)[0]
        assert daemon.sigterm() == 0
        assert [r["_cdc_op"] for r in raw(lake)].count("t") == 1
    finally:
        people.execute(f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")


def test_a_renamed_masked_column_stops_the_table_without_a_leak(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    database.execute(
        "CREATE TABLE people (id int PRIMARY KEY, email text)",
        "CREATE TABLE t (id int PRIMARY KEY)",
    )
    daemon = make_daemon(config(database, lake, 'mask_columns = { email = "sha256" }'))
    daemon.start_ready()
    with database.connect(autocommit=False) as session:
        session.execute(f"INSERT INTO people VALUES (1, '{NEEDLE}')".encode())
        session.execute("ALTER TABLE people RENAME COLUMN email TO mail")
        session.execute(f"INSERT INTO people VALUES (2, '{NEEDLE}')".encode())
    reason = await_until(lambda: stopped(daemon), LIMIT_S, daemon.tail)
    assert "email" in reason
    database.execute(f"INSERT INTO people VALUES (3, '{NEEDLE}')", "INSERT INTO t VALUES (1)")
    settle(database, daemon)
    assert [r["id"] for r in raw(lake, "t") if r["_cdc_op"] == "c"] == [1]
    assert_unseen(lake, daemon)


@pytest.mark.thorough
@pytest.mark.parametrize("hidden", ['mask_columns = { email = "sha256" }', EXCLUDED])
@pytest.mark.parametrize("is_running", [True, False], ids=["running", "stopped"])
def test_a_swapped_hidden_column_stops_the_table_without_a_leak(
    database: Database, lake: Path, make_daemon: MakeDaemon, hidden: str, *, is_running: bool
) -> None:
    """As when a column's type is changed by way of a second one: names swapped in one step."""
    database.execute(
        "CREATE TABLE people (id int PRIMARY KEY, email text)",
        "CREATE TABLE t (id int PRIMARY KEY)",
        f"INSERT INTO people VALUES (0, '{NEEDLE}')",
    )
    daemon = make_daemon(config(database, lake, hidden))
    daemon.start_ready()
    if not is_running:
        daemon.sigterm()
    with database.connect(autocommit=False) as session:
        session.execute(f"INSERT INTO people VALUES (1, '{NEEDLE}')".encode())
        session.execute("ALTER TABLE people RENAME COLUMN email TO old_email")
        session.execute("ALTER TABLE people ADD email varchar(99)")
        session.execute(f"INSERT INTO people VALUES (2, '{NEEDLE}', '{NEEDLE}')".encode())
    if not is_running:
        daemon.start()
    reason = await_until(lambda: stopped(daemon), LIMIT_S, daemon.tail)
    assert "'old_email' was called 'email'" in reason
    database.execute(f"INSERT INTO people VALUES (3, '{NEEDLE}')", "INSERT INTO t VALUES (1)")
    settle(database, daemon)
    assert_unseen(lake, daemon)


def test_controls_that_a_table_can_not_have_stop_it_alone(
    people: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    people.execute("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    daemon = make_daemon(config(people, lake, 'exclude_columns = ["nope"]'))
    daemon.start()
    reason = await_until(lambda: stopped(daemon), LIMIT_S, daemon.tail)
    assert "column 'nope' in exclude_columns does not exist" in reason
    await_until(lambda: daemon.events("epoch.committed"), LIMIT_S, daemon.tail)
    assert [r["id"] for r in current(lake, table="t")] == [1]


def test_inserts_of_a_table_that_others_publish_without_identity(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    database.execute(
        "CREATE TABLE people (id int PRIMARY KEY, note text)",
        "ALTER TABLE people REPLICA IDENTITY NOTHING",
        "CREATE TABLE unkeyed (n int)",
        "INSERT INTO people VALUES (1, 'a')",
        "INSERT INTO unkeyed VALUES (1), (1)",
        f'CREATE PUBLICATION "{database.name}" FOR ALL TABLES',
    )
    daemon = make_daemon(config(database, lake, ""))
    daemon.start_ready()
    database.execute("INSERT INTO people VALUES (2, 'b')", "INSERT INTO unkeyed VALUES (1), (2)")
    settle(database, daemon)
    assert sorted(r["id"] for r in current(lake)) == [1, 2]
    assert sorted(r["n"] for r in current(lake, (), "unkeyed")) == [1, 1, 1, 2]


def test_lossless_an_identity_incompatible_with_the_config(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """The catalog is as before: only the stream showed that a masked column was the identity."""
    database.execute(
        "CREATE TABLE people (id int PRIMARY KEY, email text NOT NULL UNIQUE)",
        "INSERT INTO people VALUES (1, 'a')",
    )
    daemon = make_daemon(config(database, lake, 'mask_columns = { email = "null" }'))
    daemon.start_ready()
    with database.connect(autocommit=False) as session:
        session.execute("ALTER TABLE people REPLICA IDENTITY USING INDEX people_email_key")
        session.execute("INSERT INTO people VALUES (2, 'b')")
        session.execute("ALTER TABLE people REPLICA IDENTITY DEFAULT")
    database.execute("INSERT INTO people VALUES (3, 'c')")
    await_until(lambda: len(current(lake)) == 3, LIMIT_S, daemon.tail)
    found = sorted(current(lake), key=lambda row: row["id"])  # a fold has no order
    assert [(r["id"], r["email"]) for r in found] == [(i, None) for i in (1, 2, 3)]


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["not", "listed", "by option"])
def test_a_generated_column_is_captured_where_it_is_published(
    database: Database, lake: Path, make_daemon: MakeDaemon, how: str
) -> None:
    """Left out of other rows: none has null for a value that exists."""
    is_new = database.server.major >= 18
    columns = "(id, n, g)" if how == "listed" and is_new else ""
    option = ", publish_generated_columns = stored" if how == "by option" and is_new else ""
    database.execute(
        "CREATE TABLE people (id int PRIMARY KEY, n int, g int GENERATED ALWAYS AS (n * 2) STORED)",
        "INSERT INTO people VALUES (1, 1)",
        f"""CREATE PUBLICATION "{database.name}" FOR TABLE people {columns}
            WITH (publish_via_partition_root = true {option})""",
        f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')",
    )
    daemon = make_daemon(config(database, lake, "", "manage = false"))
    daemon.start_ready()
    database.execute("INSERT INTO people VALUES (2, 2)", "UPDATE people SET n = 5 WHERE id = 1")
    settle(database, daemon)
    found = [(r["_cdc_op"], r["n"], r.get("g", "left out")) for r in raw(lake)[1:]]
    is_sent = bool(columns or option)
    assert found == [
        (op, n, n * 2 if is_sent else "left out") for op, n in zip("rcu", (1, 2, 5), strict=True)
    ]


@pytest.mark.parametrize("chosen", ["struct", "string"])
def test_a_renamed_attribute_resnapshots_structs_but_not_texts(
    database: Database, lake: Path, make_daemon: MakeDaemon, chosen: str
) -> None:
    database.execute(
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE TABLE people (id int PRIMARY KEY, p pair)",
        "INSERT INTO people VALUES (1, '(1,x)')",
    )
    daemon = make_daemon(config(database, lake, f'types = {{ p = "{chosen}" }}'))
    daemon.start_ready()
    await_until(lambda: len(current(lake)) == 1, LIMIT_S, daemon.tail)
    assert daemon.sigterm() == 0
    rename = "ALTER TYPE pair RENAME ATTRIBUTE b TO c"
    database.execute(rename, "INSERT INTO people VALUES (2, '(2,y)')")
    daemon.start_ready()
    is_struct = chosen == "struct"
    markers = 2 if is_struct else 1
    await_until(
        lambda: len(current(lake)) == 2 and [r["_cdc_op"] for r in raw(lake)].count("t") == markers,
        LIMIT_S,
        daemon.tail,
    )
    settle(database, daemon)
    *_, newest = (name for name in current(lake)[0] if name.startswith("p"))
    found = {row["id"]: row[newest] for row in current(lake)}
    texts = {1: "(1,x)", 2: "(2,y)"}
    assert found == ({1: {"a": 1, "c": "x"}, 2: {"a": 2, "c": "y"}} if is_struct else texts)
