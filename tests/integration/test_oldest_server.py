"""PostgreSQL 14 publishes complete tables only: excluded columns are dropped here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ingestd.lake.delta.read import read_raw
from tests.harness.compare import assert_lake_equals_source
from tests.harness.shop_servers import LIMIT_S, ORDERS, config, with_shop
from tests.harness.standbys import needs, server_of
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon

NEEDLE = "hidden-needle"


def test_an_excluded_column_sent_by_the_server_is_left_out(
    lake: Path, make_daemon: MakeDaemon
) -> None:
    needs(14)
    with server_of(14) as server:
        shop = with_shop(server)
        shop.execute(
            f"ALTER TABLE orders ADD secret text DEFAULT '{NEEDLE}'",
            "CREATE TABLE plain (id int PRIMARY KEY)",
        )
        excluded = '[sources.shop.table."public.orders"]\nexclude_columns = ["secret"]'
        daemon = make_daemon(config(shop, lake, extra=excluded))
        daemon.start_ready()
        shop.execute(
            "INSERT INTO orders VALUES (200, 'streamed')",
            f"UPDATE orders SET secret = '{NEEDLE} too', note = 'changed' WHERE id < 10",
            "DELETE FROM orders WHERE id = 10",
            "INSERT INTO plain VALUES (1)",
        )
        with server.connect("shop") as connection:
            sent = connection.execute("SELECT count(*) FROM pg_publication_tables").fetchone()
        assert sent == (2,)
        await_until(
            lambda: read_raw(str(lake), "shop", ORDERS).num_rows == 1 + 100 + 1 + 9 + 1,
            LIMIT_S,
            daemon.tail,
        )
        raw = read_raw(str(lake), "shop", ORDERS)
        assert "secret" not in raw.column_names
        assert {"changed", "streamed"} <= set(raw["note"].to_pylist())
        assert NEEDLE not in daemon.log_path.read_text()
        assert not [path for path in lake.rglob("*") if path.is_file() and holds_needle(path)]
        shop.execute("ALTER TABLE orders DROP secret")
        assert_lake_equals_source(shop, lake, limit_s=LIMIT_S)
        assert daemon.sigterm() == 0


def holds_needle(path: Path) -> bool:
    return NEEDLE.encode() in path.read_bytes()
