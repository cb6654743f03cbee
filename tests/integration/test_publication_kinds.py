"""Publications made by others, for all tables, for schemas or a list: used as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pydantic import SecretStr

from ingestd.lake.delta.read import read_raw
from ingestd.model.schema import TableId
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.preflight import preflight
from tests.harness.compare import assert_change_log_is_sound, assert_lake_equals_source, registry
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
TABLES = ["public.*", "sales.*", "!public.skipped"]
LOG = TableId("public", "log")
ORDERS = TableId("sales", "orders")
PARTS = TableId("public", "parts")

KINDS = {
    "all": ("FOR ALL TABLES", {"public.skipped", "stock.items"}),
    "schemas": ("FOR TABLES IN SCHEMA public, sales", {"public.skipped"}),
    "mixed": (
        "FOR TABLES IN SCHEMA sales, TABLE public.parts, public.log, stock.items",
        {"stock.items"},
    ),
    "list": ("FOR TABLE public.parts, public.log, sales.orders", set()),
}
"""What the publication is of, and which tables it sends in vain."""


@pytest.fixture(scope="module", params=[15, pytest.param(18, marks=pytest.mark.thorough)])
def server(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    with server_of(request.param) as running:
        yield running


@pytest.fixture
def shop(server: PostgresServer) -> Iterator[Database]:
    with fresh_database(server) as database:
        database.execute(
            "CREATE SCHEMA sales",
            "CREATE SCHEMA stock",
            "CREATE TABLE sales.orders (id int PRIMARY KEY, note text)",
            "CREATE TABLE stock.items (id int PRIMARY KEY)",
            "CREATE TABLE log (note text)",
            "CREATE TABLE skipped (id int PRIMARY KEY)",
            "CREATE TABLE parts (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)",
            "CREATE TABLE part_1 PARTITION OF parts FOR VALUES FROM (0) TO (100)",
            "CREATE TABLE part_2 PARTITION OF parts FOR VALUES FROM (100) TO (200)",
            "INSERT INTO sales.orders SELECT i, 'first' FROM generate_series(1, 50) i",
            "INSERT INTO parts SELECT i, 'first' FROM generate_series(90, 110) i",
            "INSERT INTO log VALUES ('first')",
        )
        yield database


def publish(shop: Database, kind: str) -> set[str]:
    """Do by hand what manage = false leaves to others; return what is sent without need."""
    scope, in_vain = KINDS[kind]
    shop.execute(
        f'CREATE PUBLICATION "{shop.name}" {scope} WITH (publish_via_partition_root = true)',
        f"SELECT pg_create_logical_replication_slot('{shop.name}', 'pgoutput')",
    )
    return in_vain


def config(shop: Database, lake: Path) -> str:
    names = f'slot = "{shop.name}"\npublication = "{shop.name}"'
    return wal_config(
        lake=lake,
        dsn=shop.dsn,
        tables=TABLES,
        source_extra=f'{names}\nmanage = false\ndiscover_interval = "200ms"',
    )


async def publication_line(shop: Database, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "dsn": SecretStr(shop.dsn),
        "tables": TABLES,
        "slot": shop.name,
        "publication": shop.name,
        "manage": False,
    }
    lines = await preflight("shop", WalSettings(kind="wal", **{**settings, **changes}))
    [line] = [line for line in lines if line.subject == f"publication {shop.name}"]
    return line


def state(lake: Path, table: str) -> tuple[str, str | None] | None:
    """The table's last state in `_tables`, and why."""
    rows = [row for row in registry(lake) if row["table"] == table]
    return (rows[-1]["state"], rows[-1]["reason"]) if rows else None


def assert_equal(shop: Database, lake: Path) -> None:
    """Of the tables that have an identity."""
    assert_lake_equals_source(shop, lake, tables=[ORDERS, PARTS], slot=shop.name, limit_s=LIMIT_S)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
async def test_check_says_what_is_sent_in_vain(shop: Database, kind: str) -> None:
    in_vain = publish(shop, kind)
    line = await publication_line(shop)
    assert line.level == ("warn" if in_vain else "ok")
    for table in ("public.skipped", "stock.items", "sales.orders"):
        assert (table in line.detail) == (table in in_vain)
    more = await publication_line(shop, tables=[*TABLES[:2], "stock.*"])
    assert more.level == ("fail" if kind in {"list", "schemas", "mixed"} else "ok")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_given_is_captured_and_nothing_else(
    shop: Database, lake: Path, make_daemon: MakeDaemon, kind: str
) -> None:
    publish(shop, kind)
    before = shop.rows("SELECT * FROM pg_publication_tables ORDER BY 1, 2, 3")
    daemon = make_daemon(config(shop, lake))
    daemon.start()
    await_live(daemon, lake, "sales.orders")
    shop.execute(
        "UPDATE sales.orders SET note = 'second' WHERE id > 25",
        "UPDATE parts SET id = id + 30 WHERE id = 95",
        "DELETE FROM parts WHERE id = 96",
        "INSERT INTO log VALUES ('second')",
        "INSERT INTO skipped VALUES (1)",
        "INSERT INTO stock.items VALUES (1)",
        "TRUNCATE stock.items, skipped",
    )
    assert_equal(shop, lake)
    assert_change_log_is_sound(shop, lake)
    assert not (lake / "shop/public/skipped").exists()
    assert not (lake / "shop/stock").exists()
    notes = read_raw(str(lake), "shop", LOG)["note"].to_pylist()
    assert sorted(n for n in notes if n) == ["first", "second"]
    assert shop.rows("SELECT * FROM pg_publication_tables ORDER BY 1, 2, 3") == before
    daemon.close()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_new_table_comes_when_the_publication_has_it(
    shop: Database, lake: Path, make_daemon: MakeDaemon, kind: str
) -> None:
    publish(shop, kind)
    daemon = make_daemon(config(shop, lake))
    daemon.start()
    await_live(daemon, lake, "sales.orders")
    shop.execute(
        "CREATE TABLE news (id int PRIMARY KEY, note text)",
        "INSERT INTO news VALUES (1, 'first')",
    )
    if kind in {"mixed", "list"}:
        await_state(daemon, lake, "public.news", "stopped")
        found = state(lake, "public.news")
        assert found is not None
        assert f"not in publication '{shop.name}', and manage = false" in str(found[1])
        shop.execute(f'ALTER PUBLICATION "{shop.name}" ADD TABLE news')
    await_live(daemon, lake, "public.news")
    shop.execute("INSERT INTO news VALUES (2, 'second')")
    tables = [TableId("public", "news"), ORDERS]
    assert_lake_equals_source(shop, lake, tables=tables, slot=shop.name, limit_s=LIMIT_S)
    daemon.close()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "away", "back"),
    [
        ("schemas", "DROP TABLES IN SCHEMA sales", "ADD TABLES IN SCHEMA sales"),
        ("list", "DROP TABLE sales.orders", "ADD TABLE sales.orders"),
    ],
)
@pytest.mark.parametrize("is_running", [True, False])
def test_rows_unpublished_for_a_time_are_resnapshotted(  # noqa: PLR0917
    shop: Database,
    lake: Path,
    make_daemon: MakeDaemon,
    kind: str,
    away: str,
    back: str,
    *,
    is_running: bool,
) -> None:
    """I6: however short it was, also where no entry of the table itself shows it."""
    publish(shop, kind)
    daemon = make_daemon(config(shop, lake))
    daemon.start()
    await_live(daemon, lake, "sales.orders")
    assert_equal(shop, lake)
    if not is_running:
        assert daemon.sigterm() == 0
    alter = f'ALTER PUBLICATION "{shop.name}"'
    shop.execute(f"{alter} {away}", "UPDATE sales.orders SET note = 'unseen'", f"{alter} {back}")
    if not is_running:
        daemon.start()
    await_read_again(daemon, lake)
    assert_equal(shop, lake)
    assert_change_log_is_sound(shop, lake)
    daemon.close()


@pytest.mark.thorough
def test_a_recreated_publication_for_all_tables_is_a_gap(
    lake: Path, make_daemon: MakeDaemon
) -> None:
    """I6: from PostgreSQL 18 on the server skips what it missed silently."""
    with server_of(18) as server, fresh_database(server) as shop:
        shop.execute(
            "CREATE SCHEMA sales",
            "CREATE TABLE sales.orders (id int PRIMARY KEY, note text)",
            "INSERT INTO sales.orders VALUES (1, 'first'), (2, 'first')",
        )
        create = (
            f'CREATE PUBLICATION "{shop.name}" FOR ALL TABLES'
            " WITH (publish_via_partition_root = true)"
        )
        shop.execute(
            create, f"SELECT pg_create_logical_replication_slot('{shop.name}', 'pgoutput')"
        )
        daemon = make_daemon(config(shop, lake))
        daemon.start()
        await_live(daemon, lake, "sales.orders")
        assert daemon.sigterm() == 0
        shop.execute(
            f'DROP PUBLICATION "{shop.name}"', "DELETE FROM sales.orders WHERE id = 1", create
        )
        daemon.start()
        await_read_again(daemon, lake)
        assert_lake_equals_source(shop, lake, tables=[ORDERS], slot=shop.name, limit_s=LIMIT_S)
        daemon.close()


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("again", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_publication_of_ours_that_was_made_again_is_a_gap(
    shop: Database, lake: Path, make_daemon: MakeDaemon, *, again: bool, is_running: bool
) -> None:
    """I6, I13: the server can't decode what came between, and no operator action is needed."""
    tables = (ORDERS, PARTS)
    shop.execute("DROP TABLE log")
    daemon = make_daemon(config(shop, lake).replace("manage = false", "manage = true"))
    daemon.start_ready(LIMIT_S)
    if not is_running:
        assert daemon.sigterm() == 0
    create = f'CREATE PUBLICATION "{shop.name}" FOR TABLE sales.orders, parts'
    shop.execute(
        "UPDATE sales.orders SET note = 'before' WHERE id = 1",
        f'DROP PUBLICATION "{shop.name}"',
        "DELETE FROM sales.orders WHERE id = 2",
        *([f"{create} WITH (publish_via_partition_root = true)"] if again else []),
        "DELETE FROM sales.orders WHERE id = 3",
    )
    if not is_running:
        daemon.start()
    await_read_again(daemon, lake)
    assert_lake_equals_source(shop, lake, tables=tables, slot=shop.name, limit_s=LIMIT_S)
    shop.execute("DELETE FROM sales.orders WHERE id = 4")
    assert_lake_equals_source(shop, lake, tables=tables, slot=shop.name, limit_s=LIMIT_S)
    daemon.await_ready(LIMIT_S)
    assert_change_log_is_sound(shop, lake)
    daemon.close()


def test_a_recreated_external_publication_needs_another_slot(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """The remedy is pasted; from PostgreSQL 18 on the server skips the gap silently."""
    shop.execute("DROP TABLE log")
    create = f'CREATE PUBLICATION "{shop.name}" FOR TABLE sales.orders, parts'
    create += " WITH (publish_via_partition_root = true)"
    shop.execute(create, f"SELECT pg_create_logical_replication_slot('{shop.name}', 'pgoutput')")
    daemon = make_daemon(config(shop, lake))
    daemon.start_ready(LIMIT_S)
    assert daemon.sigterm() == 0
    shop.execute(f'DROP PUBLICATION "{shop.name}"', "DELETE FROM sales.orders WHERE id = 2", create)
    daemon.start()
    if shop.value("SELECT current_setting('server_version_num')::int") < 180000:
        await_until(lambda: bool(daemon.events("source.failed")), LIMIT_S, daemon.tail)
        assert daemon.sigterm() == 0
        shop.execute(daemon.events("source.failed")[-1]["remedy"])
        daemon.start()
    await_read_again(daemon, lake)
    assert_lake_equals_source(shop, lake, tables=(ORDERS, PARTS), slot=shop.name, limit_s=LIMIT_S)
    daemon.close()


def await_read_again(daemon: Daemon, lake: Path) -> None:
    """Wait until sales.orders was read a second time and is live."""

    def is_read_again() -> bool:
        operations: list[str] = read_raw(str(lake), "shop", ORDERS)["_cdc_op"].to_pylist()
        return operations.count("t") > 1

    await_until(is_read_again, LIMIT_S, lambda: f"orders to be read again\n{daemon.tail()}")
    await_live(daemon, lake, "sales.orders")


def await_live(daemon: Daemon, lake: Path, table: str) -> None:
    await_state(daemon, lake, table, "live")


def await_state(daemon: Daemon, lake: Path, table: str, wanted: str) -> None:
    def reached() -> bool:
        found = state(lake, table)
        return found is not None and found[0] == wanted

    await_until(reached, LIMIT_S, lambda: f"{table} to be {wanted}\n{daemon.tail()}")
