"""A shop of orders on a test's own servers, and a daemon that follows from one to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ingestd.lake.delta.read import read_raw
from ingestd.model.schema import TableId
from tests.harness.compare import assert_lake_equals_source
from tests.harness.config import wal_config
from tests.harness.databases import Database
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from ingestd.testing.embedded.postgres import PostgresServer

LIMIT_S = 40.0
ORDERS = TableId("public", "orders")
SLOT = "ingestd_shop"


def with_shop(server: PostgresServer) -> Database:
    """Return a new database `shop` on a test's own server; it is removed with the server."""
    with server.connect() as connection:
        connection.execute("CREATE DATABASE shop")
    shop = shop_on(server)
    shop.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note text)",
        "INSERT INTO orders SELECT i, 'first ' || i FROM generate_series(1, 100) i",
    )
    return shop


def shop_on(server: PostgresServer) -> Database:
    """Return the same database on a copy of that server."""
    return Database(server, "shop")


def config(shop: Database, lake: Path, **changes: Any) -> str:
    return wal_config(lake=lake, dsn=changes.pop("dsn", shop.dsn), **changes)


def assert_equal(shop: Database, lake: Path) -> None:
    assert_lake_equals_source(shop, lake, limit_s=LIMIT_S)


def snapshots(lake: Path) -> int:
    """Return how often `orders` was read."""
    operations: list[str] = read_raw(str(lake), "shop", ORDERS)["_cdc_op"].to_pylist()
    return operations.count("t")


def loss(daemon: Daemon) -> str:
    """Return the daemon's only reason for re-reading all tables."""
    [lost] = daemon.events("source.slot_lost")
    reason: str = lost["reason"]
    return reason


def stopped_for(daemon: Daemon) -> dict[str, Any]:
    """Wait until the source stops; return the event with the cause."""

    def stopped() -> bool:
        status = daemon.status()
        return status is not None and status["sources"]["shop"].get("state") == "stopped"

    await_until(stopped, LIMIT_S, lambda: f"the source to stop\n{daemon.tail()}")
    return daemon.events("source.failed")[-1]


def slot(shop: Database, column: str) -> Any:
    """Return a column of the daemon's slot; None without a slot."""
    query = f"SELECT {column} FROM pg_replication_slots WHERE slot_name = %s"
    rows = shop.rows(query, SLOT)
    return rows[0][0] if rows else None
