"""A network with every kind of fault between the daemon and its source; then all is equal."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.harness.compare import assert_change_log_is_sound, assert_lake_equals_source
from tests.harness.config import wal_config
from tests.harness.flaky_network import STREAM, FlakyNetwork
from tests.harness.waiting import await_until
from tests.harness.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 120.0
NOTICED_S = 30.0
IMPATIENT = (sys.executable, "-m", "tests.harness.impatient")
CLAIM, LAG, DRAINING = b"tcp_keepalives_count", b"wal_status", b"get_binary_changes"
"""What the connection that holds the claim has sent, the one for lag, and one that drains."""
SENDER_TIMEOUT = "-c wal_sender_timeout=3s"
"""For the slot to be free again soon whose stream the server still believes in."""
BEHIND = """
INSERT INTO documents SELECT i, repeat('t', 40), repeat('x', 400), 0, NULL
  FROM generate_series(1000, 4000) i ON CONFLICT DO NOTHING"""


@pytest.fixture
def network(workload_database: Database) -> Iterator[FlakyNetwork]:
    with FlakyNetwork(workload_database.server.port) as running:
        yield running


@pytest.fixture
def daemon(
    workload_database: Database, network: FlakyNetwork, make_daemon: MakeDaemon, lake: Path
) -> Daemon:
    """Of little patience, through the network; backlogs of a megabyte are drained."""
    slot = slot_of(workload_database)
    made = make_daemon(
        wal_config(
            lake=lake,
            dsn=network.dsn(workload_database.dsn, options=SENDER_TIMEOUT),
            max_delay="100ms",
            source_extra=f'slot = "{slot}"\npublication = "{slot}"\ncatch_up_above = "1MB"\n'
            'catch_up_part = "2MB"\nsnapshot_chunked_above = "100KB"\nsnapshot_chunk = "64KB"',
        )
    )
    made.program = IMPATIENT
    return made


def slot_of(database: Database) -> str:
    return f"ingestd_shop_{database.name}"


def epochs_of(daemon: Daemon) -> int:
    return len(daemon.events("epoch.committed"))


def await_epoch(daemon: Daemon) -> None:
    """Wait for one that closes from now on; the workload continues."""
    before = epochs_of(daemon)
    await_until(lambda: epochs_of(daemon) > before, LIMIT_S, daemon.tail)


def stay(seconds: float) -> None:
    """Apply a fault for a time, which is its strength."""
    end = time.monotonic() + seconds
    await_until(lambda: time.monotonic() >= end, seconds + 5, poll_s=0.01)


def slow(network: FlakyNetwork) -> None:
    network.slow_down(20_000)


def split(network: FlakyNetwork) -> None:
    network.split(seed=1, most=9)


FAULTS: tuple[Callable[[FlakyNetwork], object], ...] = (
    FlakyNetwork.reset,
    lambda network: network.reset(STREAM),
    FlakyNetwork.stall,
    lambda network: network.stall(STREAM),
    FlakyNetwork.blackhole,
    lambda network: network.blackhole(CLAIM),
    slow,
    split,
)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "faults",
    [
        2,
        pytest.param(4, marks=pytest.mark.long),
        pytest.param(100, marks=pytest.mark.long),
    ],
)
def test_exactly_once_over_a_network_at_fault(
    workload_database: Database,
    network: FlakyNetwork,
    daemon: Daemon,
    lake: Path,
    *,
    faults: int,
    seed: int,
) -> None:
    """I1, I2, I3, I6: snapshot, stream and backlog, each with its connections cut and held up."""
    rng = random.Random(seed)
    database = workload_database
    database.execute(BEHIND)
    workload = Workload(database.dsn, seed=seed, transactions=10**6, limit_s=900, pause_s=0.01)
    with workload:
        network.slow_down(500_000)
        daemon.start()
        await_until(lambda: network.accepted > 3, LIMIT_S, daemon.tail)
        stay(rng.uniform(0, 0.5))
        network.reset()  # somewhere in the start or the snapshot
        network.heal()
        daemon.await_ready(LIMIT_S)
        for _ in range(faults):
            rng.choice(FAULTS)(network)
            stay(rng.uniform(0, 1))
            network.heal()
            await_epoch(daemon)
        daemon.sigkill()
        database.execute(BEHIND.replace("1000, 4000", "30000, 35000"))
        network.slow_down(1_000_000)
        daemon.start()
        await_until(lambda: network.reset(DRAINING), LIMIT_S, daemon.tail)
        network.heal()
        daemon.await_ready(LIMIT_S)
        workload.stop()
        assert_lake_equals_source(database, lake, slot=slot_of(database), limit_s=LIMIT_S)
    assert_change_log_is_sound(database, lake)
    assert workload.committed > 50
    assert {fault["state"] for fault in daemon.events("source.failed")} == {"backing_off"}
    assert daemon.sigterm() == 0


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("patience", ["little", pytest.param("usual", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "saw",
    [
        pytest.param(b"", id="all"),
        pytest.param(STREAM, id="stream", marks=pytest.mark.long),
        pytest.param(CLAIM, id="claim", marks=pytest.mark.long),
        pytest.param(LAG, id="claim and lag", marks=pytest.mark.long),
    ],
)
def test_a_silent_peer_is_detected_in_time_and_recovered_from(
    workload_database: Database,
    network: FlakyNetwork,
    daemon: Daemon,
    lake: Path,
    *,
    saw: bytes,
    patience: str,
) -> None:
    database = workload_database
    if patience != "little":
        daemon.program = (sys.executable, "-m", "ingestd")
    daemon.start_ready(LIMIT_S)
    await_until(lambda: network.count(LAG), LIMIT_S, daemon.tail)
    began = time.monotonic()
    assert network.blackhole(saw) > 0
    database.execute("INSERT INTO visits VALUES (1001, NULL, NULL)")
    await_until(lambda: daemon.events("source.failed"), NOTICED_S, daemon.tail)
    assert time.monotonic() - began < NOTICED_S
    [fault] = daemon.events("source.failed")[:1]
    assert fault["state"] == "backing_off"
    assert "no answer arrives" in fault["reason"]
    network.heal()
    daemon.await_ready(LIMIT_S)
    database.execute("INSERT INTO visits VALUES (1002, NULL, NULL)")
    assert_lake_equals_source(database, lake, slot=slot_of(database), limit_s=LIMIT_S)
    assert_change_log_is_sound(database, lake)
    assert daemon.sigterm() == 0


@contextlib.contextmanager
def swallowed(network: FlakyNetwork) -> Iterator[None]:
    network.blackhole()
    try:
        yield
    finally:
        network.heal()


def test_a_stop_does_not_wait_for_a_silent_peer(network: FlakyNetwork, daemon: Daemon) -> None:
    daemon.start_ready(LIMIT_S)
    with swallowed(network):
        assert daemon.sigterm() == 0
