"""A new daemon takes over from an old one, as in an update, while writers and delivery continue.

The gap in delivery is printed (`pytest -s`): a figure, which depends on the machine's load.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

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
BESIDE_S = 5.0
LIMIT_S = 120.0


class Replacement:
    """An old daemon that delivers under a workload, and a new one that will replace it."""

    def __init__(self, database: Database, lake: Path, make_daemon: MakeDaemon) -> None:
        self.database = database
        self.lake = lake
        self.slot = f"ingestd_{database.name}"
        config = wal_config(
            lake=lake,
            dsn=database.dsn,
            source_extra=f'slot = "{self.slot}"\npublication = "{self.slot}"',
        )
        self.old, self.new = make_daemon(config, "old"), make_daemon(config, "new")
        self.workload = Workload(
            database.dsn, seed=7, transactions=1_000_000, limit_s=400, pause_s=0.02
        )

    def deliver(self) -> None:
        """Wait until the old one has delivered what is written now."""
        self.old.start_ready(LIMIT_S)
        seen = len(epochs(self.lake))
        await_until(lambda: len(epochs(self.lake)) > seen + 2, LIMIT_S, self.old.tail)

    def await_delivery_by_new(self) -> float:
        """Wait for a durable epoch of the new one; return the gap between the two, in s."""
        await_until(lambda: self.new.events("epoch.committed"), LIMIT_S, self.new.tail)
        times = {row["epoch"]: row["committed_at"] for row in epochs(self.lake)}
        first = committed_by(self.new)[0]
        return float((times[first] - times[first - 1]).total_seconds())

    def assert_exact(self) -> None:
        """Nothing was lost or doubled, and the two never took turns (I3, I5)."""
        self.workload.stop()
        assert_lake_equals_source(self.database, self.lake, SOURCE, slot=self.slot)
        assert_change_log_is_sound(self.database, self.lake)
        assert max(committed_by(self.old)) < min(committed_by(self.new))
        assert self.workload.committed > 50


def committed_by(daemon: Daemon) -> list[int]:
    return [event["epoch"] for event in daemon.events("epoch.committed")]


@pytest.fixture
def replacement(workload_database: Database, lake: Path, make_daemon: MakeDaemon) -> Replacement:
    return Replacement(workload_database, lake, make_daemon)


def test_a_daemon_that_follows_one_that_ended_delivers_soon(replacement: Replacement) -> None:
    """I3, I5: SIGTERM, then the new one, as a StatefulSet does it."""
    with replacement.workload:
        replacement.deliver()
        assert replacement.old.sigterm() == 0
        replacement.new.start()
        gap_s = replacement.await_delivery_by_new()
        replacement.assert_exact()
    print(f"gap in delivery: {gap_s:.1f} s")  # noqa: T201


@pytest.mark.thorough
def test_a_daemon_started_before_the_old_one_ends_takes_over(
    replacement: Replacement,
) -> None:
    """I3, I5: the new one runs 5 s alongside the old one, and writes nothing meanwhile."""
    with replacement.workload, ThreadPoolExecutor(1) as pool:
        replacement.deliver()
        began = time.monotonic()
        replacement.new.start()
        await_until(
            lambda: (
                replacement.new.events("source.failed") and time.monotonic() >= began + BESIDE_S
            ),
            LIMIT_S,
            replacement.new.tail,
        )
        assert "another" in replacement.new.events("source.failed")[0]["reason"]
        assert committed_by(replacement.new) == []
        ending = pool.submit(replacement.old.sigterm)
        gap_s = replacement.await_delivery_by_new()
        assert ending.result() == 0
        replacement.assert_exact()
    print(f"gap in delivery: {gap_s:.1f} s")  # noqa: T201
