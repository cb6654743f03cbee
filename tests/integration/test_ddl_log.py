"""DDL that event triggers write into the WAL, on a real server (`ddl_log = "event_trigger"`)."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from ingestd.decode.pgoutput.messages import DDL_PREFIX
from ingestd.model.schema import TableId
from ingestd.postgres.connection.session import connect
from ingestd.postgres.rewrites.ddl_log import DdlEvent, parse
from ingestd.postgres.rewrites.ddl_script import DdlLogFault, bodies, ddl_log_fault, script
from tests.harness.compare import assert_lake_equals_source, raw_rows, registry
from tests.harness.config import wal_config
from tests.harness.databases import fresh_database
from tests.harness.open_transactions import send_while_open
from tests.harness.servers import running_server
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 90.0
PARTS, PLAIN = TableId("public", "parts"), TableId("public", "plain")
TABLES = (
    "CREATE TABLE plain (id int PRIMARY KEY, note varchar(9))",
    "CREATE TABLE parts (id int, g int, note text, PRIMARY KEY (id, g)) PARTITION BY LIST (g)",
    "CREATE TABLE part PARTITION OF parts FOR VALUES IN (1)",
    "CREATE TABLE apart (id int NOT NULL, g int NOT NULL, note text, PRIMARY KEY (id, g))",
    "CREATE TYPE mood AS ENUM ('glad', 'sad')",
)
ROWS = "INSERT INTO parts SELECT i, 1, 'a' FROM generate_series(1, 5) i"
ATTACH = "ALTER TABLE parts ATTACH PARTITION apart FOR VALUES IN (2)"
DDL = {
    "add": ("ALTER TABLE plain ADD n int", "ALTER TABLE", "table"),
    "drop column": ("ALTER TABLE plain DROP note", "ALTER TABLE", "dropped column"),
    "rename column": ("ALTER TABLE plain RENAME note TO text", "ALTER TABLE", "table column"),
    "retype": ("ALTER TABLE plain ALTER note TYPE int USING 1", "ALTER TABLE", "rewrite"),
    "volatile": ("ALTER TABLE plain ADD n float DEFAULT random()", "ALTER TABLE", "rewrite"),
    "unlogged": ("ALTER TABLE apart SET UNLOGGED", "ALTER TABLE", "rewrite"),
    "drop": ("DROP TABLE plain", "DROP TABLE", "dropped table"),
    "create": ("CREATE TABLE other (id int)", "CREATE TABLE", "table"),
    "truncate": ("TRUNCATE part", "TRUNCATE", "truncate"),
    "attach": (
        ATTACH,
        "ALTER TABLE",
        "table",
    ),
    "detach": ("ALTER TABLE parts DETACH PARTITION part", "ALTER TABLE", "table"),
    "label": ("ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'", "ALTER TYPE", "type"),
    "rename": ("ALTER TABLE plain RENAME TO plan", "ALTER TABLE", "table"),
}
UNTOLD = ("TRUNCATE plain", "TRUNCATE parts", "CREATE TEMP TABLE t (id int)", "ANALYZE plain")
WAYS = {
    "plain": "{}",
    "savepoint": "BEGIN; SAVEPOINT a; {}; RELEASE a; COMMIT",
    "exception": "DO $$ BEGIN {}; EXCEPTION WHEN OTHERS THEN RAISE; END $$",
    "replica": "SET session_replication_role = replica; {}; RESET session_replication_role",
}
UNDONE = {
    "rolled back": "BEGIN; {}; ROLLBACK",
    "savepoint": "BEGIN; SAVEPOINT a; {}; ROLLBACK TO a; CREATE TABLE made (id int); COMMIT",
    "exception": "DO $$ BEGIN {}; RAISE 'no'; EXCEPTION WHEN OTHERS THEN NULL; END $$",
}
TRIGGER = "CREATE OR REPLACE TRIGGER ingestd_ddl_truncate"
EXECUTE = (
    "FOR EACH STATEMENT EXECUTE FUNCTION ingestd_ddl.truncating();"
    " ALTER TABLE part ENABLE ALWAYS TRIGGER ingestd_ddl_truncate"
)
CONDITIONAL = EXECUTE.replace("EXECUTE", "WHEN (false) EXECUTE", 1)
MESSAGES = """
SELECT data FROM pg_logical_slot_get_binary_changes('{name}', NULL, NULL, 'proto_version', '1',
  'publication_names', 'p', 'messages', 'true') WHERE get_byte(data, 0) = ascii('M')
"""


@pytest.fixture
def source(database: Database, stranger: str) -> Iterator[Database]:
    """One with the script, whose tables belong to a role that has no right on its schema."""
    database.execute(
        f"GRANT CREATE ON DATABASE {database.name} TO {stranger}",
        f"ALTER SCHEMA public OWNER TO {stranger}",
        *(f"SET ROLE {stranger}; {each}; RESET ROLE" for each in TABLES),
        "CREATE PUBLICATION p FOR TABLE plain, parts WITH (publish_via_partition_root)",
        script(),
        "REVOKE ALL ON SCHEMA ingestd_ddl FROM PUBLIC",
        f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')",
    )
    yield database
    database.execute("ALTER SCHEMA public OWNER TO CURRENT_USER")


def events_of(database: Database) -> list[DdlEvent | None]:
    found = [data for (data,) in database.rows(MESSAGES.format(name=database.name))]
    return [parse(data[10 + len(DDL_PREFIX) + 4 :]) for data in found if DDL_PREFIX in data[:30]]


@pytest.mark.thorough
def test_every_command_is_logged_and_no_rolled_back_command(
    source: Database, stranger: str
) -> None:
    for name, (statement, command, what) in DDL.items():
        for way in WAYS.values():
            with source.connect() as connection:
                connection.execute("BEGIN; SAVEPOINT every")
                body = way.format(statement).replace("BEGIN; ", "").replace("; COMMIT", "")
                if not way.startswith("SET"):
                    body = f"SET LOCAL ROLE {stranger}; {body}; RESET ROLE"
                connection.execute(body.encode())
                connection.execute("COMMIT")
            told = events_of(source)
            assert None not in told
            assert (command, what) in {(e.command, e.what) for e in told if e}, (name, way)
            _remake(source, stranger)
        for way in UNDONE.values():
            with source.connect() as connection:
                connection.execute(f"SET ROLE {stranger}".encode())
                connection.execute(way.format(statement).encode())
            told = [e for e in events_of(source) if e and e.table != TableId("public", "made")]
            assert told == [], (name, way)
            _remake(source, stranger)


def _remake(database: Database, stranger: str) -> None:
    database.execute(
        "DROP TABLE IF EXISTS plain, plan, parts, part, apart, other, made CASCADE",
        "DROP TYPE mood",
        *(f"SET ROLE {stranger}; {each}; RESET ROLE" for each in TABLES),
        "ALTER PUBLICATION p SET TABLE plain, parts",
        script(),  # triggers on existing objects: only a superuser has a right on the schema
        "REVOKE ALL ON SCHEMA ingestd_ddl FROM PUBLIC",
    )
    events_of(database)


def test_what_is_no_ddl_or_is_streamed_writes_nothing(source: Database) -> None:
    source.execute(*UNTOLD)
    assert events_of(source) == []
    source.execute("TRUNCATE parts; TRUNCATE part")
    assert [e.command for e in events_of(source) if e] == ["TRUNCATE"]


@pytest.mark.thorough
async def test_it_is_said_what_is_not_in_place(database: Database, stranger: str) -> None:
    database.execute(*TABLES, "CREATE PUBLICATION p FOR TABLE parts")
    oid = database.value("SELECT 'parts'::regclass::oid::int8")

    async def found() -> DdlLogFault | None:
        async with await connect(database.dsn) as connection:
            return await ddl_log_fault(connection, [oid])

    async def fault() -> str | None:
        was_found = await found()
        return None if was_found is None else was_found.what

    assert await fault() == "its event triggers are missing"
    for _ in range(2):
        database.execute(script())
        assert await fault() is None
    broken = {
        "ALTER EVENT TRIGGER ingestd_ddl_dropped DISABLE": "dropped is disabled",
        "ALTER EVENT TRIGGER ingestd_ddl_dropped ENABLE REPLICA": "dropped is disabled",
        "DROP EVENT TRIGGER ingestd_ddl_rewritten": "rewritten is missing",
        "DROP FUNCTION ingestd_ddl.rewritten CASCADE": "rewritten() is missing",
        "DROP TRIGGER ingestd_ddl_truncate ON part": "TRUNCATE are missing",
        "ALTER TABLE part DISABLE TRIGGER ingestd_ddl_truncate": "TRUNCATE are missing",
        "ALTER FUNCTION ingestd_ddl.dropped() SECURITY DEFINER": "dropped() was altered",
        "ALTER FUNCTION ingestd_ddl.dropped() RESET ALL": "dropped() was altered",
        "ALTER FUNCTION ingestd_ddl.truncating() STABLE": "truncating() was altered",
        "DROP EVENT TRIGGER ingestd_ddl_command_end; CREATE EVENT TRIGGER ingestd_ddl_command_end "
        "ON ddl_command_end WHEN TAG IN ('CREATE SCHEMA') EXECUTE FUNCTION "
        "ingestd_ddl.command_end()": "command_end was altered",
        "DROP EVENT TRIGGER ingestd_ddl_dropped; CREATE EVENT TRIGGER ingestd_ddl_dropped ON "
        "sql_drop WHEN TAG IN ('DROP TABLE') EXECUTE FUNCTION ingestd_ddl.dropped()": "was altered",
        f"{TRIGGER} BEFORE TRUNCATE ON part {CONDITIONAL}": "TRUNCATE are missing",
        f"{TRIGGER} AFTER TRUNCATE ON part {EXECUTE}": "TRUNCATE are missing",
        f"{TRIGGER} BEFORE UPDATE ON part {EXECUTE}": "TRUNCATE are missing",
        "CREATE OR REPLACE FUNCTION ingestd_ddl.dropped() RETURNS event_trigger LANGUAGE plpgsql"
        " SET search_path = pg_catalog, pg_temp AS 'BEGIN RAISE ''no''; END'": "was altered",
        "COMMENT ON SCHEMA ingestd_ddl IS 'ingestd ddl_log version 0'": "is version 0",
        "COMMENT ON SCHEMA ingestd_ddl IS 'ingestd ddl_log version 9'": "newer than this",
    }
    for statement, what in broken.items():
        database.execute(statement)
        assert what in (await fault() or ""), statement
        database.execute(script())
        assert await fault() is None, statement
    made = "SCHEMA ingestd_ddl", *(f"FUNCTION ingestd_ddl.{name}()" for name in bodies())
    for each in made:
        database.execute(f"ALTER {each} OWNER TO {stranger}")
        was_found = await found()
        assert was_found is not None
        assert f"belongs to role {stranger!r}, which may alter" in was_found.what
        with pytest.raises(psycopg.errors.RaiseException, match="belongs to role"):
            database.execute(script())
        database.execute(was_found.remedy)
        assert await fault() is None, each
    # One that comes later gets its trigger automatically, attached or created.
    database.execute(
        "CREATE TABLE late PARTITION OF parts FOR VALUES IN (5) PARTITION BY LIST (id)",
        "CREATE TABLE later PARTITION OF late DEFAULT",
        ATTACH,
    )
    assert await fault() is None
    database.execute("DROP SCHEMA ingestd_ddl CASCADE")
    assert await fault() == "its event triggers are missing"
    assert database.value("SELECT count(*) FROM pg_event_trigger") == 0


def test_a_schema_of_another_role_is_refused(database: Database, stranger: str) -> None:
    database.execute(f"CREATE SCHEMA ingestd_ddl AUTHORIZATION {stranger}")
    with pytest.raises(psycopg.errors.RaiseException, match="belongs to role"):
        database.execute(script())


THEIRS = (
    "CREATE SCHEMA ingestd_ddl",
    *(
        f"CREATE FUNCTION ingestd_ddl.{name}() RETURNS {kind} LANGUAGE plpgsql AS 'BEGIN END'"
        for name, kind in zip(bodies(), (*["event_trigger"] * 3, "trigger"), strict=True)
    ),
)


def statements() -> list[str]:
    """Return the script's statements, as psql sends them, without the comments at the end."""
    found, is_quoted = [""], False
    for line in script().splitlines(keepends=True):
        is_quoted ^= line.count("$ingestd$") % 2 == 1
        found[-1] += line
        if not is_quoted and line.partition("--")[0].rstrip().endswith(";"):
            found.append("")
    return found[:-1]


@pytest.mark.attack("database owner")
@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_no_schema_of_another_role_comes_between(
    database: Database, stranger: str, isolation: str
) -> None:
    """Another role creates the schema before any statement of the script.

    psql also sends the statements after one that failed.
    """
    database.execute(*TABLES, "CREATE PUBLICATION p FOR TABLE parts")
    database.execute(
        f"ALTER ROLE CURRENT_USER IN DATABASE {database.name} "
        f"SET default_transaction_isolation = '{isolation}'",
        f"GRANT CREATE ON DATABASE {database.name} TO {stranger}",
    )
    count = len(statements())
    assert count > 15
    outcomes = set()
    for place in range(count):
        with database.connect() as admin, database.connect() as other:
            other.execute(f"SET ROLE {stranger}")
            other.execute("SET lock_timeout = '100ms'")
            for number, statement in enumerate(statements()):
                if number == place:
                    _as_far_as_possible(other, THEIRS)
                _as_far_as_possible(admin, [statement])
        used = database.rows(
            "SELECT p.proowner::regrole::text FROM pg_proc p WHERE p.oid IN"
            " (SELECT tgfoid FROM pg_trigger WHERE NOT tgisinternal"
            " UNION ALL SELECT evtfoid FROM pg_event_trigger)"
        )
        assert stranger not in {owner for (owner,) in used}, statements()[place]
        outcomes.add(bool(used))
        database.execute("DROP SCHEMA IF EXISTS ingestd_ddl CASCADE")
    assert outcomes == {True, False}


def _as_far_as_possible(connection: psycopg.Connection, statements: Sequence[str]) -> None:
    with contextlib.suppress(psycopg.Error):
        for statement in statements:
            connection.execute(statement.encode())


def test_the_copy_to_be_pasted_is_the_packages_own() -> None:
    copy = Path(__file__).parents[2] / "deploy/ddl_log.sql"
    assert copy.read_text("utf-8") == script()
    assert bodies().keys() == {"command_end", "dropped", "rewritten", "truncating"}


@pytest.fixture
def daemon(database: Database, lake: Path, make_daemon: MakeDaemon) -> Daemon:
    database.execute(*TABLES, ROWS, "INSERT INTO plain VALUES (1, 'a')", script())
    extra = 'ddl_log = "event_trigger"\ndiscover_interval = "1h"'
    found = make_daemon(
        wal_config(
            lake=lake, dsn=database.dsn, tables=["public.plain", "public.parts"], source_extra=extra
        )
    )
    found.start_ready()
    return found


def readings(lake: Path, table: TableId) -> int:
    return [row["_cdc_op"] for row in raw_rows(lake, table)].count("t")


OF_OTHERS = [
    f"""SELECT pg_logical_emit_message(true, 'ingestd.ddl', json_build_object(
        'v', 1, 'kind', 'ALTER TABLE', 'what', '{what}', 'oid', {oid}, 'root', {root}, 'why', 2,
        'schema', 'public', 'name', 'apart', 'types', json_build_object('1', 20),
        'leaves', json_build_array(4294967295))::text)"""
    for what in ("table", "table column", "dropped table", "rewrite", "truncate", "type")
    for oid in ("4294967295", "(SELECT oid::int8 FROM pg_class WHERE relname = 'apart')")
    for root in ("4294967295", "(SELECT oid::int8 FROM pg_class WHERE relname = 'apart')")
]
"""Events of tables that nobody captures, or that are those of another database."""


@pytest.mark.thorough
def test_a_table_is_read_again_at_once_and_for_its_reason(
    database: Database, lake: Path, daemon: Daemon
) -> None:
    before = readings(lake, PARTS), readings(lake, PLAIN)
    for written in (
        "SELECT pg_logical_emit_message(true, 'ingestd.ddl', '{')",
        "SELECT pg_logical_emit_message(true, 'ingestd.ddl', repeat('x', 40000000))",
        "SELECT pg_logical_emit_message(true, 'ingestd.ddl', '[1, null]')",
        "SELECT pg_logical_emit_message(true, 'ingestd.ddl', '\\x00ff'::bytea)",
        "SELECT pg_logical_emit_message(false, 'ingestd.ddl', '{\"v\": 1}')",
        "SELECT pg_logical_emit_message(true, 'another', 'x')",
        "SELECT pg_logical_emit_message(true, 'ingestd.ddl', repeat('[', 1000000))",
        "SELECT pg_logical_emit_message(true, 'ingestd.ddl', repeat('9', 1000000))",
        *OF_OTHERS,
        "ALTER TABLE plain ADD n int",
        "INSERT INTO plain VALUES (2, 'b', 3)",
        "TRUNCATE part",
        ROWS.replace("'a'", "'b'"),
        "ANALYZE part",
        "GRANT SELECT ON part TO PUBLIC",
    ):
        database.execute(written)
    await_until(lambda: readings(lake, PARTS) > before[0], LIMIT_S, daemon.tail)
    assert_lake_equals_source(database, lake, tables=[PARTS, PLAIN], limit_s=LIMIT_S)
    assert (readings(lake, PARTS), readings(lake, PLAIN)) == (before[0] + 1, before[1])
    reasons = {row["reason"] for row in registry(lake) if row["table"] == str(PARTS)}
    assert "a partition was truncated directly (TRUNCATE)" in reasons
    metrics = daemon.get("/metrics")
    assert metrics is not None
    assert 'ingestd_ignored_messages_total{source="shop"} 8.0' in metrics[1]
    assert daemon.events("ddl_log.incomplete") == []
    for there_and_back in (
        ("ALTER TABLE plain RENAME note TO x", "INSERT INTO plain VALUES (7, 'x', 1)"),
        ("ALTER TABLE plain RENAME x TO note",),
    ):
        database.execute(*there_and_back)
    await_until(lambda: readings(lake, PLAIN) > before[1], LIMIT_S, daemon.tail)
    assert_lake_equals_source(database, lake, tables=[PARTS, PLAIN], limit_s=LIMIT_S)
    assert daemon.sigterm() == 0
    database.execute(
        "DROP FUNCTION ingestd_ddl.command_end() CASCADE", "ALTER TABLE plain ADD m int"
    )
    daemon.start_ready()
    await_until(lambda: daemon.events("ddl_log.incomplete"), LIMIT_S, daemon.tail)
    database.execute("INSERT INTO plain VALUES (9, 'z', 1, 2)")
    assert_lake_equals_source(database, lake, tables=[PARTS, PLAIN], limit_s=LIMIT_S)


@pytest.mark.thorough
def test_a_backlog_and_open_transactions_have_their_events_too(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """The server sends the large transaction in segments; rolled-back DDL leaves no event."""
    send_while_open(database)
    database.execute(*TABLES, ROWS, "INSERT INTO plain VALUES (1, 'a')", script())
    extra = (
        'ddl_log = "event_trigger"\ndiscover_interval = "1h"\non_rewrite = "record"\n'
        'open_transaction_spool = "100MB"\ncatch_up_above = "0"\n'
    )
    tables = ["public.plain", "public.parts"]
    daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn, tables=tables, source_extra=extra))
    large = (
        "BEGIN; INSERT INTO plain SELECT g, 'b' FROM generate_series({0}, {0} + 2000) g;"
        "SAVEPOINT a;"
        "INSERT INTO plain SELECT g, 'c' FROM generate_series({0} + 3000, {0} + 5000) g;"
        "ALTER TABLE plain RENAME note TO x; ROLLBACK TO a;"
        "INSERT INTO plain SELECT g, 'd' FROM generate_series({0} + 3000, {0} + 5000) g;"
        "SELECT pg_logical_emit_message(true, 'ingestd.ddl', 'x'); TRUNCATE part; COMMIT"
    )
    reason = "a partition was truncated directly (TRUNCATE)"
    daemon.start_ready()
    database.execute(large.format(10_000))
    await_until(lambda: recorded(lake, reason) == 1, LIMIT_S, daemon.tail)
    assert daemon.sigterm() == 0
    database.execute(ROWS, large.format(20_000))
    daemon.start_ready()
    assert_lake_equals_source(database, lake, tables=[PLAIN], limit_s=LIMIT_S)
    # The partition is as empty as it was: the backlog shows what the check at the start can't.
    plain = reason.removesuffix(" (TRUNCATE)")
    await_until(lambda: recorded(lake, reason) + recorded(lake, plain) == 2, LIMIT_S)
    metrics = daemon.get("/metrics")
    assert metrics is not None
    assert 'ingestd_ignored_messages_total{source="shop"} 1.0' in metrics[1]
    assert not any(row["reason"] for row in registry(lake) if row["table"] == str(PLAIN))


def recorded(lake: Path, reason: str) -> int:
    return sum(row["reason"] == reason for row in registry(lake))


HOSTILE = (
    "SET search_path = evil, public, pg_catalog",
    "SET row_security = off",
    "SET session_replication_role = replica",
    "SET statement_timeout = '20s'; SET lock_timeout = '1ms'",
    "SET default_transaction_isolation = serializable",
    "SET default_transaction_read_only = on; BEGIN READ WRITE",
    "SET max_stack_depth = '100kB'",
    "SET standard_conforming_strings = off; SET transform_null_equals = on",
    "SET plpgsql.extra_errors = 'all'; SET client_min_messages = debug5",
    "BEGIN; SELECT pg_logical_emit_message(true, 'x', 'y') FROM generate_series(1, 20000)",
    "BEGIN; DROP SCHEMA ingestd_ddl CASCADE",
    """BEGIN; DO $$ BEGIN EXECUTE (
         SELECT string_agg(format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', oid::regprocedure),
                           ';') FROM pg_proc WHERE proname = 'pg_logical_emit_message');
       END $$""",
)
"""Sessions in which no command may fail for the triggers; each is undone."""
EVIL = """
    CREATE SCHEMA evil;
    CREATE FUNCTION evil.format(text, name, name) RETURNS text LANGUAGE plpgsql
      AS $$ BEGIN RAISE 'evil'; END $$;
    CREATE FUNCTION evil.json_strip_nulls(json) RETURNS json LANGUAGE plpgsql
      AS $$ BEGIN RAISE 'evil'; END $$;
    CREATE FUNCTION evil.least(int, int) RETURNS int LANGUAGE plpgsql
      AS $$ BEGIN RAISE 'evil'; END $$
"""


@pytest.mark.thorough
def test_no_command_fails_in_any_session(source: Database, stranger: str) -> None:
    source.execute(EVIL, f"GRANT ALL ON SCHEMA evil TO {stranger}")
    for session in HOSTILE:
        for statement in (*(ddl for ddl, _, _ in DDL.values()), *UNTOLD[:2]):
            with source.connect() as connection:
                connection.execute(session.encode())
                connection.execute(b"BEGIN" if "BEGIN" not in session else b"SAVEPOINT a")
                connection.execute(f"SET LOCAL ROLE {stranger}".encode())
                connection.execute(statement.encode())
                connection.execute("ROLLBACK")
    assert events_of(source) == []


@pytest.mark.thorough
def test_prepared_transactions_have_their_events_at_commit(postgres_bindir: Path) -> None:
    with (
        running_server(postgres_bindir, {"max_prepared_transactions": "5"}) as server,
        fresh_database(server) as database,
    ):
        database.execute(
            *TABLES,
            "CREATE PUBLICATION p FOR TABLE plain, parts WITH (publish_via_partition_root)",
            script(),
            f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')",
        )
        work = "BEGIN; TRUNCATE part; ALTER TABLE plain ADD n int; PREPARE TRANSACTION 'a'"
        for end, told in (("ROLLBACK", set()), ("COMMIT", {"truncate", "table"})):
            database.execute(work)
            assert events_of(database) == []
            database.execute(f"{end} PREPARED 'a'")
            assert {event.what for event in events_of(database) if event} == told
