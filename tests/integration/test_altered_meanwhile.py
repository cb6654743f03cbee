"""Definitions reported by the stream and by a discovery, in either order."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from tests.harness.command_line import run_command
from tests.harness.compare import assert_lake_equals_source, registry
from tests.harness.config import wal_config
from tests.harness.shop_servers import ORDERS, config, with_shop
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0
WAITING = """
SELECT count(*) >= 2 FROM pg_stat_activity
 WHERE wait_event = 'SyncRep' OR wait_event_type = 'Lock'
"""


def of_orders(lake: Path) -> list[dict[str, Any]]:
    return [row for row in registry(lake) if row["table"] == "public.orders"]


def columns(lake: Path) -> list[list[str]]:
    """Those of `orders`, in each row of `_tables`, without repetitions."""
    found: list[list[str]] = []
    for row in of_orders(lake):
        names = [column["name"] for column in row["columns"]]
        if not found or found[-1] != names:
            found.append(names)
    return found


def test_a_discovery_does_not_undo_what_the_stream_reported(
    own_postgres: PostgresServer, lake: Path, make_daemon: MakeDaemon
) -> None:
    """A commit is in the WAL before others see it: here as long as no standby answers."""
    shop = with_shop(own_postgres)
    daemon = make_daemon(config(shop, lake, source_extra='discover_interval = "300ms"'))
    daemon.start_ready()
    shop.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    shop.execute("SELECT pg_reload_conf()")
    await_until(
        lambda: shop.value("SHOW synchronous_standby_names") == "nobody", LIMIT_S, "a reload"
    )
    with shop.connect(autocommit=False) as altering, shop.connect() as other:
        other.execute("SET synchronous_commit = local")
        backend = altering.info.backend_pid
        altering.execute("ALTER TABLE orders ADD x int")
        altering.execute("UPDATE orders SET x = id WHERE id <= 50")
        committing = threading.Thread(target=altering.commit)
        committing.start()
        try:
            await_until(lambda: len(columns(lake)) == 2, LIMIT_S, daemon.tail)
            other.execute("CREATE TABLE more (id int PRIMARY KEY)")
            # Discovered, with a snapshot of before; then the daemon waits as well: for the same
            # standby, or for the table's lock.
            await_until(lambda: other.execute(WAITING).fetchone() == (True,), LIMIT_S, daemon.tail)
        finally:
            # As an answer would, it ends the waiting, and the commit holds.
            other.execute("SELECT pg_cancel_backend(%s)", [backend])
            committing.join()
    shop.execute("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
    await_until(
        lambda: any(row["table"] == "public.more" for row in registry(lake)),
        LIMIT_S,
        daemon.tail,
    )
    assert_lake_equals_source(shop, lake, tables=[ORDERS], limit_s=LIMIT_S)
    assert columns(lake) == [["id", "note"], ["id", "note", "x"]]
    verified = run_command(daemon.folder / "ingestd.toml", "verify", "shop")
    assert verified.returncode == 0, verified.stdout
    assert daemon.sigterm() == 0


LEFT = '"left":{"'


@pytest.mark.thorough
@pytest.mark.parametrize("is_killed", [False, True], ids=["goes on", "is killed"])
def test_rows_that_ddl_makes_ambiguous_are_read_from_the_start(
    database: Database, lake: Path, make_daemon: MakeDaemon, *, is_killed: bool
) -> None:
    """Also those that a reading which was under way has read."""
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)",
        *(
            f"CREATE TABLE orders_{n} PARTITION OF orders"
            f" FOR VALUES FROM ({n * 1000}) TO ({n * 1000 + 1000})"
            for n in range(4)
        ),
        "INSERT INTO orders SELECT i, 'first' FROM generate_series(0, 3999) i",
    )
    daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn))
    daemon.start_ready()
    await_until(lambda: of_orders(lake)[-1]["state"] == "live", LIMIT_S, daemon.tail)
    assert daemon.sigterm() == 0
    daemon.environment["INGESTD_FAILPOINTS"] = "capture.split.after=delay:2@2+"
    daemon.start_ready()
    run_command(daemon.folder / "ingestd.toml", "snapshot", "shop", "public.orders", "--no-wait")
    await_until(
        lambda: any(LEFT in (row["progress"] or "") for row in of_orders(lake)),
        LIMIT_S,
        daemon.tail,
    )
    with database.connect(autocommit=False) as session:
        session.execute("UPDATE orders SET note = 'second' WHERE id % 1000 < 10")
        session.execute("ALTER TABLE orders ADD x int DEFAULT 5")
        session.execute("UPDATE orders SET note = 'third' WHERE id % 1000 = 20")
    await_until(lambda: len(columns(lake)) == 2, LIMIT_S, daemon.tail)
    if is_killed:
        daemon.sigkill()
        daemon.environment["INGESTD_FAILPOINTS"] = ""
        daemon.start()
    await_until(
        lambda: columns(lake)[-1] == ["id", "note", "x"] and of_orders(lake)[-1]["state"] == "live",
        LIMIT_S,
        daemon.tail,
    )
    verified = run_command(daemon.folder / "ingestd.toml", "verify", "shop")
    assert verified.returncode == 0, verified.stdout
    assert daemon.sigterm() == 0
