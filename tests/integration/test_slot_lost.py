"""Lost slots, and servers other than the lake's source: always reported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ingestd.model.lsn import Lsn
from tests.harness.compare import registry
from tests.harness.shop_servers import (
    LIMIT_S,
    SLOT,
    assert_equal,
    config,
    loss,
    shop_on,
    slot,
    snapshots,
    stopped_for,
    with_shop,
)
from tests.harness.standbys import Kind, copy_of, disk_copy_of, server_of
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

# --- the slot --------------------------------------------------------------------------------


def test_a_slot_moved_beyond_the_lake_is_resnapshotted(lake: Path, make_daemon: MakeDaemon) -> None:
    """An older copy of the lake looks the same, so only if the config allows it."""
    with server_of(15) as server:
        shop = with_shop(server)
        daemon = make_daemon(config(shop, lake, source_extra='lake_lost = "resnapshot"'))
        daemon.start_ready()
        assert daemon.sigterm() == 0
        shop.execute(
            "DELETE FROM orders WHERE id <= 10",
            f"SELECT pg_replication_slot_advance('{SLOT}', pg_current_wal_lsn())",
            "UPDATE orders SET note = 'seen' WHERE id > 90",
        )
        daemon.start_ready()
        assert_equal(shop, lake)
        [given_up] = daemon.events("source.lake_lost")
        assert "another client moved or re-created the slot" in given_up["reason"]
        assert given_up["reason"] in {row["reason"] for row in registry(lake)}
        assert snapshots(lake) == 2
        daemon.close()


@pytest.mark.thorough
def test_an_idle_slot_invalidated_by_the_server_is_resnapshotted(
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


@pytest.mark.thorough
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
    """Apply the remedy, so that all tables are re-read."""
    _, _, statement = failed["remedy"].partition("and then ")
    shop.execute(statement)


def behind(failed: dict[str, Any]) -> tuple[Lsn, Lsn]:
    """The positions of the lake and of the server, as in the error."""
    assert "restored from an older backup" in failed["reason"]
    _, _, told = failed["reason"].partition("the lake ends at ")
    words = told.replace(",", " ").replace(":", " ").split()
    return Lsn.parse(words[0]), Lsn.parse(words[5])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["plain", "recovery"])
def test_a_server_restored_from_a_backup_is_recognized(
    lake: Path, make_daemon: MakeDaemon, kind: Kind
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
            other = shop_on(restored)
            ended = "SELECT NOT pg_is_in_recovery()"
            await_until(lambda: other.value(ended), LIMIT_S, "the recovery to end")
            other.execute("INSERT INTO orders VALUES (2000, 'after it')")
            daemon.write_config(config(other, lake))
            daemon.start()
            failed = stopped_for(daemon)
            ours, theirs = behind(failed)
            assert ours > theirs
            assert daemon.sigterm() == 0
            move_on(other, failed)
            daemon.start_ready()
            assert_equal(other, lake)
            assert loss(daemon) in {row["reason"] for row in registry(lake)}
            assert snapshots(lake) == 2
            daemon.close()


@pytest.mark.thorough
def test_a_disk_copy_with_its_slot_is_recognized(lake: Path, make_daemon: MakeDaemon) -> None:
    """I6: by the next check it may be ahead of the lake, on the same timeline."""
    with server_of(15) as server:
        shop = with_shop(server)
        daemon = make_daemon(config(shop, lake))
        daemon.start_ready()
        assert daemon.sigterm() == 0
        server.stop()
        with disk_copy_of(server) as restored:
            server.start()
            daemon.start_ready()
            shop.execute("SELECT pg_switch_wal()", "DELETE FROM orders WHERE id <= 10")
            assert_equal(shop, lake)
            assert daemon.sigterm() == 0
            server.stop()
            restored.start()
            other = shop_on(restored)
            daemon.write_config(config(other, lake))
            daemon.start()
            stopped_for(daemon)
            assert daemon.sigterm() == 0
            other.execute(
                "UPDATE orders SET note = 'after it' WHERE id > 90",
                "SELECT pg_switch_wal()",
                "SELECT pg_logical_emit_message(false, '', '')",
                "SELECT pg_switch_wal()",
                "UPDATE orders SET note = 'later' WHERE id > 95",
            )
            assert slot(other, "wal_status") in {"reserved", "extended"}
            daemon.start_ready()
            assert_equal(other, lake)
            assert "restored from an older backup" in loss(daemon)
            assert snapshots(lake) == 2
            daemon.close()


@pytest.mark.thorough
def test_another_server_that_is_ahead_is_reported_by_identifier(
    lake: Path, make_daemon: MakeDaemon
) -> None:
    with server_of(15) as first, server_of(15) as second:
        daemon = make_daemon(config(with_shop(first), lake))
        daemon.start_ready()
        assert daemon.sigterm() == 0
        other = with_shop(second)
        other.execute(
            "SELECT pg_switch_wal()", "UPDATE orders SET note = 'of the second' WHERE id < 50"
        )
        daemon.write_config(config(other, lake))
        daemon.start_ready()
        assert_equal(other, lake)
        assert "this server (system identifier" in loss(daemon)
        assert snapshots(lake) == 2
        daemon.close()


@pytest.mark.thorough
def test_another_server_at_the_same_address_is_reported(
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
        assert "or it is another server" in loss(daemon)
        assert snapshots(lake) == 2
        daemon.close()
