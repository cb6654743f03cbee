"""Two daemons with different slots on one lake: no claim excludes them, the fence decides (I5)."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from ingestd.failpoints import VARIABLE
from tests.faults.test_kill import await_epoch_after
from tests.harness.command_line import run_command
from tests.harness.compare import (
    assert_change_log_is_sound,
    assert_lake_equals_source,
    epochs,
)
from tests.harness.config import wal_config
from tests.harness.pausing import LIMIT_S, assert_nobody_commits_after_a_fence
from tests.harness.waiting import await_until
from tests.harness.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database


@pytest.mark.thorough
@pytest.mark.timeout(400)
def test_one_writer_the_fenced_daemon_stops_and_does_not_fight(
    workload_database: Database, make_daemon: MakeDaemon, lake: Path, seed: int
) -> None:
    database = workload_database
    slots = [f"ingestd_{database.name}_{name}" for name in ("one", "two")]
    one, two = (make_daemon(config(database, lake, slot), slot[-3:]) for slot in slots)
    with Workload(database.dsn, seed=seed, transactions=1_000_000, limit_s=350, pause_s=0.05):
        one.start_ready(LIMIT_S)
        assert_warned(two, slots[0])
        two.start_ready(LIMIT_S)
        assert_says_from_whom(two, slots[0])
        assert_stops(one, slots[1])
        assert states_of(one) == ["stopped"], "it has not stood by before"
        for _ in range(3):
            await_epoch_after(len(epochs(lake)), lake, two)
        assert assert_nobody_commits_after_a_fence(lake) == 2
        one.write_config(config(database, lake, slots[0], max_delay="300ms"))
        assert_stays_stopped_at_a_reload(one)
        assert one.sigterm() == 0
        one.start_ready(LIMIT_S)  # an operator's decision
        assert_stops(two, slots[0])
        await_epoch_after(len(epochs(lake)), lake, one)
    assert_lake_equals_source(database, lake, slot=slots[0], limit_s=LIMIT_S)
    assert_change_log_is_sound(database, lake, torn_epoch=first_epoch_of(two))
    assert assert_nobody_commits_after_a_fence(lake) == 3


@pytest.mark.timeout(400)
def test_i2_killed_between_two_commits_followed_by_another_slot(
    workload_database: Database, make_daemon: MakeDaemon, lake: Path, seed: int
) -> None:
    """The new daemon's snapshot supersedes what the lake has of the torn epoch."""
    database = workload_database
    slots = [f"ingestd_{database.name}_{name}" for name in ("dies", "follows")]
    one = make_daemon(config(database, lake, slots[0]), "dies")
    two = make_daemon(config(database, lake, slots[1]), "follows")
    with Workload(
        database.dsn, seed=seed, transactions=1_000_000, limit_s=350, pause_s=0.05
    ) as workload:
        one.start_ready(LIMIT_S)
        assert one.sigterm() == 0
        # Many transactions in one epoch, of all tables. At its first part others may be durable,
        # but not all six.
        goal = workload.committed + 100
        await_until(lambda: workload.committed >= goal, LIMIT_S, "transactions")
        one.environment[VARIABLE] = "sink.raw_commit.after=crash"
        one.start()
        assert one.await_end(LIMIT_S) == -signal.SIGKILL
        two.start_ready(LIMIT_S)
        await_epoch_after(len(epochs(lake)), lake, two)
    assert_lake_equals_source(database, lake, slot=slots[1], limit_s=LIMIT_S)
    torn = assert_change_log_is_sound(database, lake, torn_epoch=first_epoch_of(two))
    assert torn, "no transaction was over tables whose parts were durable, and others"


@pytest.mark.timeout(400)
def test_a_slot_that_a_reload_leaves_is_named(
    workload_database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    database = workload_database
    old, new = (f"ingestd_{database.name}_{name}" for name in ("old", "new"))
    daemon = make_daemon(config(database, lake, old))
    daemon.start_ready(LIMIT_S)
    daemon.write_config(config(database, lake, new))
    daemon.sighup()
    await_until(lambda: daemon.events("lake.taken_over"), LIMIT_S, daemon.tail)
    assert_says_from_whom(daemon, old)
    assert_lake_equals_source(database, lake, slot=new, limit_s=LIMIT_S)


def config(database: Database, lake: Path, slot: str, **more: str) -> str:
    extra = f'slot = "{slot}"\npublication = "{slot}"'
    return wal_config(lake=lake, dsn=database.dsn, source_extra=extra, **more)


def assert_stays_stopped_at_a_reload(daemon: Daemon) -> None:
    """A reload that changes something else restarts the source: that is no request to take over."""
    before = daemon.events("source.failed")
    daemon.sighup()
    await_until(lambda: len(daemon.events("source.failed")) > len(before), LIMIT_S, daemon.tail)
    assert daemon.events("config.reloaded")[-1]["changed"] == ["shop"]
    again = daemon.events("source.failed")[-1]
    assert (again["state"], again["reason"]) == ("stopped", before[-1]["reason"])
    assert not daemon.events("lake.taken_over")


def first_epoch_of(daemon: Daemon) -> int:
    """Its parts may have rows of the daemon before it, which died or was stopped amid it."""
    return int(daemon.events("epoch.committed")[0]["epoch"])


def assert_warned(daemon: Daemon, other_slot: str) -> None:
    """`check` names the other daemon and both ways to continue; it takes nothing over."""
    found = run_command(daemon.config_path, "check")
    assert found.returncode == 0, found.stdout
    assert f"last written by slot '{other_slot}'" in found.stdout
    assert f"pg_drop_replication_slot('{other_slot}');" in found.stdout


def assert_says_from_whom(daemon: Daemon, other_slot: str) -> None:
    [told] = daemon.events("lake.taken_over")
    assert f"was last written by slot '{other_slot}'" in told["reason"]
    assert told["remedy"].endswith(f"pg_drop_replication_slot('{other_slot}');")


def states_of(daemon: Daemon) -> list[str]:
    return [event["state"] for event in daemon.events("source.failed")]


def assert_stops(daemon: Daemon, other_slot: str) -> None:
    """It names the daemon that has taken over, and requires operator action."""

    def told() -> list[str]:
        stopped = [e for e in daemon.events("source.failed") if e["state"] == "stopped"]
        return [e["reason"] for e in stopped if "taken over" in e["reason"]]

    await_until(told, LIMIT_S, daemon.tail)
    assert f"its claim is slot '{other_slot}'" in told()[0]
    answer = daemon.get("/readyz")
    assert answer is not None
    assert answer[0] == 503
    assert other_slot in answer[1]
