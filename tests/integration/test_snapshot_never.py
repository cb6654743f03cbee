"""snapshot = "never": the stream from the slot's point, and nothing read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ingestd.model.schema import TableId
from ingestd.testing.oracle.comparison import await_caught_up
from tests.harness.compare import assert_change_log_is_sound, raw_rows, registry
from tests.harness.config import wal_config
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 30.0
ORDERS = TableId("public", "orders")


@pytest.fixture
def shop(database: Database) -> Database:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note text)",
        "INSERT INTO orders SELECT i, 'before the slot' FROM generate_series(1, 100) i",
    )
    return database


def config(shop: Database, lake: Path, extra: str = "") -> str:
    names = f'slot = "{shop.name}"\npublication = "{shop.name}"\nsnapshot = "never"'
    return wal_config(lake=lake, dsn=shop.dsn, source_extra=f"{names}\n{extra}")


def changes(lake: Path, table: TableId = ORDERS) -> list[tuple[str, int]]:
    """Operation and id of every row of the raw table, in order; empty without one."""
    rows = raw_rows(lake, table)
    rows.sort(key=lambda row: (row["_cdc_lsn"], row["_cdc_seq"]))
    return [(row["_cdc_op"], row["id"]) for row in rows]


def await_changes(daemon: Daemon, lake: Path, wanted: list[tuple[str, int]]) -> None:
    def arrived() -> bool:
        return len(changes(lake)) >= len(wanted)

    await_until(arrived, LIMIT_S, lambda: f"{wanted}\n{daemon.tail()}")
    assert changes(lake) == wanted


@pytest.mark.thorough
@pytest.mark.parametrize("by_hand", [False, True])
def test_it_starts_at_the_slots_point_new_or_there_already(
    shop: Database, lake: Path, make_daemon: MakeDaemon, *, by_hand: bool
) -> None:
    daemon = make_daemon(config(shop, lake, "manage = false" if by_hand else ""))
    wanted = []
    if by_hand:
        shop.execute(
            f'CREATE PUBLICATION "{shop.name}" FOR TABLE orders'
            " WITH (publish_via_partition_root = true)",
            f"SELECT pg_create_logical_replication_slot('{shop.name}', 'pgoutput')",
            "UPDATE orders SET note = 'since the slot' WHERE id = 7",
        )
        wanted.append(("u", 7))
    daemon.start_ready()
    shop.execute("INSERT INTO orders VALUES (101, 'new')", "DELETE FROM orders WHERE id = 1")
    wanted += [("c", 101), ("d", 1)]
    await_changes(daemon, lake, wanted)
    daemon.sigkill()
    shop.execute("DELETE FROM orders WHERE id = 2")
    daemon.start_ready()
    await_changes(daemon, lake, [*wanted, ("d", 2)])
    with shop.connect() as connection:  # raw tables have an epoch before `_epochs` has it
        await_caught_up(connection, shop.name, LIMIT_S)
    assert_change_log_is_sound(shop, lake)
    assert {row["state"] for row in registry(lake)} == {"live"}
    assert {row["snapshot_lsn"] for row in registry(lake)} == {None}
    assert not daemon.events("source.slot_lost")


def test_a_slot_of_another_tool_continues_where_it_is(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """With manage = true as well, if the config allows it: the slot is never re-created."""
    shop.execute(
        f'CREATE PUBLICATION "{shop.name}" FOR TABLE orders',
        f"SELECT pg_create_logical_replication_slot('{shop.name}', 'pgoutput')",
        "INSERT INTO orders VALUES (102, 'since the slot')",
    )
    daemon = make_daemon(config(shop, lake, 'lake_lost = "resnapshot"'))
    daemon.start_ready()
    shop.execute("DELETE FROM orders WHERE id = 102")
    await_changes(daemon, lake, [("c", 102), ("d", 102)])


def test_a_gap_stops_it_and_is_never_silent(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(config(shop, lake))
    daemon.start_ready()
    shop.execute("INSERT INTO orders VALUES (103, 'new')")
    await_changes(daemon, lake, [("c", 103)])
    assert daemon.sigterm() == 0
    shop.execute(
        f"SELECT pg_drop_replication_slot('{shop.name}')", "DELETE FROM orders WHERE id = 103"
    )
    daemon.start()

    def stopped() -> bool:
        return bool(daemon.events("source.failed"))

    await_until(stopped, LIMIT_S, lambda: f"the source to stop\n{daemon.tail()}")
    [failed] = daemon.events("source.failed")
    assert failed["state"] == "stopped"
    assert "does not exist" in failed["reason"]
    assert 'snapshot = "initial"' in failed["remedy"]
    assert shop.slots() == []
