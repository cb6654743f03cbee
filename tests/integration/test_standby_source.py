"""A standby as the source: from PostgreSQL 16 on it decodes; before, it is refused."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from ingestd import cli
from ingestd.lake.delta_lake import DeltaLake
from ingestd.model.errors import TransientError
from ingestd.model.lsn import ZERO, Lsn
from ingestd.pipeline.filling_epoch import EpochPolicy
from ingestd.pipeline.pipeline import Pipeline
from ingestd.pipeline.policy import PipelinePolicy
from ingestd.postgres.connection.liveness import LivenessPolicy
from ingestd.postgres.connection.session import connect
from ingestd.postgres.connection.wal_position import insert_position
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.capture import WalCapture
from ingestd.postgres.wal.drain.drain import DrainPolicy
from ingestd.postgres.wal.preflight import preflight
from ingestd.postgres.wal.slots.create import SlotCreationPolicy, prepare_slot, temporary_point
from ingestd.testing.oracle.comparison import compare_source
from tests.harness.compare import assert_change_log_is_sound, await_listed, epochs
from tests.harness.shop_servers import (
    LIMIT_S,
    SLOT,
    config,
    loss,
    shop_on,
    slot,
    snapshots,
    stopped_for,
    with_shop,
)
from tests.harness.standbys import (
    await_replayed,
    copy_of,
    keep_slots_behind_the_standby,
    promote,
    server_of,
    standby_of,
    start_on_standby,
)
from tests.harness.waiting import await_until
from tests.unit.pipeline.fixtures import watch

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.postgres.wal.slots.create import ExportedPoint
    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

PUBLISH = f"CREATE PUBLICATION {SLOT} FOR TABLE orders WITH (publish_via_partition_root = true)"


def assert_equal(primary: Database, standby: Database, lake: Path) -> None:
    """Once the standby's slot is confirmed up to what the primary has now."""
    primary.execute("SELECT pg_log_standby_snapshot()")
    await_replayed(primary.server, standby.server)
    now = Lsn.parse(primary.value("SELECT pg_current_wal_lsn()::text"))

    def confirmed() -> bool:
        primary.execute("SELECT pg_log_standby_snapshot()")
        at = slot(standby, "confirmed_flush_lsn::text")
        return at is not None and Lsn.parse(at) >= now

    await_until(confirmed, LIMIT_S, f"the slot to be confirmed up to {now}")
    with standby.connect() as connection:
        comparisons = compare_source(connection, str(lake), "shop")
    assert comparisons
    assert all(c.is_equal for c in comparisons), "\n".join(map(str, comparisons))


def assert_verified(daemon: Daemon, primary: Database) -> None:
    """`ingestd verify`, at a point of the standby."""
    command = ["verify", "shop", "--wait", f"{LIMIT_S:g}s", "-c", str(daemon.config_path)]
    with ThreadPoolExecutor(1) as pool:
        verifying = pool.submit(CliRunner().invoke, cli.app, command)

        def has_ended() -> bool:
            primary.execute("SELECT pg_log_standby_snapshot()")
            return verifying.done()

        await_until(has_ended, 2 * LIMIT_S, "ingestd verify", poll_s=0.2)
    found = verifying.result()
    assert found.exit_code == 0, found.output


def test_an_old_standby_is_refused_with_the_remedy(lake: Path, make_daemon: MakeDaemon) -> None:
    with server_of(15) as primary:
        shop = with_shop(primary)
        with copy_of(primary) as standby:
            daemon = make_daemon(config(shop_on(standby), lake))
            daemon.start()
            failed = stopped_for(daemon)
            assert "the server is a standby, and PostgreSQL 15" in failed["reason"]
            assert "set the dsn of the primary" in failed["remedy"]
            lines = asyncio.run(preflight("shop", settings(shop_on(standby))))
            [server] = [line for line in lines if line.subject == "server"]
            assert (server.level, "is a standby" in server.detail) == ("fail", True)
            daemon.close()
            assert shop.slots() == []


def settings(shop: Database, **changes: Any) -> WalSettings:
    named: dict[str, Any] = {
        "dsn": SecretStr(shop.dsn),
        "tables": ["public.*"],
        "slot": SLOT,
        "publication": SLOT,
    }
    return WalSettings(kind="wal", **{**named, **changes})


@pytest.mark.thorough
@pytest.mark.parametrize("major", [16, pytest.param(18, marks=pytest.mark.thorough)])
def test_a_standby_is_captured_and_continues_when_promoted(
    lake: Path, make_daemon: MakeDaemon, major: int
) -> None:
    with server_of(major) as primary:
        shop = with_shop(primary)
        with standby_of(primary) as standby:
            other = shop_on(standby)
            daemon = make_daemon(config(other, lake))
            daemon.start()
            failed = stopped_for(daemon)
            assert "does not exist, and a standby can't create it" in failed["reason"]
            assert failed["remedy"].endswith("-- on the primary")
            shop.execute(failed["remedy"].partition(";")[0])
            await_replayed(primary, standby)
            assert daemon.sigterm() == 0
            start_on_standby(daemon, shop)
            shop.execute(
                "DELETE FROM orders WHERE id <= 10",
                "INSERT INTO orders SELECT i, 'more' FROM generate_series(101, 3000) i",
                "UPDATE orders SET id = id + 10000 WHERE id > 2990",
            )
            assert_equal(shop, other, lake)
            if major == 16:
                assert_verified(daemon, shop)
            assert snapshots(lake) == 1
            assert (len(shop.slots()), len(other.slots())) == (0, 1)
            assert daemon.sigterm() == 0
            standby.restart("immediate")
            shop.execute("UPDATE orders SET note = 'while both were away' WHERE id < 20")
            daemon.start_ready()
            assert_equal(shop, other, lake)
            primary.kill()
            promote(standby)
            other.execute("DELETE FROM orders WHERE id < 50")

            def caught_up() -> bool:
                with other.connect() as connection:
                    found = compare_source(connection, str(lake), "shop")
                return bool(found) and all(c.is_equal for c in found)

            await_until(caught_up, LIMIT_S, lambda: f"the lake to follow\n{daemon.tail()}")
            assert daemon.sigterm() == 0
            other.execute("INSERT INTO orders VALUES (20000, 'of the new primary')")
            daemon.start_ready()
            await_until(caught_up, LIMIT_S, lambda: f"the lake to follow\n{daemon.tail()}")
            await_listed(other, lake)
            assert_change_log_is_sound(other, lake)
            assert not daemon.events("source.slot_lost")
            assert snapshots(lake) == 1
            daemon.close()


@pytest.mark.parametrize("major", [pytest.param(16, marks=pytest.mark.thorough), 18])
async def test_a_backlog_on_a_standby_is_packed_by_the_server(lake: Path, major: int) -> None:
    """Catching up works there too: copies of slots, positions, and the switch to the stream."""
    with server_of(major) as primary:
        shop = with_shop(primary)
        shop.execute(PUBLISH)
        with standby_of(primary) as standby:
            other = shop_on(standby)
            policy = DrainPolicy(-1)
            made = settings(other)
            capture = WalCapture("shop", made, memory_bytes=64 << 20, drain_policy=policy)
            stop = asyncio.Event()
            running = asyncio.create_task(
                Pipeline(
                    capture,
                    DeltaLake(str(lake), "shop"),
                    PipelinePolicy(EpochPolicy(0.1, 64 << 20)),
                    watch(),
                ).run(stop)
            )

            def is_read() -> bool:
                shop.execute("SELECT pg_log_standby_snapshot()")
                return bool(epochs(lake))

            try:
                await asyncio.to_thread(await_until, is_read, LIMIT_S, "orders to be read")
                shop.execute("UPDATE orders SET note = 'second' WHERE id > 50")
                await asyncio.to_thread(assert_equal, shop, other, lake)
            finally:
                stop.set()
                await running
            assert not policy.is_paused


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("major", "told"), [(16, "recovery conflicted with it"), (18, "removed catalog rows")]
)
def test_a_slot_whose_rows_a_standby_lost_says_so(
    lake: Path, make_daemon: MakeDaemon, major: int, told: str
) -> None:
    """Without feedback the primary cleans its catalog as it likes."""
    with server_of(major) as primary:
        shop = with_shop(primary)
        shop.execute(PUBLISH)
        with standby_of(primary, hot_standby_feedback="off") as standby:
            other = shop_on(standby)
            daemon = make_daemon(config(other, lake))
            start_on_standby(daemon, shop)
            assert_equal(shop, other, lake)
            assert daemon.sigterm() == 0

            def lost() -> bool:
                shop.execute(
                    "CREATE TABLE gone (id int)", "DROP TABLE gone", "VACUUM pg_catalog.pg_class"
                )
                await_replayed(primary, standby)
                return bool(slot(other, "wal_status") == "lost")

            await_until(lost, LIMIT_S, "the standby to give up the slot")
            shop.execute("DELETE FROM orders WHERE id <= 10")
            start_on_standby(daemon, shop)
            assert_equal(shop, other, lake)
            assert told in loss(daemon)
            assert "hot_standby_feedback = on" in loss(daemon)
            lines = asyncio.run(preflight("shop", settings(other)))
            [standing] = [line for line in lines if line.subject == "standby"]
            assert (standing.level, "is off" in standing.detail) == ("warn", True)
            daemon.close()


IMPATIENT = LivenessPolicy(silent_s=0.3, again_s=0.3, in_flight_s=0.3, probe_interval_s=0.3)
"""Doubts an answer after a moment."""


@pytest.mark.thorough
async def test_a_slot_advance_that_waits_for_a_standby_is_not_lost() -> None:
    with server_of(18) as primary:
        shop = with_shop(primary)
        with standby_of(primary) as standby:
            await asyncio.to_thread(await_replayed, primary, standby)
            await asyncio.to_thread(keep_slots_behind_the_standby, shop)
            receiver = shop_on(standby).value("SELECT pid FROM pg_stat_wal_receiver")
            shop.execute(
                "SELECT pg_create_logical_replication_slot('s', 'pgoutput', false, false, true)"
            )
            async with await connect(shop.dsn, liveness=IMPATIENT) as connection:
                os.kill(receiver, signal.SIGSTOP)
                try:
                    shop.execute("UPDATE orders SET note = 'new'")
                    moving = asyncio.create_task(
                        connection.execute(
                            "SELECT pg_replication_slot_advance('s', pg_current_wal_lsn())"
                        )
                    )
                    await asyncio.wait([moving], timeout=4)
                    assert not moving.done()
                finally:
                    os.kill(receiver, signal.SIGCONT)
                async with asyncio.timeout(LIMIT_S):
                    await moving


@pytest.mark.thorough
async def test_a_slot_on_the_standby_of_an_idle_primary_says_it_waits() -> None:
    with server_of(18, {"checkpoint_timeout": "1h"}) as primary:
        shop = with_shop(primary)
        with standby_of(primary) as standby:
            await asyncio.to_thread(await_replayed, primary, standby)
            other = shop_on(standby)
            with pytest.raises(TransientError) as waits:
                await temporary_point(settings(other), SlotCreationPolicy(1.0))
            assert waits.value.reason == "standby_waits"
            assert not other.slots()
            patient = SlotCreationPolicy(LIMIT_S, IMPATIENT)
            making = asyncio.create_task(temporary_point(settings(other), patient))
            await asyncio.wait([making], timeout=4)
            assert not making.done()  # the server works on it, although it seems idle
            statement = (waits.value.remedy or "").partition(";")[0]
            async with asyncio.timeout(LIMIT_S):
                while not making.done():
                    await asyncio.to_thread(shop.execute, statement)
                    await asyncio.wait([making], timeout=0.2)
            point = await making
            async with await connect(other.dsn) as connection:
                assert await insert_position(connection) >= point.point
            await point.close()


@pytest.mark.thorough
async def test_a_slot_is_created_in_steps_on_an_idle_primarys_standby() -> None:
    """Its remedy, once for each attempt, is enough: the slot of the first is kept."""
    with server_of(18, {"checkpoint_timeout": "1h"}) as primary:
        shop = with_shop(primary)
        with standby_of(primary) as standby:
            await asyncio.to_thread(await_replayed, primary, standby)
            other = shop_on(standby)
            async with await connect(other.dsn) as control:

                async def attempt() -> ExportedPoint | None:
                    making = asyncio.create_task(
                        prepare_slot(
                            control,
                            settings(other),
                            renew=False,
                            unread_above=ZERO,
                            where="shop",
                            policy=SlotCreationPolicy(3.0),
                        )
                    )
                    await asyncio.sleep(1)
                    written = "UPDATE orders SET note = note || '!'"
                    shop.execute(written, "SELECT pg_log_standby_snapshot()")
                    return await making

                with pytest.raises(TransientError) as waits:
                    await attempt()
                assert waits.value.reason == "standby_waits"
                made = await attempt()
            assert made is not None
            await made.close()
            assert other.slots() == [SLOT]


@pytest.mark.thorough
@pytest.mark.timeout(240)
@pytest.mark.parametrize("major", [16, 18])
def test_tables_are_altered_while_the_slot_is_made_on_a_standby(
    lake: Path, make_daemon: MakeDaemon, major: int
) -> None:
    """By T, which the making waits for first; R is begun meanwhile, and waited for next.

    W begins when R still runs, and ends when the slot is there: what it writes is streamed.
    """
    with server_of(major) as primary:
        shop = with_shop(primary)
        shop.execute("CREATE TABLE visits (id int PRIMARY KEY)", "INSERT INTO visits VALUES (0)")
        shop.execute(f"CREATE PUBLICATION {SLOT} FOR TABLE orders, visits")
        with standby_of(primary) as standby, shop.connect() as t, shop.connect() as r:
            await_replayed(primary, standby)
            other = shop_on(standby)

            def await_found(point: str) -> None:
                """Let the standby see who runs now, until its making of the slot took note."""

                def found() -> bool:
                    shop.execute("SELECT pg_log_standby_snapshot()")
                    text = f"logical decoding found {point}"
                    return text in standby.log_path.read_text(encoding="utf-8")

                await_until(found, LIMIT_S, daemon.tail, poll_s=0.2)

            t.execute("BEGIN; UPDATE orders SET note = 'T' WHERE id = 1")
            daemon = make_daemon(config(other, lake))
            daemon.start()
            await_until(lambda: slot(other, "restart_lsn IS NOT NULL"), LIMIT_S, daemon.tail)
            await_found("initial starting point")
            r.execute("BEGIN; TRUNCATE visits")
            t.execute("SAVEPOINT s; ALTER TABLE orders ADD COLUMN c text DEFAULT 'new'")
            t.execute("RELEASE s; COMMIT")
            await_found("initial consistent point")
            with shop.connect() as w:
                w.execute("BEGIN; INSERT INTO orders (id, note) VALUES (1001, 'W')")
                r.execute("COMMIT")
                await_found("consistent point")
                w.execute("INSERT INTO orders (id, note) VALUES (1002, 'W')")
                w.execute("INSERT INTO visits VALUES (1)")
                w.execute("COMMIT")
            start_on_standby(daemon, shop)
            assert_equal(shop, other, lake)
            assert_change_log_is_sound(other, lake)
            assert not daemon.events("source.failed")
            daemon.close()
