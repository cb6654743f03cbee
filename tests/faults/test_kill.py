"""SIGKILL at random instants under load: nothing lost, nothing doubled, nothing confirmed early."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from ingestd.lake.layout import Layout
from ingestd.model.lsn import Lsn
from tests.harness.compare import (
    assert_change_log_is_sound,
    assert_lake_equals_source,
    epochs,
)
from tests.harness.config import wal_config
from tests.harness.waiting import await_until
from tests.harness.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

SOURCE = "shop"
# Several epochs a second, so that kills meet every step of a commit.
FAST_EPOCHS = "60ms"


def confirmed_lsn(database: Database) -> Lsn:
    found = database.rows(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s",
        f"ingestd_{SOURCE}_{database.name}",
    )
    return Lsn.parse(found[0][0]) if found and found[0][0] else Lsn(0)


def durable_lsn(lake: Path) -> Lsn | None:
    """The position that the lake holds: of the last epoch, or recorded later while idle."""
    layout = Layout(SOURCE)
    try:
        handle = DeltaTable(str(lake / layout.epochs))
    except TableNotFoundError:
        return None
    version = handle.transaction_version(layout.app_id())
    return None if version is None else Lsn(version)


class Auditor:
    """Watches while the daemon runs that what is confirmed is in the lake (I1)."""

    def __init__(self, database: Database, lake: Path) -> None:
        self._database = database
        self._lake = lake
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._watching: Future[None] | None = None
        self.early: list[str] = []
        self.looks = 0

    def __enter__(self) -> Self:
        self._watching = self._pool.submit(self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        assert self._watching is not None
        self._watching.result()
        self._pool.shutdown()

    def look(self) -> None:
        # The slot first: whatever is durable then is so still when the lake is read.
        confirmed = confirmed_lsn(self._database)
        durable = durable_lsn(self._lake)
        if durable is not None and confirmed > durable:
            self.early.append(f"confirmed {confirmed}, durable {durable}")

    def _watch(self) -> None:
        while not self._stopping.wait(0.05):
            self.look()
            self.looks += 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seed", "kills"), [(20261121, 5), pytest.param(20261121, 15, marks=pytest.mark.thorough)]
)
def test_exactly_once_through_sigkills_at_random_instants(
    workload_database: Database, make_daemon: MakeDaemon, lake: Path, seed: int, kills: int
) -> None:
    """I1, I2, I3, I4, I6: the daemon is killed while it starts, snapshots, streams and commits."""
    rng = random.Random(seed)
    database = workload_database
    slot = f"ingestd_{SOURCE}_{database.name}"
    config = wal_config(
        lake=lake,
        dsn=database.dsn,
        max_delay=FAST_EPOCHS,
        source_extra=f'slot = "{slot}"\npublication = "{slot}"',
    )
    daemon = make_daemon(config)
    workload = Workload(database.dsn, seed=seed, transactions=1_000_000, limit_s=500, pause_s=0.005)
    in_the_middle = 0
    with workload, Auditor(database, lake) as auditor:
        for number in range(kills):
            daemon.start()
            if number % 5 == 0:
                run_for(rng.uniform(0.2, 1.2))  # anywhere, the start and the snapshot included
            else:
                await_epoch_after(len(epochs(lake)), lake, daemon)
                run_for(rng.uniform(0.0, 0.4))
                in_the_middle += 1
            daemon.sigkill()
            auditor.look()
        daemon.start_ready()
        workload.stop()
        assert_lake_equals_source(database, lake, SOURCE, slot=slot)
        auditor.look()
    assert auditor.early == []
    assert auditor.looks > 4 * kills
    assert in_the_middle >= kills * 3 // 5
    assert workload.committed > 34 * kills
    assert_change_log_is_sound(database, lake)
    assert daemon.sigterm() == 0


def await_epoch_after(seen: int, lake: Path, daemon: Daemon) -> None:
    await_until(lambda: len(epochs(lake)) > seen, 60, daemon.tail)


def run_for(seconds: float) -> None:
    """Let the daemon run until a random instant."""
    end = time.monotonic() + seconds
    await_until(lambda: time.monotonic() >= end, seconds + 5, poll_s=0.01)
