"""Backlogs drained through the SQL functions, with crashes at random commits in the middle."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr

from ingestd.capture.settings import WalSettings
from ingestd.capture.wal.connector import WalFactory
from ingestd.run.epoch import EpochPolicy
from ingestd.run.pipeline import Pipeline, PipelinePolicy
from ingestd.sink.lake import DeltaLake
from tests.harness.compare import assert_change_log_is_sound, assert_lake_equals_source, epochs
from tests.harness.workload import Workload
from tests.unit.run.fixtures import watch

if TYPE_CHECKING:
    from pathlib import Path

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


def make_pipeline(database: Database, lake: DeltaLake) -> Pipeline:
    settings = WalSettings(
        kind="wal",
        dsn=SecretStr(database.dsn),
        tables=["public.*"],
        slot=database.name,
        publication=database.name,
    )
    # However little there is behind, it is drained before streaming begins.
    factory = WalFactory(catch_up_above_bytes=-1)
    capture = factory.create("shop", settings, memory_bytes=64 << 20).capture()
    small_epochs = PipelinePolicy(EpochPolicy(max_delay_s=0.05, max_bytes=20_000))
    return Pipeline(capture, lake, small_epochs, watch())


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", [7])
async def test_exactly_once_while_backlogs_are_drained(
    workload_database: Database, lake: Path, seed: int
) -> None:
    """I2, I3, I4, I6: each start drains what was written meanwhile, and most starts crash."""
    rng = random.Random(seed)
    database, crashed = workload_database, 0
    for number in range(CRASHES):
        await asyncio.to_thread(_write, database, seed + number)
        sink = DeltaLake(str(lake), "shop", before_commit=Crashes(rng.randint(1, 30)))
        running = asyncio.create_task(make_pipeline(database, sink).run(asyncio.Event()))
        done, _ = await asyncio.wait([running], timeout=rng.uniform(1.0, 4.0))
        running.cancel()  # as good as a kill, where no commit crashed
        await asyncio.gather(running, return_exceptions=True)
        for task in done:
            assert isinstance(task.exception(), CrashError), task.exception()
            crashed += 1
    await asyncio.to_thread(_write, database, seed + CRASHES)
    stop = asyncio.Event()
    last = asyncio.create_task(make_pipeline(database, DeltaLake(str(lake), "shop")).run(stop))
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
