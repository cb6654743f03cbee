"""Partial snapshots and cancelled ones, in a pipeline of fakes."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ingestd.model.errors import OperatorError, TransientError
from ingestd.model.lake_state import TableState
from ingestd.model.schema import with_before
from ingestd.pipeline.pipeline import Pipeline
from ingestd.testing.fakes.capture import FakeCapture, FakeDatabase
from ingestd.testing.fakes.sink import MemoryDisk, MemoryLake
from tests.unit.pipeline.fixtures import (
    A,
    B,
    lake_rows,
    policy,
    put,
    source_rows,
    until,
    watch,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from ingestd.model.schema import Table, TableId
    from ingestd.pipeline.telemetry.source import SourceTelemetry
    from ingestd.ports import Snapshot


class HeldCapture(FakeCapture):
    """Waits before it chooses how tables are read, and before it takes their snapshot."""

    def __init__(self, base: FakeDatabase) -> None:
        super().__init__(base, is_incremental=True)
        self.may_choose, self.may_read = asyncio.Event(), asyncio.Event()
        self.may_choose.set()
        self.may_read.set()
        self.choosing = self.reading = 0
        self.error: OperatorError | TransientError | None = None

    async def choose_incremental(
        self, tables: Sequence[Table], *, initial: bool
    ) -> frozenset[TableId]:
        self.choosing += 1
        await self.may_choose.wait()
        return await super().choose_incremental(tables, initial=initial)

    async def snapshot(
        self,
        tables: Sequence[Table],
        *,
        incremental: bool = False,
        newly_published: bool = False,
        remainder: str = "",
        where: str | None = None,
    ) -> Snapshot:
        self.reading += 1
        await self.may_read.wait()
        if self.error is not None:
            raise self.error
        return await super().snapshot(
            tables,
            incremental=incremental,
            newly_published=newly_published,
            remainder=remainder,
            where=where,
        )


class Shop:
    """A running pipeline with tables A and B, both live, with a row each."""

    def __init__(self, a: Table = A) -> None:
        self.base, self.disk = FakeDatabase([a, B]), MemoryDisk()
        self.base.commit(put(A, 1), put(B, 1))
        self.capture = HeldCapture(self.base)
        self.watch: SourceTelemetry = watch()
        self.pipeline = Pipeline(self.capture, MemoryLake(self.disk), policy(), self.watch)

    def is_settled(self) -> bool:
        state = self.disk.registered
        return all(
            t.id in state
            and state[t.id].state is TableState.LIVE
            and lake_rows(self.disk, t) == source_rows(self.base, t)
            for t in (A, B)
        )

    def markers(self, of: Table) -> int:
        ops: list[str] = self.disk.tables[of.id].rows()["_cdc_op"].to_pylist()
        return ops.count("t")

    def last(self) -> str | None:
        found = self.watch.status.tables[str(A.id)].last_snapshot
        return None if found is None else str(found.outcome)

    def request(self, where: str | None = None) -> None:
        """Ask as the supervisor does."""
        self.pipeline.request_snapshot([A.id], where)
        self.watch.snapshot_requested([A.id], partial=where is not None)

    def cancel(self) -> None:
        self.pipeline.cancel_snapshot([A.id])
        self.watch.snapshot_cancelled([A.id])


@asynccontextmanager
async def shop(a: Table = A) -> AsyncIterator[Shop]:
    made, stop = Shop(a), asyncio.Event()
    task = asyncio.create_task(made.pipeline.run(stop))
    try:
        await until(made.is_settled)
        yield made
    finally:
        stop.set()
        await task


async def test_nothing_can_be_cancelled_where_nothing_is_read() -> None:
    made = Shop()
    with pytest.raises(TransientError):
        made.cancel()
    async with shop() as running:
        with pytest.raises(OperatorError, match=r"public\.a has no snapshot to cancel"):
            running.cancel()


async def test_snapshot_boundary_a_cancelled_request_never_begins() -> None:
    async with shop() as running:
        running.capture.may_choose.clear()
        asked = running.capture.choosing
        running.request()
        await until(lambda: running.capture.choosing > asked)
        running.cancel()
        running.capture.may_choose.set()
        running.base.commit(put(A, 2), put(B, 2))
        await until(running.is_settled)
        assert running.markers(A) == 1
        running.request()
        await until(lambda: running.markers(A) == 2)
        await until(running.is_settled)
    assert running.markers(B) == 1


async def test_snapshot_boundary_a_cancelled_read_keeps_the_old_rows() -> None:
    async with shop() as running:
        point = running.disk.registered[A.id].snapshot_lsn
        running.capture.may_read.clear()
        before = running.capture.reading
        running.request()
        await until(lambda: running.capture.reading > before)
        await until(lambda: running.disk.registered[A.id].state is TableState.SNAPSHOTTING)
        running.cancel()
        await until(lambda: running.disk.registered[A.id].state is TableState.LIVE)
        running.capture.may_read.set()
        running.base.commit(put(A, 1, op="d"), put(A, 2))
        await until(running.is_settled)
        assert running.markers(A) == 1
        assert running.last() == "cancelled"
        assert running.disk.registered[A.id].snapshot_lsn == point


async def test_lossless_a_keyless_table_is_read_to_the_end_once_begun() -> None:
    columns = tuple(replace(c, identity=True) for c in A.columns)
    keyless = replace(A, replica_identity="f", key=(), columns=columns)
    async with shop(with_before(keyless, full=False)) as running:
        running.capture.may_choose.clear()
        running.request()
        running.cancel()  # not begun yet
        running.capture.may_choose.set()
        running.capture.may_read.clear()
        before = running.capture.reading
        running.request()
        await until(lambda: running.capture.reading > before)
        with pytest.raises(OperatorError, match=r"public\.a has no key"):
            running.cancel()
        running.capture.may_read.set()
        await until(lambda: running.markers(A) == 2)
        await until(running.is_settled)


@pytest.mark.parametrize(
    "error",
    [
        OperatorError("no column x", remedy="look"),
        TransientError("somebody holds it", reason="lock_timeout"),
    ],
)
async def test_isolated_a_failed_partial_snapshot_keeps_its_table(
    error: OperatorError | TransientError,
) -> None:
    async with shop() as running:
        rows = running.disk.tables[A.id].rows().num_rows
        running.capture.error = error
        running.request("x > 1")
        await until(lambda: running.last() == "failed")
        found = running.watch.status.tables[str(A.id)].last_snapshot
        assert found is not None
        assert (found.reason, found.remedy) == (error.what, error.remedy or "request it again")
        assert running.disk.registered[A.id].state is TableState.LIVE
        assert running.disk.tables[A.id].rows().num_rows == rows
        running.base.commit(put(A, 2))
        await until(running.is_settled)
        assert (running.last(), running.markers(A)) == ("failed", 1)
