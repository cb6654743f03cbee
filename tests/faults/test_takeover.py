"""I11 takeover_bounded: a holder that does not answer loses its claim to a waiting daemon.

``pytest -s -m long tests/faults/test_takeover.py`` does each ten times, and prints the times.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING

import psycopg
import pytest

from ingestd.model.errors import TransientError
from ingestd.postgres.connection.claim import LEASE, release_claim, take_claim
from ingestd.postgres.connection.control_connection import ControlConnection
from ingestd.postgres.connection.session import connect
from tests.faults.test_polling import assert_log_makes_sense, await_equal
from tests.harness.compare import assert_change_log_is_sound, assert_lake_equals_source
from tests.harness.config import polling_config, wal_config
from tests.harness.flaky_network import FlakyNetwork
from tests.harness.pausing import assert_nobody_commits_after_a_fence, let_pass, paused
from tests.harness.polled_workload import CURSORS, KEYS, PolledWorkload, create_tables
from tests.harness.waiting import await_until
from tests.harness.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

    Fault = Callable[[Daemon, FlakyNetwork], contextlib.AbstractContextManager[None]]

LIMIT_S = 120.0
BOUND_S = 30.0
TRIES = 100
TIMES = [
    pytest.param(1, marks=pytest.mark.thorough),
    pytest.param(10, marks=pytest.mark.long),
]


@contextlib.contextmanager
def frozen(holder: Daemon, network: FlakyNetwork) -> Iterator[None]:
    del network
    with paused(holder):
        yield


@contextlib.contextmanager
def killed(holder: Daemon, network: FlakyNetwork) -> Iterator[None]:
    del network
    holder.sigkill()
    yield
    holder.start()


@contextlib.contextmanager
def half_open(holder: Daemon, network: FlakyNetwork) -> Iterator[None]:
    del holder
    assert network.blackhole() > 0
    yield
    network.heal()


def await_epoch(daemon: Daemon) -> None:
    """Wait until it has committed one from now on."""
    before = len(daemon.events("epoch.committed"))
    await_until(
        lambda: len(daemon.events("epoch.committed")) > before, LIMIT_S, daemon.tail, poll_s=0.05
    )


def await_standby(daemon: Daemon) -> None:
    await_until(lambda: stands_by(daemon), LIMIT_S, daemon.tail)


def two_daemons(
    stack: contextlib.ExitStack,
    database: Database,
    make_daemon: MakeDaemon,
    config: Callable[..., str],
) -> tuple[list[FlakyNetwork], list[Daemon]]:
    """Make two daemons of one source, each behind a network of its own."""
    networks = [stack.enter_context(FlakyNetwork(database.server.port)) for _ in range(2)]
    daemons = [
        make_daemon(config(dsn=network.dsn(database.dsn)), f"daemon_{number}")
        for number, network in enumerate(networks)
    ]
    return networks, daemons


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("fault", [frozen, killed, half_open])
def test_takeover_bounded_a_waiting_daemon_delivers(  # noqa: PLR0917
    workload_database: Database,
    make_daemon: MakeDaemon,
    lake: Path,
    seed: int,
    times: int,
    fault: Fault,
) -> None:
    """I11, I1 to I5: no loss or duplicates; a daemon that wakes up commits nothing and says why."""
    database = workload_database
    slot = f"ingestd_{database.name}"
    extra = f'slot = "{slot}"\npublication = "{slot}"'
    workload = Workload(database.dsn, seed=seed, transactions=10**6, limit_s=1700, pause_s=0.02)
    with contextlib.ExitStack() as stack:
        config = partial(wal_config, lake=lake, max_delay="100ms", source_extra=extra)
        networks, daemons = two_daemons(stack, database, make_daemon, config)
        with workload:
            daemons[0].start_ready(LIMIT_S)
            daemons[1].start()
            await_standby(daemons[1])
            took_s = [take_over(daemons, networks, turn, fault) for turn in range(times)]
            workload.stop()
            assert_lake_equals_source(database, lake, slot=slot, limit_s=LIMIT_S)
        assert_change_log_is_sound(database, lake)
        assert_nobody_commits_after_a_fence(lake, may_return=True)
        for daemon in daemons:
            assert daemon.sigterm() == 0
    assert_bounded(took_s, getattr(fault, "__name__", ""))


def take_over(
    daemons: Sequence[Daemon], networks: Sequence[FlakyNetwork], turn: int, fault: Fault
) -> float:
    """Have the one that waits take over; return after how many seconds it delivers."""
    holder, waiting = daemons[turn % 2], daemons[1 - turn % 2]
    failed = len(holder.events("source.failed"))
    with fault(holder, networks[turn % 2]):
        began = time.monotonic()
        await_epoch(waiting)
        took_s = time.monotonic() - began
    await_standby(holder)
    if fault is not killed:
        reasons = [e["reason"] for e in holder.events("source.failed")[failed:]]
        assert any("the claim is lost" in reason for reason in reasons), reasons
    return took_s


def assert_bounded(took_s: Sequence[float], what: str) -> None:
    told = ", ".join(f"{each:.1f}" for each in took_s)
    print(f"takeover, {what}: {told} s")  # noqa: T201
    assert max(took_s) < BOUND_S, told


def stands_by(daemon: Daemon) -> bool:
    """It waits for the claim, and names its holder."""
    answer = daemon.get("/readyz")
    return answer is not None and answer[0] == 503 and "another ingestd" in answer[1]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("fault", [frozen, killed, half_open])
def test_takeover_bounded_a_polled_source_too(  # noqa: PLR0917
    database: Database,
    make_daemon: MakeDaemon,
    lake: Path,
    seed: int,
    times: int,
    fault: Fault,
) -> None:
    """I11, I3: every written version is in the lake once."""
    create_tables(database)
    with contextlib.ExitStack() as stack:
        config = partial(
            polling_config, lake=lake, interval="30ms", max_delay="60ms", extra=CURSORS
        )
        networks, daemons = two_daemons(stack, database, make_daemon, config)
        with PolledWorkload(database.dsn, seed=seed):
            daemons[0].start_ready(LIMIT_S)
            daemons[1].start()
            await_standby(daemons[1])
            took_s = [take_over(daemons, networks, turn, fault) for turn in range(times)]
        await_equal(database, lake)
        assert_change_log_is_sound(database, lake, is_dense=False)
        for table, key in KEYS.items():
            assert_log_makes_sense(lake, table, key)
        assert_nobody_commits_after_a_fence(lake, may_return=True)
        for daemon in daemons:
            assert daemon.sigterm() == 0
    assert_bounded(took_s, f"polled, {getattr(fault, '__name__', '')}")


async def test_one_writer_a_stranger_keeps_no_daemon_from_its_source(
    database: Database, stranger: str
) -> None:
    """Whatever locks it takes: those that it sees, too."""
    theirs = database.server.dsn(database.name, user=stranger)
    first, second = (
        ControlConnection("source a", database.dsn),
        ControlConnection("source a", database.dsn),
    )
    try:
        await first.claim("s", taken="taken", remedy="wait")
        with psycopg.connect(theirs, autocommit=True) as meddler:
            seen = meddler.execute(
                "SELECT classid::int8, objid::int8, objsubid FROM pg_locks"
                " WHERE locktype = 'advisory' AND pid <> pg_backend_pid()"
            ).fetchall()
            assert seen
            with pytest.raises(TransientError) as held:
                await second.claim("s", taken="taken", remedy="wait")
            assert held.value.reason == "claimed"
            assert "pid " in held.value.what
            assert "role postgres" in held.value.what
            assert "from 127.0.0.1" in held.value.what
            assert "application_name 'ingestd'" in held.value.what
            await first.close()
            for high, low, kind in seen:
                if kind == 1:
                    key = (high << 32) | low
                    take = f"SELECT pg_advisory_lock({key - (1 << 64) if key >> 63 else key})"
                else:
                    signed = [n - (1 << 32) if n >> 31 else n for n in (high, low)]
                    take = f"SELECT pg_advisory_lock({signed[0]}, {signed[1]})"
                meddler.execute(take.encode())
            await second.claim("s", taken="taken", remedy="wait")
            await second.health()
    finally:
        await first.close()
        await second.close()


async def test_takeover_bounded_the_server_has_the_limits_of_a_claim(database: Database) -> None:
    control = ControlConnection("source a", database.dsn)
    try:
        await control.claim("s", taken="taken", remedy="wait")
        connection = await control.connection()
        cursor = await connection.execute(
            "SELECT name, setting FROM pg_settings WHERE name = ANY(%s)", (list(LEASE),)
        )
        assert dict(await cursor.fetchall()) == LEASE
    finally:
        await control.close()


@pytest.mark.thorough
async def test_takeover_bounded_despite_an_own_half_open_connection(
    database: Database,
) -> None:
    with FlakyNetwork(database.server.port) as network:
        first = ControlConnection("source a", network.dsn(database.dsn))
        second = ControlConnection("source a", database.dsn)
        try:
            await first.claim("s", taken="taken", remedy="wait")
            network.blackhole()
            began = time.monotonic()
            with pytest.raises(TransientError) as lost:
                await first.hold()
            assert lost.value.reason == "claim_lost"
            assert "no answer arrives" in lost.value.what
            claimed = False
            while not claimed:
                with contextlib.suppress(TransientError):
                    await second.claim("s", taken="taken", remedy="wait")
                    claimed = True
            assert time.monotonic() - began < BOUND_S
        finally:
            await first.close()
            await second.close()


@pytest.mark.thorough
async def test_a_claim_outlasts_a_statement_that_takes_longer(database: Database) -> None:
    control = ControlConnection("source a", database.dsn)
    try:
        await control.claim("s", taken="taken", remedy="wait")
        connection = await control.connection()
        await connection.execute("SELECT pg_sleep(12)")
        let_pass(3)  # the event loop stands still for less than the limit
        await control.health()
    finally:
        await control.close()


@pytest.mark.thorough
@pytest.mark.timeout(120)
async def test_one_writer_who_claims_has_the_lock(database: Database) -> None:
    """Also where the holder lets go in the moment in which another one asks."""
    query = """
        SELECT count(*) FROM pg_locks
         WHERE locktype = 'advisory' AND objsubid = 2 AND pid = pg_backend_pid()
    """
    async with await connect(database.dsn) as first, await connect(database.dsn) as second:

        async def come_and_go() -> None:
            while True:
                await take_claim(first, "s")
                await release_claim(first)

        coming = asyncio.create_task(come_and_go())
        try:
            for _ in range(TRIES):
                if (await take_claim(second, "s")).holders:
                    continue
                row = await (await second.execute(query)).fetchone()
                assert row == (1,)
                await release_claim(second)
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
