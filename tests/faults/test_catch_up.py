"""Backlogs drained through the SQL functions, with crashes and SIGKILLs in the middle."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from ingestd.lake.delta_lake import DeltaLake
from ingestd.pipeline.filling_epoch import EpochPolicy
from ingestd.pipeline.pipeline import Pipeline
from ingestd.pipeline.policy import PipelinePolicy
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.connector import WalFactory
from tests.faults.test_kill import (
    FAST_EPOCHS,
    SOURCE,
    Auditor,
    await_epoch_after,
    run_for,
)
from tests.harness.compare import assert_change_log_is_sound, assert_lake_equals_source, epochs
from tests.harness.config import wal_config
from tests.harness.workload import Workload
from tests.unit.pipeline.fixtures import watch

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

CRASHES = 8
LIMIT_S = 60


class CrashError(Exception):
    """The process dies here."""


class Crashes:
    """Crashes before the n-th commit."""

    def __init__(self, after: int) -> None:
        self._left = after

    def __call__(self, step: str) -> None:
        self._left -= 1
        if self._left < 0:
            raise CrashError(step)


def make_pipeline(database: Database, lake: DeltaLake, slots: int) -> Pipeline:
    settings = WalSettings.model_validate(
        {
            "kind": "wal",
            "dsn": database.dsn,
            "tables": ["public.*"],
            "slot": database.name,
            "publication": database.name,
            "catch_up_slots": slots,
            "catch_up_part": "50kB",
        }
    )
    # However little there is behind, it is drained before streaming begins.
    factory = WalFactory(catch_up_above_bytes=-1)
    capture = factory.create("shop", settings, memory_bytes=64 << 20).capture()
    small_epochs = PipelinePolicy(EpochPolicy(max_delay_s=0.05, max_bytes=20_000))
    return Pipeline(capture, lake, small_epochs, watch())


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "slots"), [(7, 3)])
async def test_exactly_once_while_backlogs_are_drained(
    workload_database: Database, lake: Path, seed: int, slots: int
) -> None:
    """I2, I3, I4, I6: each start drains what was written meanwhile, and most starts crash."""
    rng = random.Random(seed)
    database, crashed = workload_database, 0
    for number in range(CRASHES):
        await asyncio.to_thread(_write, database, seed + number)
        sink = DeltaLake(str(lake), "shop", before_commit=Crashes(rng.randint(1, 30)))
        running = asyncio.create_task(make_pipeline(database, sink, slots).run(asyncio.Event()))
        done, _ = await asyncio.wait([running], timeout=rng.uniform(1.0, 4.0))
        running.cancel()  # as good as a kill, where no commit crashed
        await asyncio.gather(running, return_exceptions=True)
        for task in done:
            assert isinstance(task.exception(), CrashError), task.exception()
            crashed += 1
    await asyncio.to_thread(_write, database, seed + CRASHES)
    stop = asyncio.Event()
    last = asyncio.create_task(
        make_pipeline(database, DeltaLake(str(lake), "shop"), slots).run(stop)
    )
    try:
        await asyncio.to_thread(
            assert_lake_equals_source, database, lake, slot=database.name, limit_s=LIMIT_S
        )
    finally:
        stop.set()
        await last
    assert_change_log_is_sound(database, lake)
    assert len(epochs(lake)) > CRASHES // 2  # a backlog is an epoch or two
    assert crashed > 1


def _write(database: Database, seed: int) -> None:
    with Workload(database.dsn, seed=seed, transactions=150, limit_s=30) as workload:
        workload.join()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seed", "kills"),
    [(11, 3), pytest.param(12, 60, marks=[pytest.mark.long, pytest.mark.timeout(3000)])],
)
def test_exactly_once_through_sigkills_while_draining_backlogs(
    workload_database: Database, make_daemon: MakeDaemon, lake: Path, seed: int, kills: int
) -> None:
    """I1, I2, I3: with three slots and small parts, while the source is written to."""
    rng = random.Random(seed)
    database = workload_database
    slot = f"ingestd_{SOURCE}_{database.name}"
    packed = 'catch_up_above = "0"\ncatch_up_slots = 3\ncatch_up_part = "30kB"'
    config = wal_config(
        lake=lake,
        dsn=database.dsn,
        max_delay=FAST_EPOCHS,
        source_extra=f'slot = "{slot}"\npublication = "{slot}"\n{packed}',
    )
    daemon = make_daemon(config)
    _write(database, seed)
    daemon.start_ready()
    daemon.sigkill()
    with Auditor(database, lake) as auditor:
        for number in range(kills):
            _write(database, seed + number + 1)
            seen = len(epochs(lake))
            daemon.start()
            with Workload(database.dsn, seed=seed - number, transactions=50, limit_s=30):
                if number % 3:  # in the drain, or in what follows
                    await_epoch_after(seen, lake, daemon)
                run_for(rng.uniform(0.0, 0.5))
                daemon.sigkill()
            auditor.look()
        daemon.start_ready()
        assert_lake_equals_source(database, lake, SOURCE, slot=slot)
        auditor.look()
    assert auditor.early == []
    assert_change_log_is_sound(database, lake)
    assert daemon.sigterm() == 0
