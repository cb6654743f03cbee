"""A slot that is made while others write: what they did to tables is in the changes after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.compare import assert_lake_equals_source
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
    """Begin a transaction; give its number."""
    connection.execute("BEGIN")
    [xid] = connection.execute("SELECT pg_current_xact_id()::text").fetchone() or ("",)
    return str(xid)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "ddl", ["ADD COLUMN c text DEFAULT 'new'", "ALTER a TYPE varchar(50) USING a || 'z'"]
)
@pytest.mark.parametrize(("major", "is_killed"), [(15, False), (18, False), (18, True)])
def test_a_table_altered_in_a_savepoint_while_the_slot_is_made(
    lake: Path, make_daemon: MakeDaemon, major: int, ddl: str, *, is_killed: bool
) -> None:
    """Of T, which the making waits for first; U is begun meanwhile, and waited for after.

    Or the daemon is killed when the slot is there, but is not moved yet, as V still runs.
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
        with database.connect() as t, database.connect() as u, database.connect() as v:
            first = begun(t)
            daemon.start()
            await_until(lambda: database.value(WAITS, first), LIMIT_S, daemon.tail)
            second = begun(u)
            for statement in ("SAVEPOINT s", f"ALTER TABLE t {ddl}", "RELEASE s", "COMMIT"):
                t.execute(statement)
            await_until(lambda: database.value(WAITS, second), LIMIT_S, daemon.tail)
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
