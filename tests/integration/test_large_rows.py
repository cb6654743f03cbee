"""Rows beyond what may be held: their table stops, clearly, and nothing else does (I8, I9)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ingestd.lake.delta.read import read_raw
from ingestd.lake.fold.plain import fold
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from tests.harness.compare import assert_change_log_is_sound, assert_lake_equals_source, registry
from tests.harness.config import polling_config, wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 60.0
TOO_LARGE = "repeat('x', 70000000)"
"""With limits.memory at its least, 64 MB."""
SMALL = TableId("public", "small")


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        "CREATE TABLE big (id int PRIMARY KEY, body text)",
        "CREATE TABLE small (id int PRIMARY KEY, note text)",
        "INSERT INTO big VALUES (1, 'short')",
    )
    return database


def config(shop: Database, lake: Path, table: str = "", source: str = "") -> str:
    extra = f'[limits]\nmemory = "64MB"\n[sources.shop.table."public.big"]\n{table}\n'
    return wal_config(lake=lake, dsn=shop.dsn, source_extra=source, extra=extra)


def table_state(lake: Path, name: str) -> dict[str, Any]:
    last = [row for row in registry(lake) if row["table"] == f"public.{name}"][-1]
    return dict(last)


def await_state(daemon: Daemon, lake: Path, name: str, state: str) -> dict[str, Any]:
    await_until(
        lambda: table_state(lake, name)["state"] == state,
        LIMIT_S,
        lambda: f"{name} to be {state}\n{daemon.tail()}",
    )
    return table_state(lake, name)


def await_confirmed(shop: Database, daemon: Daemon) -> None:
    """Wait until the slot has passed the current WAL: nothing is re-read repeatedly."""
    target = Lsn.parse(shop.value("SELECT pg_current_wal_insert_lsn()::text"))

    def confirmed() -> bool:
        found = shop.value(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE database = %s"
            " AND NOT temporary",
            shop.name,
        )
        return Lsn.parse(found) >= target

    await_until(confirmed, LIMIT_S, lambda: f"the slot\n{daemon.tail()}")


def assert_stopped_for_size(daemon: Daemon, lake: Path) -> None:
    stopped = await_state(daemon, lake, "big", "stopped")
    assert "a row of 70 MB" in stopped["reason"]
    # It is in the lake first, then in the log.
    event = await_until(lambda: daemon.events("table.stopped"), LIMIT_S, daemon.tail)[-1]
    assert event["table"] == "public.big"
    assert "exclude_columns" in str(event)
    assert "limits.memory" in str(event)


def await_stopped_again(daemon: Daemon) -> None:
    await_until(
        lambda: len(daemon.events("table.stopped")) == 2,
        LIMIT_S,
        lambda: f"it to be stopped again\n{daemon.tail()}",
    )


def test_a_row_too_large_in_the_stream_stops_its_table_alone(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(config(shop, lake))
    daemon.start_ready()
    with shop.connect(autocommit=False) as connection:
        connection.execute("INSERT INTO small VALUES (1, 'before it')")
        connection.execute(f"INSERT INTO big VALUES (2, {TOO_LARGE})".encode())
        connection.execute("INSERT INTO small VALUES (2, 'after it')")
        connection.commit()
    assert_stopped_for_size(daemon, lake)
    shop.execute("INSERT INTO small VALUES (3, 'and later')", "INSERT INTO big VALUES (3, 'x')")
    await_confirmed(shop, daemon)
    assert_lake_equals_source(shop, lake, tables=[SMALL])
    assert len(daemon.events("table.stopped")) == 1
    # its remedy helps: without the column the table is re-read
    daemon.sigterm()
    daemon.write_config(config(shop, lake, 'exclude_columns = ["body"]'))
    daemon.start_ready()
    await_state(daemon, lake, "big", "live")
    shop.execute(f"UPDATE big SET body = {TOO_LARGE} WHERE id = 1")
    await_confirmed(shop, daemon)
    assert table_state(lake, "big")["state"] == "live"
    assert_change_log_is_sound(shop, lake, is_dense=False)


@pytest.mark.thorough
def test_a_row_too_large_for_a_drain_or_snapshot_stops_its_table(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(config(shop, lake, source="catch_up_above = 0"))
    daemon.start_ready()
    daemon.sigterm()
    shop.execute(
        f"INSERT INTO big VALUES (2, {TOO_LARGE})", "INSERT INTO small VALUES (1, 'meanwhile')"
    )
    daemon.start()  # it is met in the backlog
    assert_stopped_for_size(daemon, lake)
    await_confirmed(shop, daemon)
    daemon.sigkill()
    daemon.start()  # and now where the stopped table is re-read
    await_stopped_again(daemon)
    shop.execute("INSERT INTO small VALUES (2, 'later')")
    await_confirmed(shop, daemon)
    assert_lake_equals_source(shop, lake, tables=[SMALL])
    # once deleted in the source, it is no reason any more
    shop.execute("DELETE FROM big WHERE id = 2")
    daemon.sigterm()
    daemon.start_ready()
    await_state(daemon, lake, "big", "live")
    await_confirmed(shop, daemon)
    assert_lake_equals_source(shop, lake)


@pytest.mark.thorough
def test_a_row_too_large_for_a_poll_or_snapshot_stops_its_table(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    def polling(table: str = "") -> str:
        extra = f'[limits]\nmemory = "64MB"\n[sources.shop.table."public.big"]\n{table}\n'
        return polling_config(lake=lake, dsn=shop.dsn, extra=extra)

    daemon = make_daemon(polling())
    daemon.start_ready()
    await_state(daemon, lake, "big", "live")
    shop.execute(f"INSERT INTO big VALUES (2, {TOO_LARGE})")
    assert_stopped_for_size(daemon, lake)
    shop.execute("INSERT INTO small VALUES (1, 'on the same connection')")
    await_rows(lake, 1)
    daemon.sigkill()
    daemon.start()  # and now where the stopped table is re-read
    await_stopped_again(daemon)
    shop.execute("INSERT INTO small VALUES (2, 'later')")
    await_rows(lake, 2)
    daemon.sigterm()
    daemon.write_config(polling('exclude_columns = ["body"]'))
    daemon.start_ready()
    await_state(daemon, lake, "big", "live")
    assert_change_log_is_sound(shop, lake)


def await_rows(lake: Path, count: int) -> None:
    """Wait until the lake has so many rows of the small table."""
    await_until(
        lambda: len(fold(read_raw(str(lake), "shop", SMALL), ["id"])) == count,
        LIMIT_S,
        f"{count} rows of {SMALL}",
    )


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["streamed", "drained"])
def test_a_row_the_server_cannot_send_is_named_with_a_remedy(
    shop: Database, lake: Path, make_daemon: MakeDaemon, way: str
) -> None:
    """No plugin can send it, so the slot can't pass it: a new slot is created without its table."""
    source = "catch_up_above = 0" if way == "drained" else ""
    daemon = make_daemon(config(shop, lake, source=source))
    daemon.start_ready()
    if way == "drained":
        daemon.sigterm()
    shop.execute(
        "ALTER TABLE big ADD extra bytea",
        "INSERT INTO big VALUES (2, '', convert_to(repeat('x', 540000000), 'UTF8'))",
        "INSERT INTO small VALUES (1, 'after it')",
    )
    if way == "drained":
        daemon.start()
    [lost] = await_until(lambda: daemon.events("source.slot_lost"), LIMIT_S, daemon.tail)
    assert "larger, as text, than the 1 GB" in lost["reason"]
    stopped = await_state(daemon, lake, "big", "stopped")
    assert "larger, as text, than the 1 GB" in stopped["reason"]
    assert_lake_equals_source(shop, lake, tables=[SMALL])
    # Without the column all is well; with it the table stops alone in a snapshot, too.
    daemon.sigterm()
    daemon.start()
    await_stopped_again(daemon)
    stopped = await_state(daemon, lake, "big", "stopped")
    assert "larger, as text, than the 1 GB" in stopped["reason"]
    assert "exclude_columns" in str(daemon.events("table.stopped"))
    await_confirmed(shop, daemon)
    assert_lake_equals_source(shop, lake, tables=[SMALL])
    daemon.sigterm()
    daemon.write_config(config(shop, lake, 'exclude_columns = ["extra"]'))
    daemon.start_ready()
    await_state(daemon, lake, "big", "live")
    shop.execute("UPDATE big SET body = 'longer' WHERE id = 2")
    await_confirmed(shop, daemon)
    assert_lake_equals_source(shop, lake, tables=[SMALL])


def slot_of(shop: Database) -> str:
    name: str = shop.value(
        "SELECT slot_name FROM pg_replication_slots WHERE database = %s AND NOT temporary",
        shop.name,
    )
    return name
