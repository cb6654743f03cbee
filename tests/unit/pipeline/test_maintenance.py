"""When the lake is maintained: only while the source runs, by interval or by pressure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
import structlog

from ingestd.model.changes import CommittedEpoch, EpochSummary, TableInEpoch
from ingestd.model.errors import OperatorError, TransientError
from ingestd.model.lsn import Lsn
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import SourceState, SourceStatus
from ingestd.pipeline.maintenance import MANY, Maintainer, MaintenanceSchedule
from ingestd.pipeline.telemetry.maintenance import MaintenanceTelemetry
from ingestd.pipeline.telemetry.source import SourceTelemetry
from ingestd.ports import MaintainedTable
from tests.unit.pipeline.fixtures import A, until

Look = tuple[bool, bool, frozenset[str] | None]
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeMaintenance:
    """Notes what is asked; `tables` is what it gives, or raises."""

    looks: list[Look] = field(default_factory=list)
    tables: list[MaintainedTable | Exception] = field(default_factory=list)
    running: int = 0
    most: int = 0

    async def run(
        self, *, joins: bool, cleans: bool, only: Collection[str] | None = None
    ) -> AsyncGenerator[MaintainedTable, None]:
        self.looks.append((joins, cleans, None if only is None else frozenset(only)))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            for table in self.tables:
                if isinstance(table, Exception):
                    raise table
                yield table
        finally:
            self.running -= 1


@dataclass
class World:
    lake: FakeMaintenance
    watch: SourceTelemetry
    metrics: Metrics
    clock: Clock
    maintainer: Maintainer

    def commit(self, epochs: int = 1) -> None:
        """Report epochs with a row of A each."""
        summary = EpochSummary(Lsn(1), Lsn(2), NOW, 1, 1)
        for _ in range(epochs):
            epoch = CommittedEpoch(1, summary, NOW, (TableInEpoch(A.id, 1, 1),))
            for listener in self.watch.epoch_listeners:
                listener(epoch)
        for wake in self.watch.listeners:
            wake()

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, {"source": "shop", **labels})


def world(
    schedule: MaintenanceSchedule,
    turn: asyncio.Semaphore | None = None,
    lake: FakeMaintenance | None = None,
) -> World:
    metrics, clock, lake = Metrics(), Clock(), lake or FakeMaintenance()
    watch = SourceTelemetry(SourceStatus("shop", NOW), metrics, structlog.get_logger())
    told = MaintenanceTelemetry(metrics, structlog.get_logger(), watch)
    turn = turn or asyncio.Semaphore(1)
    maintainer = Maintainer(lake, schedule, told, turn, monotonic=clock)
    return World(lake, watch, metrics, clock, maintainer)


@asynccontextmanager
async def running(world: World) -> AsyncIterator[None]:
    task = asyncio.create_task(world.maintainer.run())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


EVERY_HOUR = MaintenanceSchedule(3600, 7200, first_after_s=60)


async def test_one_writer_nothing_is_maintained_before_the_source_runs() -> None:
    found = world(EVERY_HOUR)
    found.clock.now_s = 100
    async with running(found):
        found.commit(MANY)
        for _ in range(20):
            await asyncio.sleep(0)
        assert found.lake.looks == []
        found.watch.enter(SourceState.STREAMING)
        await until(lambda: bool(found.lake.looks))
    assert found.lake.looks == [(True, True, None)]
    assert found.watch.epoch_listeners == []
    assert found.watch.listeners == []


async def test_each_thing_is_done_at_its_own_interval() -> None:
    found = world(EVERY_HOUR)
    found.watch.enter(SourceState.STREAMING)
    async with running(found):
        for now_s, looks in ((60, 1), (3660, 2), (7260, 3), (7300, 3)):
            found.clock.now_s = now_s
            found.commit()
            await until(lambda looks=looks: len(found.lake.looks) == looks)  # type: ignore[misc]
    assert found.lake.looks == [(True, True, None), (True, False, None), (True, True, None)]


async def test_many_new_files_of_a_table_are_joined_at_once() -> None:
    found = world(EVERY_HOUR)
    found.watch.enter(SourceState.STREAMING)
    async with running(found):
        found.commit(MANY - 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert found.lake.looks == []
        found.commit()
        await until(lambda: bool(found.lake.looks))
        found.commit(3)
        for _ in range(20):
            await asyncio.sleep(0)
    assert found.lake.looks == [(True, False, frozenset({"_epochs", str(A.id)}))]


async def test_what_is_off_is_never_done() -> None:
    found = world(MaintenanceSchedule(None, 3600))
    found.watch.enter(SourceState.STREAMING)
    async with running(found):
        found.commit(2 * MANY)
        found.clock.now_s = 61
        found.commit()
        await until(lambda: bool(found.lake.looks))
    assert found.lake.looks == [(False, True, None)]


async def test_small_files_are_counted_as_epochs_add_them() -> None:
    lake = FakeMaintenance(tables=[MaintainedTable(str(A.id), 2, 30, 5000, 7)])
    found = world(EVERY_HOUR, lake=lake)
    found.watch.enter(SourceState.STREAMING)
    async with running(found):
        found.commit(5)
        assert found.value("ingestd_small_files", table=str(A.id)) == 5
        found.clock.now_s = 60
        found.commit()
        await until(lambda: found.value("ingestd_joined_files_total") == 30)
        assert found.value("ingestd_small_files", table=str(A.id)) == 2
        found.commit()
        assert found.value("ingestd_small_files", table=str(A.id)) == 3
        assert found.value("ingestd_removed_files_total") == 7


@pytest.mark.parametrize(
    "fault",
    [
        TransientError("ended with code -9", reason="maintenance"),
        MaintainedTable(str(A.id), error=OperatorError("the disk is full")),
    ],
)
async def test_a_fault_stays_with_maintenance_and_is_retried_when_due(
    fault: MaintainedTable | Exception,
) -> None:
    found = world(EVERY_HOUR, lake=FakeMaintenance(tables=[fault]))
    found.watch.enter(SourceState.STREAMING)
    async with running(found):
        for number, now_s in enumerate((60, 3660), 1):
            found.clock.now_s = now_s
            found.commit()
            await until(
                lambda number=number: (  # type: ignore[misc]
                    found.value("ingestd_maintenance_failures_total") == number
                )
            )
        assert len(found.lake.looks) == 2


async def test_bounded_one_source_is_maintained_at_a_time() -> None:
    turn, lake = asyncio.Semaphore(1), FakeMaintenance()
    worlds = [world(EVERY_HOUR, turn, lake) for _ in range(3)]
    async with running(worlds[0]), running(worlds[1]), running(worlds[2]):
        for each in worlds:
            each.clock.now_s = 100
            each.watch.enter(SourceState.STREAMING)
        await until(lambda: len(lake.looks) == 3 and not lake.running)
    assert lake.most == 1
