"""No table is recorded as live, and no progress of it, ahead of the lake's position.

Or behind the slot: a start after a kill would take the lake for an older copy, or lose changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import pytest

from ingestd.model.errors import OperatorError
from ingestd.model.lake_state import LakeState, TableEvent, TableState
from ingestd.pipeline.pipeline import Pipeline
from ingestd.pipeline.startup import without_position
from ingestd.ports import Continuity, Lost, SnapshotItem
from ingestd.testing.fakes.capture import FakeCapture, FakeDatabase
from ingestd.testing.fakes.sink import MemoryDisk, MemoryLake
from ingestd.testing.fakes.snapshot import FakeSnapshot
from tests.unit.pipeline.fixtures import (
    A,
    B,
    C,
    lake_rows,
    policy,
    put,
    running,
    source_rows,
    until,
    watch,
)


class CrashError(Exception):
    """The process dies here."""


class OrderedLake(MemoryLake):
    """Fails the test where a table is recorded ahead of the position, or behind the slot."""

    def __init__(self, base: FakeDatabase, disk: MemoryDisk, crash_at: int) -> None:
        self.commits = 0
        self.base, self.crash_at = base, crash_at
        super().__init__(disk, before_commit=self._crash)

    def _crash(self, step: str) -> None:
        self.commits += 1
        if self.commits == self.crash_at:
            raise CrashError(step)

    async def record(self, events: Sequence[TableEvent]) -> None:
        for event in events:
            if event.state is TableState.LIVE or event.progress:
                position = self.disk.position
                assert position is not None
                assert self.base.slot is not None
                assert self.base.slot <= position
                known = self.disk.registered.get(event.table.id)
                is_news = known is None or known.state is not event.state
                assert not is_news or event.at_lsn <= position
        await super().record(events)


def is_settled(base: FakeDatabase, disk: MemoryDisk) -> bool:
    states = {disk.registered[t.id].state if t.id in disk.registered else None for t in base.tables}
    return disk.position == base.current and states == {TableState.LIVE}


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("crash_at", range(1, 10))
@pytest.mark.parametrize("start", ["first", "lost", "never"])
async def test_a_crash_before_any_commit_of_a_start(
    start: str, crash_at: int, *, incremental: bool
) -> None:
    """`B` has no rows; `C` is dropped before a later start."""
    base, disk = FakeDatabase([C, A] if start == "lost" else [C]), MemoryDisk()
    base.commit(put(C, 1), put(A, 1))
    if start != "first":
        async with running(base, disk):
            await until(lambda: is_settled(base, disk))
    settings = replace(policy(), reads_existing_rows=start != "never")
    base.tables[:] = [A, B]
    if start == "never":  # no table needs the changes that the slot had
        async with running(base, disk, settings=settings):
            await until(lambda: disk.registered[C.id].state is TableState.DROPPED)
        disk.registered = {C.id: disk.registered[C.id]}
    base.slot = None
    base.commit(put(A, 2))
    for number in (crash_at, 0):
        capture = FakeCapture(base, is_incremental=incremental)
        lake = OrderedLake(base, disk, number)
        async with running(base, disk, settings=settings, capture=capture, sink=lake) as task:
            await until(lambda: task.done() or is_settled(base, disk))
            if not task.done():
                base.commit(put(A, 3 + number), put(B, 3 + number))
                await until(lambda: task.done() or is_settled(base, disk))
            if task.done():
                with pytest.raises(CrashError):
                    task.result()
    if start != "never":
        assert lake_rows(disk, A) == source_rows(base, A)
        assert lake_rows(disk, B) == source_rows(base, B)
    else:
        assert {3} <= {row["id"] for row in lake_rows(disk, B)}


async def test_an_empty_table_is_live_once_the_position_is_durable() -> None:
    """A standby that was promoted below it may have rows that this read did not see."""
    base, disk, read = FakeDatabase([A]), MemoryDisk(), asyncio.Event()

    class Held(FakeSnapshot):
        async def items(self) -> AsyncGenerator[SnapshotItem, None]:
            await read.wait()
            async for item in super().items():
                yield item

    class Holding(FakeCapture):
        make_snapshot = Held

    rarely = replace(policy(), idle_interval_s=1000.0)
    capture, lake = Holding(base, is_incremental=True), OrderedLake(base, disk, 0)
    read.set()
    base.commit(put(A, 1))
    async with running(base, disk, settings=rarely, capture=capture, sink=lake):
        await until(lambda: is_settled(base, disk))
        read.clear()
        base.tables.append(B)
        base.commit()
        await until(lambda: B.id in disk.tables and bool(disk.tables[B.id].rows().num_rows))
        base.commit()
        read.set()
        await until(lambda: disk.registered[B.id].state is TableState.LIVE)


@pytest.mark.parametrize("is_behind", [False, True])
async def test_what_is_not_captured_any_more_is_lost_too(*, is_behind: bool) -> None:
    """Live, it would need continuity, also if it returns."""
    base, disk = FakeDatabase([A, B]), MemoryDisk()
    async with running(base, disk):
        await until(lambda: is_settled(base, disk))
    base.tables.remove(B)

    class Losing(FakeCapture):
        async def continuity(self, _committed: LakeState) -> Continuity:
            return Lost("gone", remedy="move on", is_behind=is_behind)

    class Failing(MemoryLake):
        async def adopt(self, server_id: str) -> None:
            raise OperatorError(server_id, remedy="")

    with pytest.raises(OperatorError):
        await Pipeline(Losing(base), Failing(disk), policy(), watch()).run(asyncio.Event())
    found = disk.registered[B.id]
    assert (found.state, found.reason, found.oid) == (TableState.SNAPSHOTTING, "gone", B.oid)
    assert found.columns
    base.slot = base.current
    async with running(base, disk):
        await until(lambda: disk.registered[B.id].state is TableState.DROPPED)
    assert without_position(LakeState(tables=disk.registered), "x").tables[B.id].reason != "x"
