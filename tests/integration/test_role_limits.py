"""What a role has set for itself, what it may not read, and whom our locks hold up."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.conninfo import make_conninfo

from ingestd.postgres.connection.session import connect
from tests.harness.compare import assert_lake_equals_source, registry
from tests.harness.config import wal_config
from tests.harness.databases import Database, fresh_database
from tests.harness.standbys import server_of
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.conftest import MakeDaemon

LIMIT_S = 30.0
LIMITS = {
    "statement_timeout": "50ms",
    "lock_timeout": "1ms",
    "idle_in_transaction_session_timeout": "50ms",
    # These hold until our first statement has unset them.
    "idle_session_timeout": "700ms",
    "transaction_timeout": "700ms",  # of 17 and later
    "default_transaction_read_only": "on",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
}
MEANT = {
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "transaction_timeout": "0",
    "default_transaction_read_only": "off",
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
}


@pytest.fixture(scope="module", params=[15, pytest.param(18, marks=pytest.mark.thorough)])
def server(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    with server_of(request.param) as running:
        yield running


@pytest.fixture
def shop(server: PostgresServer) -> Iterator[Database]:
    with fresh_database(server) as database:
        role = database.name
        database.execute(
            f"CREATE ROLE {role} LOGIN REPLICATION",
            f"GRANT CREATE ON DATABASE {role} TO {role}",
            "CREATE TABLE orders (id int PRIMARY KEY, note text)",
            "INSERT INTO orders SELECT i, repeat('x', 500) FROM generate_series(1, 20000) i",
            f"ALTER TABLE orders OWNER TO {role}",
        )
        yield database
        database.execute(f"DROP OWNED BY {role} CASCADE")
        with server.connect() as connection:
            connection.execute(f"ALTER DATABASE {role} OWNER TO postgres".encode())
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", [role]
            )
            connection.execute(f"REVOKE ALL ON DATABASE {role} FROM {role}".encode())
            connection.execute(f"DROP ROLE {role}".encode())


def dsn(shop: Database) -> str:
    return make_conninfo(shop.dsn, user=shop.name)


def limit(shop: Database) -> None:
    """Set all limits for the role, those that the server has."""
    known = {row[0] for row in shop.rows("SELECT name FROM pg_settings")}
    for name, value in LIMITS.items():
        if name in known:
            shop.execute(f"ALTER ROLE {shop.name} SET {name} = '{value}'")


def config(shop: Database, lake: Path, extra: str = "", **changes: Any) -> str:
    names = f'slot = "{shop.name}"\npublication = "{shop.name}"\ndiscover_interval = "100ms"'
    return wal_config(lake=lake, dsn=dsn(shop), source_extra=f"{names}\n{extra}", **changes)


def assert_equal(shop: Database, lake: Path) -> None:
    assert_lake_equals_source(shop, lake, slot=shop.name, limit_s=LIMIT_S)


@pytest.mark.parametrize("replication", [False, True])
async def test_limits_of_the_role_hold_for_no_connection_of_ours(
    shop: Database, *, replication: bool
) -> None:
    limit(shop)
    async with await connect(dsn(shop), replication=replication) as connection:
        found = await (
            await connection.execute(
                "SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY("
                f"'{{{','.join(MEANT)}}}')"
            )
        ).fetchall()
    assert len(found) == len(MEANT) - (shop.server.major < 17)
    assert {name: MEANT[name] for name, _ in found} == dict(found)


@pytest.mark.thorough
def test_a_role_with_limits_of_its_own_is_served(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    limit(shop)
    daemon = make_daemon(config(shop, lake))
    daemon.start_ready()
    shop.execute("UPDATE orders SET note = 'changed' WHERE id % 2 = 0")
    assert_equal(shop, lake)
    held = """SELECT count(*) > 0 FROM pg_stat_activity WHERE usename = %s
                 AND state = 'idle' AND clock_timestamp() - state_change > interval '1 s'"""
    await_until(lambda: shop.value(held, shop.name), LIMIT_S, "a connection to idle")
    shop.execute("CREATE TABLE more (id int PRIMARY KEY)", "INSERT INTO more VALUES (1)")
    shop.execute(f"ALTER TABLE more OWNER TO {shop.name}")
    await_state(daemon, lake, "public.more", "live")
    assert_equal(shop, lake)
    assert not daemon.events("source.failed")
    daemon.close()


# --- rights ----------------------------------------------------------------------------------


def state(lake: Path, table: str) -> tuple[str, str]:
    rows = [row for row in registry(lake) if row["table"] == table]
    return (rows[-1]["state"], str(rows[-1]["reason"])) if rows else ("", "")


def await_state(daemon: Daemon, lake: Path, table: str, wanted: str) -> str:
    """Wait for a table's state; return the reason."""
    await_until(
        lambda: state(lake, table)[0] == wanted,
        LIMIT_S,
        lambda: f"{table} to be {wanted}, is {state(lake, table)}\n{daemon.tail()}",
    )
    return state(lake, table)[1]


def remedy_for(daemon: Daemon, table: str) -> str:
    events = [e for e in daemon.events("table.stopped") if e["table"] == table]
    return str(events[-1]["remedy"])


@pytest.mark.thorough
def test_isolated_an_unreadable_table_stops_with_the_grant(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """I8: before it was ever read, and when the right goes and it has to be read again."""
    shop.execute(
        'CREATE TABLE "Geheim" (id int PRIMARY KEY, note text)',
        "INSERT INTO \"Geheim\" VALUES (1, 'x')",
        f'CREATE PUBLICATION "{shop.name}" FOR ALL TABLES WITH (publish_via_partition_root = true)',
        f"SELECT pg_create_logical_replication_slot('{shop.name}', 'pgoutput')",
    )
    daemon = make_daemon(config(shop, lake, "manage = false"))
    daemon.start()
    assert "no privilege to read it" in await_state(daemon, lake, "public.Geheim", "stopped")
    await_state(daemon, lake, "public.orders", "live")
    grant = remedy_for(daemon, "public.Geheim").partition(";")[0]
    assert grant == f'GRANT SELECT ON "public"."Geheim" TO "{shop.name}"'
    shop.execute(grant)
    await_state(daemon, lake, "public.Geheim", "live")
    assert_equal(shop, lake)
    shop.execute(f'REVOKE SELECT ON "Geheim" FROM {shop.name}')
    await_state(daemon, lake, "public.Geheim", "stopped")
    shop.execute("INSERT INTO orders VALUES (50001, 'goes on')", 'DELETE FROM "Geheim"')
    shop.execute(remedy_for(daemon, "public.Geheim").partition(";")[0])
    await_state(daemon, lake, "public.Geheim", "live")
    assert_equal(shop, lake)
    assert not daemon.events("source.failed")
    daemon.close()


# --- locks -----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_readers_are_never_blocked_by_an_exclusive_lock(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """ACCESS SHARE holds up ACCESS EXCLUSIVE alone."""
    with shop.connect(autocommit=False) as reader:
        reader.execute("LOCK TABLE orders IN ACCESS SHARE MODE")
        daemon = make_daemon(config(shop, lake))
        daemon.start_ready()
        shop.execute("INSERT INTO orders VALUES (50001, 'new')")
        shop.execute("CREATE TABLE more (id int PRIMARY KEY)")
        shop.execute(f"ALTER TABLE more OWNER TO {shop.name}")
        await_state(daemon, lake, "public.more", "live")
        assert_equal(shop, lake)
        daemon.write_config(config(shop, lake, tables=["public.more"]))
        assert daemon.sigterm() == 0
        daemon.start_ready()  # takes `orders` out of the publication
        in_it = "SELECT tablename::text FROM pg_publication_tables WHERE pubname = %s"
        await_until(lambda: shop.rows(in_it, shop.name) == [("more",)], LIMIT_S, "orders to go")
        daemon.close()


@pytest.mark.thorough
def test_ddl_is_not_blocked_by_a_waiting_publication_change(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """A vacuum of one table keeps it from being published; DDL on the others goes through."""
    shop.execute(
        *(f"CREATE TABLE t{n} (id int PRIMARY KEY)" for n in range(3)),
        *(f"ALTER TABLE t{n} OWNER TO {shop.name}" for n in range(3)),
    )
    with shop.connect(autocommit=False) as vacuum:
        vacuum.execute("LOCK TABLE t2 IN SHARE UPDATE EXCLUSIVE MODE")
        daemon = make_daemon(config(shop, lake))
        daemon.start()
        longest_ms = alter_until(shop, lambda: state(lake, "public.t0")[0] == "live", daemon)
        assert longest_ms < 3000
        assert state(lake, "public.t2")[0] != "live"
        vacuum.rollback()
    await_state(daemon, lake, "public.t2", "live")
    assert_equal(shop, lake)
    daemon.close()


def alter_until(shop: Database, is_done: Any, daemon: Daemon) -> float:
    """Alter t1 again and again; return how long the longest took, ms."""
    longest = [0.0]
    ended = threading.Event()

    def alter() -> None:
        with shop.connect() as connection:
            while not ended.is_set():
                began = connection.execute("SELECT clock_timestamp()").fetchone()
                assert began is not None
                connection.execute("ALTER TABLE t1 SET (fillfactor = 90)")
                connection.execute("ALTER TABLE t1 RESET (fillfactor)")
                took = connection.execute(
                    "SELECT extract(epoch FROM clock_timestamp() - %s)::float8 * 1000", began
                ).fetchone()
                assert took is not None
                longest[0] = max(longest[0], took[0])

    thread = threading.Thread(target=alter)
    thread.start()
    try:
        await_until(is_done, LIMIT_S, lambda: f"the tables to be read\n{daemon.tail()}")
    finally:
        ended.set()
        thread.join(LIMIT_S)
    assert not thread.is_alive()
    return longest[0]
