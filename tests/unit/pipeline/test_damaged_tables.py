"""A raw table that fails while its epoch is committed stops before that is confirmed (I1, I8)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from ingestd.model.lake_state import TableEvent, TableState
from ingestd.model.schema import Column, with_before
from ingestd.testing.fakes.capture import FakeCapture, FakeDatabase
from ingestd.testing.fakes.sink import MemoryDisk, MemoryLake
from tests.unit.pipeline.fixtures import A, B, lake_rows, put, running, source_rows, until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ingestd.model.schema import Table

LIVE = {TableState.LIVE}


class SlowRegistry(MemoryLake):
    """Takes its time to record that a table stopped, while the next epoch fills."""

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__(disk)
        self.is_stopping = asyncio.Event()
        self.may_go_on = asyncio.Event()

    async def record(self, events: Sequence[TableEvent]) -> None:
        if any(e.state is TableState.STOPPED for e in events):
            await super().record(events)
            self.is_stopping.set()
            await self.may_go_on.wait()
        else:
            await super().record(events)


def _state(disk: MemoryDisk, table: Table) -> TableState:
    return disk.registered[table.id].state


def _pairs(rows: list[dict[str, object]]) -> list[tuple[object, object]]:
    return [(row["id"], row["note"]) for row in rows]


async def test_isolated_damage_is_recorded_before_its_epoch_confirms() -> None:
    base, disk = FakeDatabase([A, B]), MemoryDisk()
    base.commit(put(A, 1), put(B, 1))
    lake = SlowRegistry(disk)
    capture = FakeCapture(base)
    async with running(base, disk, sink=lake, capture=capture):
        await until(lambda: {_state(disk, t) for t in (A, B) if t.id in disk.registered} == LIVE)
        disk.damage.add(A.id)
        base.commit(put(A, 2), put(B, 2))
        await asyncio.wait_for(lake.is_stopping.wait(), 10)
        assert disk.position is None or disk.position < base.current
        disk.damage.clear()
        columns = (*A.columns, Column("more", 25, -1, pa.string(), "text"))
        base.tables = [with_before(replace(A, columns=columns), full=False), B]
        base.commit(put(A, 3), put(B, 3))
        await asyncio.sleep(0.05)
        assert _state(disk, A) is TableState.STOPPED
        lake.may_go_on.set()
        await until(lambda: disk.position == base.current)
        assert _state(disk, A) is TableState.STOPPED
        assert lake_rows(disk, B) == source_rows(base, B)
    async with running(base, disk):  # as after a kill: what it missed is read
        await until(lambda: _state(disk, A) is TableState.LIVE)
        await until(lambda: disk.position == base.current)
        assert _pairs(lake_rows(disk, A)) == _pairs(source_rows(base, A))
        assert lake_rows(disk, B) == source_rows(base, B)
