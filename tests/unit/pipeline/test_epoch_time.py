"""Epochs are as long as the lake is slow, and no longer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest

from ingestd.model.lsn import ZERO
from ingestd.observe.status import SourceState
from ingestd.pipeline.pipeline import Pipeline
from ingestd.testing.fakes.capture import FakeCapture, FakeDatabase
from ingestd.testing.fakes.sink import MemoryDisk, MemoryEpochWriter, MemoryLake
from tests.unit.pipeline.fixtures import (
    LIMIT_S,
    A,
    lake_rows,
    policy,
    put,
    source_rows,
    until,
    watch,
)


class SlowLake(MemoryLake):
    """Commits epochs only while `is_quick`; `begun`: how many it has begun to commit."""

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__(disk)
        self.is_quick = asyncio.Event()
        self.is_quick.set()
        self.begun = 0

    def make_writer(self, number: int, previous: MemoryEpochWriter | None) -> MemoryEpochWriter:
        lake = self

        class SlowWriter(MemoryEpochWriter):
            async def wait_for_previous(self) -> None:
                lake.begun += 1
                await lake.is_quick.wait()
                await super().wait_for_previous()

        return SlowWriter(self, number, previous)


async def test_epochs_grow_while_the_lake_is_slow_and_shrink_after() -> None:
    """All that arrives while an epoch commits is in the next one."""
    base, disk = FakeDatabase([A]), MemoryDisk()
    lake, watching = SlowLake(disk), watch()
    stop = asyncio.Event()
    pipeline = Pipeline(FakeCapture(base), lake, policy(), watching)
    task = asyncio.create_task(pipeline.run(stop))

    def transactions() -> list[int]:
        return [epoch.summary.transactions for epoch in disk.epochs]

    async def write(first: int, count: int) -> None:
        for key in range(first, first + count):
            base.commit(put(A, key))
            await asyncio.sleep(0)

    try:
        await until(lambda: watching.status.state is SourceState.STREAMING)
        await until(lambda: disk.position == base.current)
        before = len(transactions())
        lake.is_quick.clear()
        begun = lake.begun
        await write(0, 1)
        await until(lambda: lake.begun > begun)
        await write(1, 50)
        received = base.current
        await until(lambda: (watching.status.received_lsn or 0) >= received)
        lake.is_quick.set()
        await until(lambda: disk.position == base.current)
        assert transactions()[before:] == [1, 50]
        await write(100, 1)
        await until(lambda: disk.position == base.current)
        assert transactions()[before:] == [1, 50, 1]
    finally:
        stop.set()
        await asyncio.gather(task, return_exceptions=True)
    assert lake_rows(disk, A) == source_rows(base, A)


@pytest.mark.slow
async def test_idle_positions_are_recorded_at_growing_intervals() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    clock = 1000.0
    stop = asyncio.Event()
    patient = replace(policy(max_delay_s=1.0), idle_interval_s=5.0)
    watching = watch()
    pipeline = Pipeline(
        FakeCapture(base), MemoryLake(disk), patient, watching, monotonic=lambda: clock
    )
    task = asyncio.create_task(pipeline.run(stop))

    def has_come() -> bool:
        return (watching.status.received_lsn or 0) >= base.current

    async def written() -> None:
        """Let time pass until all that was captured is in epochs."""
        nonlocal clock
        while A.id not in disk.tables or lake_rows(disk, A) != source_rows(base, A):
            clock += 1.0
            base.write_elsewhere(100)
            await asyncio.sleep(0.01)

    async def pauses() -> list[float]:
        """Let time pass on a server that writes elsewhere all the time: seconds between records."""
        nonlocal clock
        end, found = clock + 30.0, list[float]()
        while clock < end:
            clock += 0.5
            position = disk.position or ZERO
            base.write_elsewhere(100)
            await until(has_come)
            await asyncio.sleep(0.01)
            if disk.position is not None and disk.position > position:
                found.append(clock)
        return [later - earlier for earlier, later in pairwise(found)]

    try:
        await until(lambda: watching.status.state is SourceState.STREAMING)
        for key in (1, 2):
            base.commit(put(A, key))
            async with asyncio.timeout(LIMIT_S):
                await written()
            found = await pauses()
            assert found == sorted(found)
            assert found[0] < found[-1] == 5.0
    finally:
        stop.set()
        await asyncio.gather(task, return_exceptions=True)
    assert lake_rows(disk, A) == source_rows(base, A)
