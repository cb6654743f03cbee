"""The pipeline reads tables in chunks while everything else continues (I6; docs/snapshots.md)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from ingestd.model.changes import MARKER_SEQ, TRUNCATE, UPDATE
from ingestd.model.errors import TransientError
from ingestd.model.lake_state import TableEvent, TableState
from ingestd.model.recorded_progress import RecordedProgress
from ingestd.model.schema import Column, with_before
from ingestd.pipeline.pipeline import Pipeline
from ingestd.pipeline.policy import SnapshotPolicy
from ingestd.ports import SnapshotItem
from ingestd.testing.fakes.capture import FakeCapture
from ingestd.testing.fakes.database import FakeChange, FakeDatabase
from ingestd.testing.fakes.sink import MemoryDisk, MemoryLake
from ingestd.testing.fakes.snapshot import FakeSnapshot, Reach
from tests.unit.pipeline.fixtures import (
    LIMIT_S,
    A,
    lake_rows,
    policy,
    running,
    source_rows,
    until,
    watch,
)

T = with_before(
    replace(A, columns=(*A.columns, Column("big", 25, -1, pa.string(), "text"))), full=False
)
KEYS = 24
BLOCKS = 16
SEEDS = [*range(2), *(pytest.param(n, marks=pytest.mark.thorough) for n in range(2, 8))]

Row = Mapping[str, object]


class Writers:
    """Sessions that change rows; they commit late, and are seen later still."""

    def __init__(self, base: FakeDatabase, seed: int) -> None:
        self._base = base
        self._rng = random.Random(seed)
        self._locked: set[int] = set()
        self._sessions: list[tuple[int, list[FakeChange], set[int]]] = []
        self._hidden: list[tuple[int, set[int]]] = []
        self._values = 0

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()
            await asyncio.sleep(self._rng.choice([0, 0, 0.001]))  # the daemon's turn, or more

    def end(self) -> None:
        for xid, changes, keys in self._sessions:
            self._base.write_commit(xid, *changes)
            self._hidden.append((xid, keys))
        self._sessions = []
        for xid, _ in self._hidden:
            self._base.end_transaction(xid)
        self._hidden = []
        self._locked = set()

    def _step(self) -> None:
        rng = self._rng
        chance = rng.random()
        if chance < 0.02 and not self._sessions and not self._hidden:
            if rng.random() < 0.7:
                self._base.rewrite(T.id)
            else:
                self._base.commit(FakeChange(T.id, TRUNCATE))
        elif chance < 0.45 and len(self._sessions) < 3:
            self._begin()
        elif chance < 0.8 and self._sessions:
            xid, changes, keys = self._sessions.pop(rng.randrange(len(self._sessions)))
            if rng.random() < 0.1:
                self._base.end_transaction(xid)
                self._locked -= keys
            else:
                self._base.write_commit(xid, *changes)
                self._hidden.append((xid, keys))
        elif self._hidden:
            xid, keys = self._hidden.pop(rng.randrange(len(self._hidden)))
            self._base.end_transaction(xid)
            self._locked -= keys

    def _begin(self) -> None:
        rng = self._rng
        rows: list[Any] = self._base.rows(T)
        there = {row["id"]: row for row in rows}
        free = [key for key in range(KEYS) if key not in self._locked]
        changes: list[FakeChange] = []
        keys: set[int] = set()
        for key in rng.sample(free, min(len(free), rng.randint(1, 3))):
            keys.add(key)
            changes.append(self._change(key, there, free, keys))
        if changes:
            self._locked |= keys
            self._sessions.append((self._base.begin_transaction(), changes, keys))

    def _change(
        self, key: int, there: Mapping[int, Row], free: list[int], keys: set[int]
    ) -> FakeChange:
        rng = self._rng
        self._values += 1
        row = {"id": key, "note": f"n{self._values}", "big": f"b{self._values}"}
        block = rng.randrange(BLOCKS)
        old = there.get(key)
        if old is None:
            return FakeChange(T.id, "c", row, block=block)
        chance = rng.random()
        others = [k for k in free if k not in there and k not in keys]
        if chance < 0.2:
            return FakeChange(T.id, "d", {"id": key})
        if chance < 0.4 and others:
            other = rng.choice(others)
            keys.add(other)
            row = {**row, "id": other, "big": old["big"]}
            return FakeChange(T.id, UPDATE, row, {"id": key}, ("big",), block)
        if chance < 0.8:
            row["big"] = old["big"]
            return FakeChange(T.id, UPDATE, row, unchanged=("big",), block=block)
        return FakeChange(T.id, UPDATE, row, block=block)


def loaded(seed: int) -> FakeDatabase:
    base = FakeDatabase([T])
    for key in range(0, KEYS, 2):
        row = {"id": key, "note": "old", "big": f"big {seed}"}
        base.commit(FakeChange(T.id, "c", row, block=key % BLOCKS))
    return base


def settled(base: FakeDatabase, disk: MemoryDisk) -> bool:
    known = disk.registered.get(T.id)
    is_live = known is not None and known.state is TableState.LIVE
    return is_live and disk.position == base.current


def doubled(disk: MemoryDisk) -> list[Any]:
    """What the lake has at one position more than once, of the same key."""
    rows = disk.tables[T.id].rows().select(["id", "_cdc_lsn", "_cdc_seq"]).to_pylist()
    places = Counter(tuple(row.values()) for row in rows)
    return [place for place, count in places.items() if count > 1]


class Source:
    """A source under writes, its lake, and one daemon after another."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.base, self.disk = loaded(seed), MemoryDisk()
        self.writers = Writers(self.base, seed)
        self.stop = asyncio.Event()
        # Half of the seeds read rows by their keys between chunks, too.
        keys = 2 if seed % 2 else SnapshotPolicy().keys_at_once
        self.snapshots = SnapshotPolicy(
            patience_s=0.001, advance_interval_s=0.005, keys_at_once=keys
        )
        self.start()

    def start(self, lake: MemoryLake | None = None) -> None:
        rng = self.rng
        capture = FakeCapture(
            self.base,
            change_set_rows=rng.choice([1, 1000]),
            is_incremental=True,
            reach=Reach(blocks=rng.choice([1, 2]), splits=rng.choice([1, 2])),
        )
        settings = replace(policy(), snapshots=self.snapshots)
        self.pipeline = Pipeline(capture, lake or MemoryLake(self.disk), settings, watch())
        self.task = asyncio.create_task(self.pipeline.run(self.stop))

    async def kill(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        self.base.holder = None

    async def settle(self) -> None:
        """Let all transactions end, and the lake have everything."""
        self.writers.end()
        await until(lambda: settled(self.base, self.disk) or self.task.done())
        if self.task.done():
            self.task.result()
        assert lake_rows(self.disk, T) == source_rows(self.base, T)
        assert doubled(self.disk) == []


class NeverWhole(MemoryLake):
    """Never records that a table is complete; `stuck`: it was about to."""

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__(disk)
        self.stuck = asyncio.Event()

    async def record(self, events: Sequence[TableEvent]) -> None:
        if any(event.state is TableState.LIVE for event in events):
            self.stuck.set()
            await asyncio.Event().wait()
        await super().record(events)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
async def test_snapshot_boundary_chunks_under_writes_and_kills(
    seed: int,
) -> None:
    source = Source(seed)
    rng = source.rng
    for _ in range(6):
        await source.writers.run(rng.randrange(20, 300))
        if rng.random() < 0.3:
            await source.settle()
        elif rng.random() < 0.3:
            with suppress(TransientError):  # it has only just begun
                source.pipeline.request_snapshot([T.id])
            continue
        await source.kill()
        source.start()
    await source.settle()
    source.stop.set()
    await source.task


class ReadTwice(FakeSnapshot):
    """An update in the last block has an unchanged value; then the source is idle."""

    async def items(self) -> AsyncGenerator[SnapshotItem, None]:
        row = {"id": BLOCKS - 1, "note": "new", "big": "big"}
        change = FakeChange(T.id, UPDATE, row, unchanged=("big",), block=BLOCKS - 1)
        self._database.commit(change)
        async for item in super().items():
            yield item


async def test_a_row_that_is_read_twice_has_two_positions() -> None:
    """By its key, then with its block. Equal rows at one position are `doubled` to `verify`."""
    snapshots = SnapshotPolicy(keys_at_once=1, patience_s=0.1)
    settings = replace(policy(), snapshots=snapshots)
    base, disk = FakeDatabase([T]), MemoryDisk()
    for key in range(BLOCKS):
        row = {"id": key, "note": "old", "big": "big"}
        base.commit(FakeChange(T.id, "c", row, block=key))
    capture = FakeCapture(base, is_incremental=True, reach=Reach(blocks=1))
    capture.make_snapshot = ReadTwice
    async with running(base, disk, settings=settings, capture=capture):
        await until(lambda: settled(base, disk))
    assert lake_rows(disk, T) == source_rows(base, T)
    assert doubled(disk) == []
    rows = disk.tables[T.id].rows().select(["id", "_cdc_op"]).to_pylist()
    assert rows.count({"id": BLOCKS - 1, "_cdc_op": "r"}) == 2


async def test_snapshot_boundary_the_closing_marker_is_given_once() -> None:
    """The kill comes when it is durable, but before the table is recorded as complete."""
    source = Source(seed=1)
    await source.settle()

    def is_requested() -> bool:
        try:
            source.pipeline.request_snapshot([T.id])
        except TransientError:  # it has only just begun
            return False
        return True

    left = ""
    while not left:  # else it was read in one epoch, and begins again elsewhere
        await source.kill()
        lake = NeverWhole(source.disk)
        source.start(lake)
        await until(is_requested)
        async with asyncio.timeout(LIMIT_S):
            await lake.stuck.wait()
        known = source.disk.registered[T.id]
        assert known.state is TableState.SNAPSHOTTING
        left = RecordedProgress.parse(known.progress).remainder
    await source.kill()
    source.start()
    await source.settle()
    source.stop.set()
    await source.task
    rows = source.disk.tables[T.id].rows().select(["_cdc_lsn", "_cdc_seq"]).to_pylist()
    markers = [row["_cdc_lsn"] for row in rows if row["_cdc_seq"] == MARKER_SEQ]
    assert len(markers) == len(set(markers)) > 1
