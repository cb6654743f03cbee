"""PostgreSQL 18 refuses writes under REPLICA IDENTITY FULL without a generated column."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from tests.harness.command_line import run_command
from tests.harness.shop_servers import config, with_shop
from tests.harness.standbys import needs, server_of
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 40.0
TABLES = ("stored_whole", "virtual_whole", "keyed")


def write_all(shop: Database) -> None:
    """As their users do, whatever is published."""
    for table in TABLES:
        shop.execute(f"UPDATE {table} SET a = a + 1", f"DELETE FROM {table} WHERE a = 100")


def test_tables_that_publishing_would_break_are_left_out(
    lake: Path, make_daemon: MakeDaemon
) -> None:
    needs(18)
    with server_of(18) as server:
        shop = with_shop(server)
        shop.execute(
            "CREATE TABLE stored_whole (a int, g int GENERATED ALWAYS AS (a * 2) STORED)",
            "CREATE TABLE virtual_whole (a int, g int GENERATED ALWAYS AS (a * 2) VIRTUAL)",
            "CREATE TABLE keyed (a int PRIMARY KEY, g int GENERATED ALWAYS AS (a * 2) STORED)",
            "ALTER TABLE stored_whole REPLICA IDENTITY FULL",
            "ALTER TABLE virtual_whole REPLICA IDENTITY FULL",
            *(f"INSERT INTO {table} VALUES (1)" for table in TABLES),
        )
        extra = 'discover_interval = "500ms"'
        daemon = make_daemon(config(shop, lake, source_extra=extra))
        checked = run_command(daemon.folder / "ingestd.toml", "check")
        for table in TABLES[:2]:
            [line] = [line for line in checked.stdout.splitlines() if f"public.{table} " in line]
            assert line.startswith("fail")
            assert "REPLICA IDENTITY FULL, with generated column 'g' that is not" in line
        assert "add a primary key without generated columns; then ALTER" in checked.stdout
        daemon.start()

        def states() -> dict[str, str]:
            changed = daemon.events("table.state") + daemon.events("table.stopped")
            return {e["table"]: e.get("state", "stopped") for e in changed}

        await_until(lambda: states().get("public.keyed") == "live", LIMIT_S, daemon.tail)
        write_all(shop)
        # One that is captured, and becomes such a table.
        shop.execute("ALTER TABLE keyed REPLICA IDENTITY FULL")

        def is_written() -> bool:
            try:
                write_all(shop)
            except psycopg.errors.InvalidColumnReference:
                return False
            return True

        await_until(is_written, LIMIT_S, daemon.tail)
        shop.execute("ALTER TABLE keyed REPLICA IDENTITY DEFAULT")
        published = "SELECT 1 FROM pg_publication_tables WHERE tablename = 'keyed'"
        await_until(lambda: shop.rows(published), LIMIT_S, daemon.tail)
        write_all(shop)
        assert daemon.sigterm() == 0
