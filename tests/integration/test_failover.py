"""A standby becomes the primary: the stream continues if it can, else all is re-read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.harness.compare import assert_change_log_is_sound
from tests.harness.shop_servers import (
    assert_equal,
    config,
    loss,
    shop_on,
    slot,
    snapshots,
    with_shop,
)
from tests.harness.standbys import (
    await_copied,
    await_replayed,
    copy_of,
    keep_slots_behind_the_standby,
    promote,
    server_of,
    syncing_standby,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon


@pytest.mark.parametrize("is_running", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_promoted_standby_with_the_slot_needs_no_snapshot(
    lake: Path, make_daemon: MakeDaemon, *, is_running: bool
) -> None:
    """I3, I6: with a dsn of both servers not even a restart of the daemon is needed."""
    with server_of(18) as primary:
        shop = with_shop(primary)
        with syncing_standby(primary, shop) as standby:
            keep_slots_behind_the_standby(shop)
            hosts = psycopg.conninfo.make_conninfo(
                shop.dsn,
                host="127.0.0.1,127.0.0.1",
                port=f"{primary.port},{standby.port}",
                target_session_attrs="read-write",
            )
            daemon = make_daemon(config(shop, lake, dsn=hosts))
            daemon.start_ready()
            assert slot(shop, "failover") is True
            await_copied(shop, standby)
            shop.execute(
                "DELETE FROM orders WHERE id <= 10",
                "INSERT INTO orders SELECT i, 'more' FROM generate_series(101, 5000) i",
            )
            assert_equal(shop, lake)
            shop.execute("UPDATE orders SET note = 'just before' WHERE id > 4990")
            if not is_running:
                assert daemon.sigterm() == 0
            await_replayed(primary, standby)
            primary.kill()
            promote(standby)
            other = shop_on(standby)
            other.execute(
                "UPDATE orders SET note = 'after it' WHERE id > 4000",
                "INSERT INTO orders VALUES (9000, 'new')",
            )
            if not is_running:
                daemon.start_ready()
            assert_equal(other, lake)
            assert_change_log_is_sound(other, lake)
            assert not daemon.events("source.slot_lost")
            assert snapshots(lake) == 1
            assert daemon.sigterm() == 0
            other.execute("DELETE FROM orders WHERE id > 4500")
            daemon.start_ready()
            assert_equal(other, lake)
            assert not daemon.events("source.slot_lost")
            daemon.close()


@pytest.mark.thorough
def test_a_lake_ahead_of_the_promoted_standby_is_resnapshotted(
    lake: Path, make_daemon: MakeDaemon
) -> None:
    with server_of(18) as primary:
        shop = with_shop(primary)
        with syncing_standby(primary, shop) as standby:
            daemon = make_daemon(config(shop, lake))
            daemon.start_ready()
            await_copied(shop, standby)
            standby.stop()
            shop.execute("INSERT INTO orders VALUES (777, 'never got there')")
            assert_equal(shop, lake)
            assert daemon.sigterm() == 0
            primary.kill()
            standby.start()
            promote(standby)
            other = shop_on(standby)
            daemon.write_config(config(other, lake))
            # the slot exists: its changes would seem to continue where the lake ends
            assert slot(other, "synced") is True
            other.execute("DELETE FROM orders WHERE id <= 10")
            daemon.start_ready()
            assert_equal(other, lake)
            assert "it has changes that this server never received" in loss(daemon)
            assert snapshots(lake) == 2
            assert slot(other, "synced") is False  # a new one
            daemon.close()


@pytest.mark.thorough
@pytest.mark.parametrize(("major", "told"), [(15, "does not keep slots"), (18, "it has no slot")])
def test_a_promoted_standby_without_the_slot_is_resnapshotted(
    lake: Path, make_daemon: MakeDaemon, major: int, told: str
) -> None:
    with server_of(major) as primary:
        shop = with_shop(primary)
        daemon = make_daemon(config(shop, lake))
        daemon.start_ready()
        with copy_of(primary) as standby:
            shop.execute("DELETE FROM orders WHERE id <= 10")
            assert_equal(shop, lake)
            await_replayed(primary, standby)
            assert daemon.sigterm() == 0
            primary.kill()
            promote(standby)
            other = shop_on(standby)
            other.execute("UPDATE orders SET note = 'after it' WHERE id > 90")
            daemon.write_config(config(other, lake))
            daemon.start_ready()
            assert_equal(other, lake)
            assert "timeline 1, now 2" in loss(daemon)
            assert told in loss(daemon)
            assert snapshots(lake) == 2
            assert daemon.sigterm() == 0
            daemon.start_ready()
            other.execute("DELETE FROM orders WHERE id > 95")
            assert_equal(other, lake)
            assert len(daemon.events("source.slot_lost")) == 1
            daemon.close()
