"""A standby is promoted under writes: no loss, no duplicates, automatic recovery."""

from __future__ import annotations

import contextlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
import pytest
from pydantic import SecretStr

from ingestd.failpoints import VARIABLE
from ingestd.model.errors import TransientError
from ingestd.model.lsn import Lsn
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.capture import WalCapture
from ingestd.postgres.wal.drain.drain import Drain, DrainPolicy
from ingestd.postgres.wal.replication_stream import StreamLimits, open_stream
from ingestd.postgres.wal.slots.advance import SlotAdvance
from tests.harness.compare import assert_change_log_is_sound, assert_lake_equals_source, epochs
from tests.harness.databases import query_server_id
from tests.harness.pausing import paused
from tests.harness.shop_servers import LIMIT_S, SLOT, config, loss, shop_on, slot, stopped_for
from tests.harness.standbys import (
    STANDBY,
    await_copied,
    keep_slots_behind_the_standby,
    needs,
    promote,
    server_of,
    standby_of,
    start_on_standby,
    syncing_standby,
)
from tests.harness.waiting import await_until
from tests.harness.workload import Workload, create_schema

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

PUBLISH = f"CREATE PUBLICATION {SLOT} FOR ALL TABLES WITH (publish_via_partition_root = true)"


def with_workload_tables(server: PostgresServer) -> Database:
    """The database `shop` with the workload's tables; it goes with the server."""
    with server.connect() as connection:
        connection.execute("CREATE DATABASE shop")
    shop = shop_on(server)
    create_schema(shop.dsn)
    return shop


def either(shop: Database, standby: PostgresServer) -> str:
    """A dsn of both servers, for whichever is the primary."""
    return psycopg.conninfo.make_conninfo(
        shop.dsn,
        host="127.0.0.1,127.0.0.1",
        port=f"{shop.server.port},{standby.port}",
        target_session_attrs="read-write",
    )


@contextmanager
def writing(dsn: str, seed: int) -> Iterator[Workload]:
    with Workload(dsn, seed=seed, transactions=10**6, limit_s=300, pause_s=0.01) as workload:
        yield workload


def await_written(workload: Workload, transactions: int) -> None:
    """Wait until so many more are committed."""
    goal = workload.committed + transactions
    await_until(lambda: workload.committed >= goal, LIMIT_S, f"{transactions} transactions")


def await_epochs(daemon: Daemon, lake: Path, count: int = 3) -> None:
    """Wait for so many more; the workload continues."""
    goal = len(epochs(lake)) + count
    await_until(lambda: len(epochs(lake)) >= goal, LIMIT_S, daemon.tail)


def fail_over(primary: PostgresServer, standby: PostgresServer, workload: Workload) -> None:
    """Kill the primary under writes, promote the standby, and let the writers continue there."""
    assert workload.is_running
    primary.kill()
    promote(standby)
    await_written(workload, 60)


@pytest.mark.thorough
@pytest.mark.parametrize("major", [pytest.param(16, marks=pytest.mark.long), 17, 18])
def test_a_captured_standby_is_promoted_under_writes(
    lake: Path, make_daemon: MakeDaemon, major: int, seed: int
) -> None:
    """I1, I2, I3, I6: the slot is the standby's own, the daemon is not even restarted."""
    needs(major)
    with server_of(major) as primary:
        shop = with_workload_tables(primary)
        shop.execute(PUBLISH)
        with (
            standby_of(primary) as standby,
            writing(either(shop, standby), seed) as workload,
        ):
            await_written(workload, 20)
            daemon = make_daemon(config(shop_on(standby), lake))
            start_on_standby(daemon, shop)
            await_epochs(daemon, lake)
            fail_over(primary, standby, workload)
            await_epochs(daemon, lake)
            workload.stop()
            assert_lake_equals_source(shop_on(standby), lake, limit_s=LIMIT_S)
            assert_change_log_is_sound(shop_on(standby), lake)
            assert not daemon.events("source.slot_lost")
            assert daemon.sigterm() == 0


@pytest.mark.parametrize("major", [17, 18])
def test_a_failover_slot_continues_on_the_new_primary(
    lake: Path, make_daemon: MakeDaemon, major: int, seed: int
) -> None:
    """I1, I2, I3, I6: the standby has all that the daemon received, also from a backlog."""
    needs(major)
    with server_of(major) as primary:
        shop = with_workload_tables(primary)
        with (
            syncing_standby(primary, shop) as standby,
            writing(either(shop, standby), seed) as workload,
        ):
            keep_slots_behind_the_standby(shop)
            drains = 'catch_up_above = "0"\ncatch_up_part = "100kB"'
            daemon = make_daemon(config(shop, lake, dsn=either(shop, standby), source_extra=drains))
            daemon.start_ready()
            await_copied(shop, standby)
            assert daemon.sigterm() == 0
            await_written(workload, 60)
            daemon.start_ready()
            await_epochs(daemon, lake)
            fail_over(primary, standby, workload)
            await_epochs(daemon, lake)
            workload.stop()
            other = shop_on(standby)
            assert_lake_equals_source(other, lake, limit_s=LIMIT_S)
            assert_change_log_is_sound(other, lake)
            assert not daemon.events("source.slot_lost")
            assert slot(other, "failover") is True
            assert daemon.sigterm() == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("major", "policy"),
    [
        (17, "resnapshot"),
        (17, "stop"),
        pytest.param(18, "resnapshot", marks=pytest.mark.long),
        (18, "stop"),
    ],
)
def test_a_failover_without_the_slot_is_reported_under_writes(
    lake: Path, make_daemon: MakeDaemon, major: int, policy: str, seed: int
) -> None:
    """I6: the policy is applied; the gap is reported, not skipped."""
    needs(major)
    with server_of(major) as primary:
        shop = with_workload_tables(primary)
        with (
            standby_of(primary) as standby,
            writing(either(shop, standby), seed) as workload,
        ):
            dsn = either(shop, standby)
            lost = f'slot_lost = "{policy}"'
            # So that the primary dies while some tables have an epoch and others have not.
            slow = {VARIABLE: "sink.raw_commit.before=delay:0.1@1+"}
            daemon = make_daemon(config(shop, lake, dsn=dsn, source_extra=lost), "daemon", slow)
            daemon.start_ready()
            await_epochs(daemon, lake)
            fail_over(primary, standby, workload)
            other = shop_on(standby)
            if policy == "stop":
                failed = stopped_for(daemon)
                assert "it has no slot" in failed["reason"]
                seen = len(epochs(lake))
                daemon.write_config(config(shop, lake, dsn=dsn))
                assert daemon.sigterm() == 0
                assert len(epochs(lake)) == seen
                assert slot(other, "slot_name") is None
                daemon.start()
            await_until(lambda: slot(other, "slot_name") == SLOT, LIMIT_S, daemon.tail)
            daemon.await_ready()
            await_written(workload, 20)
            workload.stop()
            assert_lake_equals_source(other, lake, limit_s=LIMIT_S)
            assert_change_log_is_sound(other, lake)
            assert "timeline 1, now 2" in loss(daemon)
            assert "it has no slot" in loss(daemon)
            assert daemon.sigterm() == 0


@pytest.mark.parametrize("major", [17, 18])
async def test_lossless_a_promoted_standby_is_not_the_primary(
    major: int,
) -> None:
    """It never received all that the lake has, and diverged from there on."""
    needs(major)
    with server_of(major) as primary:
        shop = shop_on(primary)
        with primary.connect() as connection:
            connection.execute("CREATE DATABASE shop")
        shop.execute("CREATE TABLE t (id int PRIMARY KEY)", f"{PUBLISH}")
        shop.execute(
            f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput', failover => true)"
        )
        with syncing_standby(primary, shop) as standby:
            shop.execute(f"SELECT pg_replication_slot_advance('{SLOT}', pg_current_wal_lsn())")
            await_copied(shop, standby)
            dsn = either(shop, standby)
            queried_id = await query_server_id(dsn)
            standby.stop()
            shop.execute("INSERT INTO t SELECT generate_series(1, 5000)")
            lake = Lsn.parse(str(shop.value("SELECT pg_current_wal_flush_lsn()::text")))
            primary.kill()
            standby.start()
            promote(standby)
            other = shop_on(standby)
            other.execute("INSERT INTO t SELECT generate_series(100001, 120000)")
            before = slot(other, "confirmed_flush_lsn::text")
            assert Lsn.parse(before) < lake
            policy = DrainPolicy(above_bytes=10_000)
            limits = StreamLimits(limit_bytes=1 << 20, status_interval_s=1.0)
            advance = SlotAdvance(dsn, SLOT, "s", step_bytes=1)
            advance.queried_id = queried_id
            try:
                await advance.advance_to(lake)
                with pytest.raises(TransientError, match="another server"):
                    await advance.settle()
            finally:
                await advance.close()
            with pytest.raises(TransientError, match="another server"):
                await Drain.start(dsn, SLOT, SLOT, policy, 1 << 20, queried_id=queried_id)
            with pytest.raises(TransientError, match="another server"):
                await open_stream(
                    dsn,
                    SLOT,
                    SLOT,
                    lake,
                    lake,
                    queried_id=queried_id,
                    where="source s",
                    limits=limits,
                )
            assert slot(other, "confirmed_flush_lsn::text") == before


@pytest.mark.thorough
@pytest.mark.parametrize("major", [pytest.param(17, marks=pytest.mark.long), 18])
def test_a_failover_in_mid_drain_to_a_lagging_standby(
    lake: Path, make_daemon: MakeDaemon, major: int, seed: int
) -> None:
    """I6: it has the slot, but nothing held the daemon back to what the standby had received."""
    needs(major)
    with server_of(major) as primary:
        shop = with_workload_tables(primary)
        with syncing_standby(primary, shop) as standby:
            dsn = either(shop, standby)
            drains = 'catch_up_above = "0"\ncatch_up_part = "100kB"'
            daemon = make_daemon(config(shop, lake, dsn=dsn, source_extra=drains))
            daemon.start_ready()
            await_copied(shop, standby)
            assert daemon.sigterm() == 0
            standby.stop()
            with writing(dsn, seed) as workload:
                await_written(workload, 400)
                workload.stop()
            daemon.environment[VARIABLE] = "capture.drain.before=delay:0.3@3+"
            daemon.start()
            await_epochs(daemon, lake)
            other = shop_on(standby)
            with paused(daemon):  # with more of the backlog in its hands
                ends_at = Lsn(epochs(lake)[-1]["end_lsn"])
                primary.kill()
                standby.start()
                promote(standby)
                assert Lsn.parse(slot(other, "confirmed_flush_lsn::text")) < ends_at
                # Written here, beyond the end of the lake, so that it looks as if it had been read.
                other.execute("INSERT INTO visits VALUES (1000)")
                other.execute("SELECT pg_switch_wal()", "INSERT INTO visits VALUES (1001)")
            await_until(lambda: daemon.events("source.slot_lost"), LIMIT_S, daemon.tail)
            daemon.await_ready()
            assert_lake_equals_source(other, lake, limit_s=LIMIT_S)
            assert_change_log_is_sound(other, lake)
            assert "this server never received" in loss(daemon)
            assert daemon.sigterm() == 0


@pytest.mark.parametrize("major", [17, 18])
async def test_a_backlog_is_drained_as_far_as_the_standby_has_it(
    major: int,
) -> None:
    """A lake ahead of the standby would not match it once it is the primary.

    The server holds a failover slot back, but not the copies of it that are drained.
    """
    needs(major)
    with server_of(major) as primary:
        shop = shop_on(primary)
        with primary.connect() as connection:
            connection.execute("CREATE DATABASE shop")
        shop.execute("CREATE TABLE t (id int PRIMARY KEY)")
        policy = DrainPolicy(above_bytes=10_000, slots=2, part_bytes=100_000)
        with syncing_standby(primary, shop) as standby:
            keep_slots_behind_the_standby(shop)
            async with capturing(shop, policy) as capture:
                await capture.prepare((await capture.discover({})).tables)
                assert slot(shop, "failover") is True
            shop.execute("INSERT INTO t SELECT generate_series(1, 2000)")
            await_told_of(shop)
            standby.stop()
            shop.execute("INSERT INTO t SELECT generate_series(2001, 4000)")
            found: list[int] = []
            async with (
                capturing(shop, policy) as capture,
                contextlib.aclosing(capture.changes(None)) as chunks,
            ):
                async for chunk in chunks:
                    found += [i for b in chunk.batches for i in b.rows.column("id").to_pylist()]
                    if slot(shop, "active"):
                        break
                assert (policy.drained, found) == (1, list(range(1, 2001)))
                standby.start()
                async for chunk in chunks:
                    found += [i for b in chunk.batches for i in b.rows.column("id").to_pylist()]
                    if found[-1] == 4000:
                        break
            assert found == list(range(1, 4001))


def await_told_of(shop: Database) -> None:
    """Wait until the primary knows that the standby has all that is written now."""
    now = shop.value("SELECT pg_current_wal_flush_lsn()::text")
    query = "SELECT restart_lsn >= %s::pg_lsn FROM pg_replication_slots WHERE slot_name = %s"
    await_until(
        lambda: shop.value(query, now, STANDBY), LIMIT_S, "the standby to tell", poll_s=0.05
    )


@contextlib.asynccontextmanager
async def capturing(shop: Database, policy: DrainPolicy) -> AsyncIterator[WalCapture]:
    settings = WalSettings(
        kind="wal",
        dsn=SecretStr(shop.dsn),
        tables=["public.t"],
        slot=SLOT,
        publication=SLOT,
    )
    capture = WalCapture("shop", settings, memory_bytes=8 << 20, drain_policy=policy)
    try:
        await capture.prepare((await capture.discover({})).tables)
        yield capture
    finally:
        await capture.close()
