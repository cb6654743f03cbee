"""Every failpoint, under a random workload: nothing lost, nothing doubled, nothing confirmed early.

`pytest --seed N` repeats a run's choices (the interleaving of sessions is the server's).
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.failpoints import POINTS, VARIABLE
from ingestd.testing.embedded.daemon import module_environment
from tests.harness.databases import fresh_database
from tests.harness.lives import (
    ANEW,
    DRAINS,
    HELP,
    LATE,
    OWN,
    QUIET,
    USUAL,
    Lives,
    lives_config,
    step_of,
)
from tests.harness.maintaining import order_of
from tests.harness.waiting import await_until
from tests.harness.workload import create_schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.conftest import MakeDaemon

LANES = 2
ANYTIME_SHORT = 4
SIGKILLED = -9
OF_MAINTENANCE = tuple(point for point in POINTS if point.startswith("maintenance."))
OF_SLOTS = tuple(point for point in OWN if step_of(point) in ANEW)
OTHERS = tuple(point for point in OWN if point not in OF_SLOTS)
ANYTIME = tuple(point for point in OTHERS if step_of(point) not in (*LATE, *QUIET, *HELP))
"""Points that a life under a workload reaches for certain, and soon."""
AGAIN = tuple(point for point in USUAL if step_of(point) not in DRAINS)
"""Points that it reaches after a fault as well."""

MakeLives = contextlib.AbstractContextManager[Lives]


@pytest.fixture
def make_lives(
    postgres: PostgresServer, make_daemon: MakeDaemon, tmp_path: Path
) -> Callable[[int, int], MakeLives]:
    @contextlib.contextmanager
    def make(seed: int, number: int) -> Iterator[Lives]:
        lake = tmp_path / f"lake_{number}"
        with fresh_database(postgres) as database:
            create_schema(database.dsn)
            daemon = make_daemon(lives_config(database, lake), name=f"daemon_{number}")
            try:
                yield Lives(database, lake, daemon, seed)
            finally:
                daemon.close()

    return make


def one_of_each_kind(rng: random.Random) -> list[str]:
    """Choose a few points that a workload reaches soon, and one of each rarer step."""
    rare = [p for p in OTHERS if p not in ANYTIME]
    steps = sorted({step_of(point) for point in rare})
    chosen = [rng.choice([point for point in rare if step_of(point) == step]) for step in steps]
    return rng.sample(ANYTIME, ANYTIME_SHORT) + chosen


@pytest.mark.timeout(600)
@pytest.mark.parametrize("crashes", ["some", pytest.param("all", marks=pytest.mark.long)])
def test_crashes_at_points_lose_and_double_nothing(
    make_lives: Callable[[int, int], MakeLives], seed: int, crashes: str
) -> None:
    """I1 to I4, I6: a crash at each point, many after an error at another; all slow at last.

    The short form crashes at some of them, and has all of them slow.
    """
    rng = random.Random(seed)
    is_whole = crashes == "all"
    lanes = LANES if is_whole else 1
    chosen = rng.sample(OTHERS, len(OTHERS)) if is_whole else one_of_each_kind(rng)
    # A checkpoint comes sooner when there are many commits.
    points = sorted(chosen, key=lambda p: step_of(p) in LATE)
    errors = rng.sample(ANYTIME, len(ANYTIME))
    in_maintenance = OF_MAINTENANCE if is_whole else rng.sample(OF_MAINTENANCE, 1)

    def lane(number: int) -> set[tuple[str, str]]:
        failing = iter(errors[number::lanes])
        with make_lives(seed + number, number) as lives:
            lives.load()
            for point in points[number::lanes]:
                lives.crash(point, first=next(failing, "") if point in AGAIN else "")
            lives.crawl(ANYTIME[number::lanes])
            if number == 0:
                maintained = maintain_with_failpoints(lives, in_maintenance)
                lives.reached.update(maintained)
            assert len(lives.compare()) >= 6
            assert lives.daemon.sigterm() == 0
            return lives.reached

    with ThreadPoolExecutor(lanes) as pool:
        reached = set().union(*pool.map(lane, range(lanes)))
    crashed = {point for point, action in reached if action == "crash"}
    assert crashed == {*points, *in_maintenance}
    assert not is_whole or crashed == {*OTHERS, *OF_MAINTENANCE}
    failed = {point for point, action in reached if action == "error"}
    assert failed >= set(in_maintenance)
    again = len({*points} & {*AGAIN})
    assert len(failed) - len(in_maintenance) >= again * 3 // 4
    assert {point for point, action in reached if action == "delay"} >= {*ANYTIME, *OF_MAINTENANCE}


@pytest.mark.timeout(600)
def test_a_slot_that_is_made_is_made_once(
    make_lives: Callable[[int, int], MakeLives], seed: int
) -> None:
    """I1, I6: crashes and faults around the slot's making, the first time and when it was lost."""
    before, after = OF_SLOTS
    with make_lives(seed, 0) as lives:
        lives.crash(before)
        lives.crash(after)
        lives.compare()
        assert lives.daemon.sigterm() == 0  # else what is committed of an epoch stays so
        lives.fail_twice(before, after)
        lives.compare()
        assert lives.daemon.sigterm() == 0
        assert len(lives.reached) == 2 * len(OF_SLOTS)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("action", ["crash", "error", "delay:0.3"])
def test_every_point_on_its_own(
    make_lives: Callable[[int, int], MakeLives], seed: int, action: str
) -> None:
    """The complete matrix; compared after every third point."""
    with make_lives(seed, 0) as lives:
        lives.load()
        for number, point in enumerate(random.Random(seed).sample(OTHERS, len(OTHERS))):
            if action == "crash":
                lives.crash(point)
            else:
                lives.endure(point, action)
            if number % 3 == 2:
                lives.compare()
                lives.daemon.sigkill()
        lives.compare()
        assert {point for point, _ in lives.reached} == set(OTHERS)


# --- maintenance, in its own process ---------------------------------------------------------


def maintain_with_failpoints(lives: Lives, points: Sequence[str]) -> set[tuple[str, str]]:
    """Join files while the daemon commits: crashes, faults and delays, each on a table of its own.

    Crashes and faults at `points`, delays at all. Gives what acted.
    """
    lives.start()
    lives.daemon.await_ready()
    reached = set()
    with lives.writing():
        for point in points:
            code, lines, said = await_maintained(lives.lake, "public.accounts", [(point, "crash")])
            assert code == SIGKILLED, (point, lines, said)
            reached.update(said)
        for point in points:
            code, lines, said = await_maintained(lives.lake, "public.documents", [(point, "error")])
            assert (code, lines[0]["passes"]) == (0, True), (point, lines, said)
            reached.update(said)
        slow = [(point, "delay:0.1@1+") for point in OF_MAINTENANCE]
        code, lines, said = await_maintained(lives.lake, "public.order_lines", slow)
        assert code == 0
        assert lines[0]["joined_files"] > 1
        reached.update(said)
    return reached


def await_maintained(
    lake: Path, table: str, entries: Sequence[tuple[str, str]]
) -> tuple[int, list[dict[str, Any]], list[tuple[str, str]]]:
    """Run maintenance until all points were reached: at times there is nothing to compact.

    The daemon may have joined the files just before, or one of them is larger than all others.
    """

    def tried() -> tuple[int, list[dict[str, Any]], list[tuple[str, str]]] | None:
        code, lines, said = maintain(lake, table, entries)
        if {point for point, _ in said} == {point for point, _ in entries}:
            return code, lines, said
        assert code == 0, (entries, lines, said)
        return None

    return await_until(tried, 60, f"{entries} to be reached", poll_s=0.5)


def maintain(
    lake: Path, table: str, entries: Sequence[tuple[str, str]]
) -> tuple[int, list[dict[str, Any]], list[tuple[str, str]]]:
    """Run maintenance of a table; return its exit code, its reports, and the points that acted."""
    armed = ",".join(f"{point}={action}" for point, action in entries)
    with subprocess.Popen(
        [sys.executable, "-m", "ingestd.lake.maintenance.process"],
        env={**module_environment(), VARIABLE: armed},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None  # it ends when this is closed
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(order_of(lake, only=[table]))
        process.stdin.flush()
        lines = [line for line in map(json.loads, process.stdout) if "begins" not in line]
        words = [line.split() for line in process.stderr.read().splitlines()]
        code = process.wait()
    said = [(word[1], word[2]) for word in words if word and word[0] == "failpoint.reached"]
    return code, lines, said
