"""Slots that are lost, and servers that are others than the lake's rows came from: never silent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ingestd.positions import Lsn
from ingestd.schema import TableId
from ingestd.sink.read import read_raw
from tests.harness.compare import assert_change_log_is_sound, assert_lake_equals_source
from tests.harness.config import wal_config
from tests.harness.databases import Database
from tests.harness.standbys import Kind, await_replayed, copy_of, promote, server_of
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.demo.daemon import Daemon
    from ingestd.demo.postgres import PostgresServer
    from tests.conftest import MakeDaemon

LIMIT_S = 40.0
ORDERS = TableId("public", "orders")
SLOT = "ingestd_shop"


def with_shop(server: PostgresServer) -> Database:
    """The database `shop` on a server of the test's own; it goes with the server."""
    with server.connect() as connection:
        connection.execute("CREATE DATABASE shop")
    shop = Database(server, "shop")
    shop.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note text)",
        "INSERT INTO orders SELECT i, 'first ' || i FROM generate_series(1, 100) i",
    )
    return shop


def on(server: PostgresServer) -> Database:
    return Database(server, "shop")


def config(shop: Database, lake: Path, **changes: Any) -> str:
    return wal_config(lake=lake, dsn=shop.dsn, **changes)


def assert_equal(shop: Database, lake: Path) -> None:
    assert_lake_equals_source(shop, lake, limit_s=LIMIT_S)


def snapshots(lake: Path) -> int:
    """How often `orders` was read."""
    return read_raw(str(lake), "shop", ORDERS)["_cdc_op"].to_pylist().count("t")


def loss(daemon: Daemon) -> str:
    """The reason that the daemon gave, once, for reading all tables anew."""
    [lost] = daemon.events("source.slot_lost")
    reason: str = lost["reason"]
    return reason


def stopped_for(daemon: Daemon) -> dict[str, Any]:
    """Wait until the source stops; give the event that says why."""

    def stopped() -> bool:
        status = daemon.status()
        return status is not None and status["sources"]["shop"].get("state") == "stopped"

    await_until(stopped, LIMIT_S, lambda: f"the source to stop\n{daemon.tail()}")
    return daemon.events("source.failed")[-1]


def slot(shop: Database, column: str) -> Any:
    query = f"SELECT {column} FROM pg_replication_slots WHERE slot_name = %s"
    return shop.value(query, SLOT)


# --- the slot --------------------------------------------------------------------------------


def test_a_slot_moved_beyond_the_lake_is_read_anew(lake: Path, make_daemon: MakeDaemon) -> None:
    with server_of(15) as server:
        shop = with_shop(server)
        daemon = make_daemon(config(shop, lake))
        daemon.start_ready()
        assert daemon.sigterm() == 0
        shop.execute(
            "DELETE FROM orders WHERE id <= 10",
            f"SELECT pg_replication_slot_advance('{SLOT}', pg_current_wal_lsn())",
            "UPDATE orders SET note = 'seen' WHERE id > 90",
        )
        daemon.start_ready()
        assert_equal(shop, lake)
        assert "was moved to" in loss(daemon)
        assert snapshots(lake) == 2
        daemon.close()


def test_an_idle_slot_that_the_server_gave_up_is_read_anew(
    lake: Path, make_daemon: MakeDaemon
) -> None:
    with server_of(18, {"idle_replication_slot_timeout": "1s"}) as server:
        shop = with_shop(server)
        daemon = make_daemon(config(shop, lake))
        daemon.start_ready()
        assert daemon.sigterm() == 0

        def given_up() -> bool:
            shop.execute("INSERT INTO orders SELECT max(id) + 1 FROM orders", "CHECKPOINT")
            return bool(slot(shop, "wal_status") == "lost")

        await_until(given_up, LIMIT_S, "the server to give up the slot", poll_s=0.2)
        daemon.start_ready()
        assert_equal(shop, lake)
        assert "idle_replication_slot_timeout = 1s" in loss(daemon)
        daemon.close()


def test_a_slot_whose_wal_a_new_server_removed_says_so(lake: Path, make_daemon: MakeDaemon) -> None:
    settings = {"max_slot_wal_keep_size": "1MB", "max_wal_size": "32MB"}
    with server_of(18, settings) as server:
        shop = with_shop(server)
        daemon = make_daemon(config(shop, lake, source_extra='slot_lost = "stop"'))
        daemon.start_ready()
        assert daemon.sigterm() == 0

        def lost() -> bool:
            shop.execute("SELECT pg_logical_emit_message(false, '', 'x')", "SELECT pg_switch_wal()")
            shop.execute("CHECKPOINT")
            return bool(slot(shop, "invalidation_reason") == "wal_removed")

        await_until(lost, LIMIT_S, "the server to give up the slot")
        daemon.start()
        failed = stopped_for(daemon)
        assert "removed WAL that it needs (max_slot_wal_keep_size = 1MB)" in failed["reason"]
        assert "resnapshot" in failed["remedy"]
        assert slot(shop, "wal_status") == "lost"
        daemon.close()


# --- another server --------------------------------------------------------------------------


def move_on(shop: Database, failed: dict[str, Any]) -> None:
    """Do what the remedy says, to have all tables read anew."""
    _, _, statement = failed["remedy"].partition("and then ")
    shop.execute(statement)


def behind(failed: dict[str, Any]) -> tuple[Lsn, Lsn]:
    """Where the lake ends and where the server is, as the fault says."""
    assert "restored from an older backup" in failed["reason"]
    _, _, told = failed["reason"].partition("the lake ends at ")
    words = told.replace(",", " ").replace(":", " ").split()
    return Lsn.parse(words[0]), Lsn.parse(words[5])


@pytest.mark.parametrize(
    ("kind", "told"), [("plain", "does not exist any more"), ("recovery", "timeline 1, now 2")]
)
def test_a_server_restored_from_a_backup_is_not_taken_for_its_old_self(
    lake: Path, make_daemon: MakeDaemon, kind: Kind, told: str
) -> None:
    """With and without a timeline of its own; a base backup has no slots."""
    with server_of(15) as server:
        shop = with_shop(server)
        daemon = make_daemon(config(shop, lake))
        daemon.start_ready()
        with copy_of(server, kind, starts=False) as restored:
            shop.execute("SELECT pg_switch_wal()", "DELETE FROM orders WHERE id <= 10")
            assert_equal(shop, lake)
            assert daemon.sigterm() == 0
            server.stop()
            restored.start()
            other = on(restored)
            other.execute("INSERT INTO orders VALUES (2000, 'after it')")
            daemon.write_config(config(other, lake))
            daemon.start()
            failed = stopped_for(daemon)
            ours, theirs = behind(failed)
            assert ours > theirs
            assert not daemon.events("source.slot_lost")
            assert daemon.sigterm() == 0
            move_on(other, failed)
            daemon.start_ready()
            assert_equal(other, lake)
            assert told in loss(daemon)
            assert snapshots(lake) == 2
            daemon.close()


def test_another_server_under_the_same_address_is_told_and_read_anew(
    lake: Path, make_daemon: MakeDaemon
) -> None:
    with server_of(15) as first, server_of(15) as second:
        shop = with_shop(first)
        shop.execute("SELECT pg_logical_emit_message(false, '', ''), pg_switch_wal()")
        daemon = make_daemon(config(shop, lake))
        daemon.start_ready()
        assert_equal(shop, lake)
        assert daemon.sigterm() == 0
        other = with_shop(second)
        other.execute("UPDATE orders SET note = 'of the second' WHERE id < 50")
        daemon.write_config(config(other, lake))
        daemon.start()
        failed = stopped_for(daemon)
        ours, theirs = behind(failed)
        assert ours > theirs
        assert daemon.sigterm() == 0
        move_on(other, failed)
        daemon.start_ready()
        assert_equal(other, lake)
        assert "another server (system identifier" in loss(daemon)
        assert snapshots(lake) == 2
        daemon.close()


# --- failover --------------------------------------------------------------------------------


def test_a_promoted_standby_of_an_old_server_is_read_anew(
    lake: Path, make_daemon: MakeDaemon
) -> None:
    with server_of(15) as primary:
        shop = with_shop(primary)
        daemon = make_daemon(config(shop, lake))
        daemon.start_ready()
        with copy_of(primary) as standby:
            shop.execute("DELETE FROM orders WHERE id <= 10")
            assert_equal(shop, lake)
            await_replayed(primary, standby)
            primary.kill()
            assert daemon.sigterm() == 0
            promote(standby)
            other = on(standby)
            other.execute("UPDATE orders SET note = 'after it' WHERE id > 90")
            daemon.write_config(config(other, lake))
            daemon.start_ready()
            assert_equal(other, lake)
            assert "timeline 1, now 2" in loss(daemon)
            assert "keeps no slot" in loss(daemon)
            assert snapshots(lake) == 2
            assert daemon.sigterm() == 0
            daemon.start_ready()
            other.execute("DELETE FROM orders WHERE id > 95")
            assert_equal(other, lake)
            assert len(daemon.events("source.slot_lost")) == 1
            daemon.close()


def test_a_promoted_standby_that_had_no_copy_of_the_slot_is_read_anew(
    lake: Path, make_daemon: MakeDaemon
) -> None:
    with server_of(18) as primary:
        shop = with_shop(primary)
        daemon = make_daemon(config(shop, lake))
        daemon.start_ready()
        with copy_of(primary) as standby:
            shop.execute("DELETE FROM orders WHERE id <= 10")
            assert_equal(shop, lake)
            await_replayed(primary, standby)
            primary.kill()
            assert daemon.sigterm() == 0
            promote(standby)
            other = on(standby)
            other.execute("UPDATE orders SET note = 'after it' WHERE id > 90")
            daemon.write_config(config(other, lake))
            daemon.start_ready()
            assert_equal(other, lake)
            assert "it has no slot 'ingestd_shop' (a standby with sync_rep" in loss(daemon)
            assert_change_log_is_sound(other, lake)
            daemon.close()
