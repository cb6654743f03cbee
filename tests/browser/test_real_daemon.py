"""The page of a real daemon that captures a real database."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playwright.sync_api import expect

from tests.browser.conftest import LIMIT_MS
from tests.harness.config import wal_config

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Page

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

expect.set_options(timeout=LIMIT_MS)


def test_rows_are_seen_to_arrive_and_a_table_to_stop(
    page: Page, database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note text)",
        'CREATE TABLE "<b>bold</b>" (id int PRIMARY KEY)',
        "INSERT INTO orders VALUES (1, 'a-value-of-a-row')",
    )
    names = f'slot = "{database.name}"\npublication = "{database.name}"\ndiscover_interval = "1s"'
    daemon = make_daemon(wal_config(lake=lake, dsn=database.dsn, source_extra=names))
    daemon.start_ready()
    page.goto(f"http://{daemon.listen}/")
    expect(page.locator("#overall")).to_have_text("shop delivers every table")
    orders = page.locator("tbody").filter(has_text="public.orders")
    expect(orders.locator("td.number").first).to_have_text("2")  # with the `t` of the snapshot
    expect(page.locator("tbody").filter(has_text="public.<b>bold</b>")).to_contain_text("Live")
    slot = page.locator(".card").filter(has_text="Slot headroom")
    expect(slot).to_contain_text("reserved")
    database.execute(
        "INSERT INTO orders SELECT n, 'a-value-of-a-row' FROM generate_series(2, 40) n"
    )
    expect(orders.locator("td.number").first).to_have_text("41")
    epochs = page.locator("table.epochs tbody tr")
    expect(epochs.first).to_contain_text("39")
    database.execute("ALTER TABLE orders DROP CONSTRAINT orders_pkey")
    expect(page.locator("#overall")).to_have_text("1 problem needs attention")
    expect(orders).to_contain_text("Stopped")
    expect(orders.locator(".remedy")).to_contain_text("REPLICA IDENTITY")
    assert "a-value-of-a-row" not in page.content()
