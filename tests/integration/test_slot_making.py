"""A slot that is made while others write: what they did to tables is in the changes after it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.model.schema import TableId
from ingestd.testing.embedded.daemon import Daemon
from tests.harness.command_line import run_command
from tests.harness.compare import assert_lake_equals_source, raw_rows, registry
from tests.harness.config import wal_config
from tests.harness.databases import Database
from tests.harness.standbys import server_of
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

    from tests.conftest import MakeDaemon

LIMIT_S = 60.0
WAITS = "SELECT EXISTS (SELECT FROM pg_locks WHERE transactionid::text = %s AND NOT granted)"


def begun(connection: psycopg.Connection[tuple[Any, ...]]) -> str:
    """Begin a transaction; return its number."""
    connection.execute("BEGIN")
    [xid] = connection.execute("SELECT pg_current_xact_id()::text").fetchone() or ("",)
    return str(xid)


def alter_meanwhile(
    database: Database,
    daemon: Daemon,
    t: psycopg.Connection[tuple[Any, ...]],
    u: psycopg.Connection[tuple[Any, ...]],
    ddl: str = "ALTER TABLE t ADD COLUMN c text DEFAULT 'new'",
    *,
    first: str = "",
) -> None:
    """Start the daemon; T, for which the making waits first, alters something in a savepoint.

    `first`: T's number if it has begun. U begins meanwhile, and is waited for after.
    """
    first = first or begun(t)
    daemon.start()
    await_until(lambda: database.value(WAITS, first), LIMIT_S, daemon.tail)
    second = begun(u)
    for statement in ("SAVEPOINT s", ddl, "RELEASE s", "COMMIT"):
        t.execute(statement)
    await_until(lambda: database.value(WAITS, second), LIMIT_S, daemon.tail)


@pytest.mark.thorough
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "ddl",
    [
        "ALTER TABLE t ADD COLUMN c text DEFAULT 'new'",
        "ALTER TABLE t ALTER a TYPE varchar(50) USING a || 'z'",
    ],
)
@pytest.mark.parametrize(
    ("major", "is_killed", "is_lost"),
    [(15, False, False), (18, False, False), (18, True, False), (18, True, True)],
)
def test_a_table_altered_in_a_savepoint_while_the_slot_is_made(
    lake: Path, make_daemon: MakeDaemon, major: int, ddl: str, *, is_killed: bool, is_lost: bool
) -> None:
    """Or the daemon is killed when the slot exists but is not advanced yet, as V still runs.

    Or that slot is made because one was lost.
    """
    with server_of(major, {"autovacuum": "off"}) as server:
        database = Database(server, "postgres")
        database.execute(
            "CREATE TABLE t (id int PRIMARY KEY, a text)",
            "CREATE TABLE other (id int PRIMARY KEY)",
            "INSERT INTO t VALUES (0, 'before')",
        )
        daemon = make_daemon(
            wal_config(lake=lake, dsn=database.dsn, max_delay="200ms", source_extra='slot = "s"')
        )
        if is_lost:
            daemon.start_ready()
            daemon.sigterm()
            database.execute("SELECT pg_drop_replication_slot('s')")
        with database.connect() as t, database.connect() as u, database.connect() as v:
            alter_meanwhile(database, daemon, t, u, ddl)
            database.execute("INSERT INTO other VALUES (1)")
            third = begun(v)
            u.execute("COMMIT")
            await_until(lambda: database.value(WAITS, third), LIMIT_S, daemon.tail)
            if is_killed:
                daemon.sigkill()
            v.execute("COMMIT")
        if is_killed:
            daemon.start()
        daemon.await_ready(LIMIT_S)
        database.execute("INSERT INTO t (id, a) VALUES (1, 'x')", "UPDATE t SET a = a || '!'")
        assert_lake_equals_source(database, lake, slot="s")
        assert is_killed or daemon.events("source.failed") == []
        daemon.close()


@pytest.mark.thorough
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("ddl", "is_altered"),
    [
        ("ALTER TABLE t ADD COLUMN c text DEFAULT 'new'", True),
        ("ALTER TYPE mood RENAME VALUE 'old' TO 'older'", True),
        ("ALTER PUBLICATION p ADD TABLE late", True),
        ("ALTER TABLE t VALIDATE CONSTRAINT positive", False),
    ],
)
def test_without_a_second_slot_it_is_recreated_after_any_ddl(
    lake: Path, make_daemon: MakeDaemon, ddl: str, *, is_altered: bool
) -> None:
    """Not DDL before it, also if an older transaction is still open."""
    with server_of(15, {"autovacuum": "off", "max_replication_slots": "1"}) as server:
        database = Database(server, "postgres")
        database.execute(
            "CREATE TYPE mood AS ENUM ('old')",
            "CREATE TABLE t (id int PRIMARY KEY, a text, m mood,"
            " CONSTRAINT positive CHECK (id >= 0))",
            "CREATE TABLE late (id int PRIMARY KEY)",
            "CREATE PUBLICATION p FOR TABLE t",
            "INSERT INTO t VALUES (0, 'before', 'old')",
        )
        daemon = make_daemon(
            wal_config(lake=lake, dsn=database.dsn, tables=["public.t"], source_extra='slot = "s"')
        )
        with database.connect() as t, database.connect() as u, database.connect() as v:
            first = begun(t)
            database.execute("CREATE TABLE before (id int PRIMARY KEY)")
            alter_meanwhile(database, daemon, t, u, ddl, first=first)
            begun(v)
            u.execute("COMMIT")
            if is_altered:
                await_until(lambda: daemon.events("source.failed"), LIMIT_S, daemon.tail)
                [failed, *_] = daemon.events("source.failed")
                assert "a second slot is needed for a moment" in failed["reason"]
                assert "max_replication_slots" in failed["remedy"]
                v.execute("COMMIT")
            daemon.await_ready(LIMIT_S)
        assert is_altered or daemon.events("source.failed") == []
        database.execute("INSERT INTO t (id, a) VALUES (1, 'x')", "UPDATE t SET a = a || '!'")
        assert_lake_equals_source(database, lake, tables=[TableId("public", "t")], slot="s")
        daemon.close()


@pytest.mark.thorough
@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_cut", [False, True], ids=["fails", "is cut off"])
def test_a_slot_that_fails_to_advance_is_recreated_if_unread(
    lake: Path, make_daemon: MakeDaemon, *, is_cut: bool
) -> None:
    """Or all sessions of the daemon are terminated while it waits for V."""
    with server_of(15, {"autovacuum": "off"}) as server:
        database = Database(server, "postgres")
        database.execute("CREATE TABLE t (id int PRIMARY KEY, a text)")
        extra = 'slot = "s"\nsnapshot = "never"'
        daemon = make_daemon(
            wal_config(lake=lake, dsn=database.dsn, source_extra=extra),
            environment={} if is_cut else {"INGESTD_FAILPOINTS": "capture.point.before=error@1"},
        )
        with database.connect() as t, database.connect() as u, database.connect() as v:
            alter_meanwhile(database, daemon, t, u)
            third = begun(v)
            u.execute("COMMIT")
            if is_cut:
                await_until(lambda: database.value(WAITS, third), LIMIT_S, daemon.tail)
                database.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name LIKE 'ingestd%'"
                )
            await_until(lambda: daemon.events("source.failed"), LIMIT_S, daemon.tail)
            v.execute("COMMIT")
        daemon.await_ready(LIMIT_S)
        database.execute("INSERT INTO t (id, a) VALUES (1, 'x')", "UPDATE t SET a = a || '!'")
        await_until(lambda: len(raw_rows(lake, TableId("public", "t"))) == 2, LIMIT_S, daemon.tail)
        assert [row["c"] for row in raw_rows(lake, TableId("public", "t"))] == ["new", "new"]
        daemon.close()


@pytest.mark.thorough
@pytest.mark.timeout(240)
@pytest.mark.parametrize("major", [15, 18])
def test_a_server_that_crashes_while_the_slot_is_moved(
    lake: Path, make_daemon: MakeDaemon, major: int
) -> None:
    """V wrote before the slot existed, and is cut off: no WAL record says that it has ended."""
    with server_of(major, {"autovacuum": "off"}) as server:
        database = Database(server, "postgres")
        database.execute(
            "CREATE TABLE t (id int PRIMARY KEY, a text)",
            "CREATE TABLE other (id int PRIMARY KEY)",
            "INSERT INTO t VALUES (0, 'before')",
        )
        daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn, source_extra='slot = "s"'))
        with database.connect() as t, database.connect() as u:
            alter_meanwhile(database, daemon, t, u)
            v = database.connect()
            third = begun(v)
            v.execute("INSERT INTO other VALUES (1)")
            u.execute("COMMIT")
            await_until(lambda: database.value(WAITS, third), LIMIT_S, daemon.tail)
        database.execute("INSERT INTO other VALUES (2)")
        os.kill(v.info.backend_pid, signal.SIGKILL)
        await_until(lambda: daemon.events("source.failed"), LIMIT_S, daemon.tail)
        daemon.await_ready(LIMIT_S)
        v.close()
        database.execute("INSERT INTO t (id, a) VALUES (1, 'x')", "UPDATE t SET a = a || '!'")
        assert_lake_equals_source(database, lake, slot="s")
        daemon.close()


def test_a_slot_that_was_read_is_kept_though_no_table_is_live(
    lake: Path, make_daemon: MakeDaemon
) -> None:
    """I3: it has the changes of the time in which nothing ran."""
    with server_of(15) as server:
        database = Database(server, "postgres")
        database.execute(
            "CREATE TABLE t (id int, a text)",
            "ALTER TABLE t REPLICA IDENTITY FULL",
            "INSERT INTO t VALUES (0, 'before')",
        )
        names = 'slot = "s"\ndiscover_interval = "200ms"'
        daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn, source_extra=names))
        daemon.start_ready(LIMIT_S)
        # Ready comes before the registry's row: without this wait, the rows
        # awaited below could be those of the first snapshot.
        await_until(lambda: registry(lake)[-1]["state"] == "live", LIMIT_S, daemon.tail)
        with database.connect() as writer:
            begun(writer)  # reading can't begin before its end
            database.execute("ALTER TABLE t ALTER a TYPE varchar(50) USING a || 'z'")
            await_until(lambda: registry(lake)[-1]["state"] == "snapshotting", LIMIT_S, daemon.tail)
            database.execute("INSERT INTO t VALUES (1, 'streamed')")
            await_until(lambda: 1 in created(lake), LIMIT_S, daemon.tail)
            daemon.sigterm()
            assert registry(lake)[-1]["state"] == "snapshotting"
            database.execute("INSERT INTO t VALUES (2, 'missed')", "DELETE FROM t WHERE id = 2")
            writer.execute("COMMIT")
        daemon.start_ready(LIMIT_S)
        assert_lake_equals_source(database, lake, slot="s")
        assert created(lake) == {1, 2}
        daemon.close()


def created(lake: Path) -> set[int]:
    rows = raw_rows(lake, TableId("public", "t"))
    return {row["id"] for row in rows if row["_cdc_op"] == "c"}


@pytest.mark.thorough
def test_what_slot_creation_waits_for_is_reported(lake: Path, make_daemon: MakeDaemon) -> None:
    with server_of(15) as server:
        database = Database(server, "postgres")
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
        daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn, source_extra='slot = "s"'))
        with database.connect() as writer:
            begun(writer)
            daemon.start()
            await_until(lambda: daemon.events("snapshot.waiting"), LIMIT_S, daemon.tail)
            [waiting] = daemon.events("snapshot.waiting")
            assert waiting["tables"] == ["public.t"]
            [looked_at, *_] = waiting["remedy"].split(";")
            pids = [row[0] for row in database.rows(looked_at)]
            assert writer.info.backend_pid in pids
            writer.execute("COMMIT")
        daemon.await_ready(LIMIT_S)
        assert_lake_equals_source(database, lake, slot="s")
        daemon.close()


@pytest.mark.parametrize("snapshot", ["initial", "never"])
def test_a_first_start_needs_one_walsender(tmp_path: Path, lake: Path, snapshot: str) -> None:
    """What exports the point is over before the stream begins; the rows are read all the same."""
    with server_of(15, {"max_wal_senders": "1", "max_replication_slots": "4"}) as server:
        database = Database(server, "postgres")
        database.execute(
            "CREATE TABLE t (id int PRIMARY KEY, note text)",
            "INSERT INTO t SELECT i, 'a' FROM generate_series(1, 1000) i",
        )
        config = wal_config(lake=lake, dsn=database.dsn, source_extra=f'snapshot = "{snapshot}"')
        with Daemon(tmp_path / "daemon", config) as daemon:
            daemon.await_ready(LIMIT_S)
            assert not daemon.events("source.failed")
            database.execute("UPDATE t SET note = 'b' WHERE id = 1", "DELETE FROM t WHERE id = 2")
            rows = 1002 if snapshot == "initial" else 2
            await_until(
                lambda: len(raw_rows(lake, TableId("public", "t"))) >= rows, LIMIT_S, daemon.tail
            )
            if snapshot == "initial":
                assert_lake_equals_source(database, lake)
            said = run_command(daemon.config_path, "check")
            assert said.returncode == 0, said.stdout
            assert "in use by a running ingestd" in said.stdout
            daemon.close()
