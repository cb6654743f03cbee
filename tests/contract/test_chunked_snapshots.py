"""Snapshots in chunks, of every `ChangeCapture` that has them (docs/snapshots.md; I6)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from ingestd.lake.fold.plain import fold
from ingestd.model.changes import marker_batch
from ingestd.model.errors import TableReplacedError
from ingestd.model.keys import new_keys
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.pipeline.dedup_window import DedupWindow
from ingestd.ports import Snapshot, SnapshotPage, SplitRead, TableRead
from tests.contract.change_worlds import (
    LIMIT_S,
    ChangeWorld,
    FakeChangeWorld,
    WalChangeWorld,
    claim,
    until,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from ingestd.model.changes import ChangeSet, TableBatch
    from ingestd.model.lsn import Lsn
    from ingestd.model.schema import Table
    from ingestd.ports import ChangeCapture, SnapshotItem

NOTE = "x" * 100
NOTHING = PgSnapshot(0, 0)
"""Sees no transaction."""


@pytest.fixture(params=["fake", "wal"])
async def world(request: pytest.FixtureRequest) -> AsyncGenerator[ChangeWorld, None]:
    made: ChangeWorld
    if request.param == "fake":
        made = FakeChangeWorld()
    else:
        made = WalChangeWorld(request.getfixturevalue("database"), catches_up=False)
    await made.insert(*range(made.many), note=NOTE)
    yield made
    await made.close()


class Stream:
    """What a capture brings, all of it from the start."""

    def __init__(self, capture: ChangeCapture, table: Table) -> None:
        self.capture = capture
        self.table = table
        self.chunks: list[ChangeSet] = []

    @property
    def batches(self) -> list[TableBatch]:
        return [b for c in self.chunks for b in c.batches if b.table.id == self.table.id]

    async def passed(self, position: Lsn) -> None:
        async def is_past() -> bool:
            return any(chunk.position >= position for chunk in self.chunks)

        await until(is_past)


@asynccontextmanager
async def streaming(world: ChangeWorld) -> AsyncGenerator[Stream, None]:
    """Stream while chunks are read."""
    capture = world.capture()
    await claim(capture)
    tables = (await capture.discover({})).tables
    await capture.prepare(tables)
    stream = Stream(capture, tables[0])

    async def collect() -> None:
        async for chunk in capture.changes(None):
            stream.chunks.append(chunk)

    collecting = asyncio.create_task(collect())
    try:
        async with asyncio.timeout(LIMIT_S):
            await stream.passed(await world.confirmed() or stream.chunks[0].position)
            yield stream
    finally:
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)
        await capture.close()


async def incremental(stream: Stream, **options: Any) -> Snapshot:
    snapshot = await stream.capture.snapshot([stream.table], incremental=True, **options)
    assert snapshot.is_incremental
    return snapshot


def pages_of(items: Sequence[SnapshotItem]) -> list[SnapshotPage]:
    return [item for item in items if isinstance(item, SnapshotPage)]


def ids(pages: Sequence[SnapshotPage]) -> list[int]:
    return [i for page in pages for i in page.batch.rows.column("id").to_pylist()]


def changed_by(stream: Stream) -> dict[int, int]:
    """The transactions that were streamed, and where they committed."""
    rows = [row for batch in stream.batches for row in batch.rows.to_pylist()]
    return {row["_cdc_xid"]: row["_cdc_lsn"] for row in rows}


async def test_snapshot_boundary_chunks_and_changes_are_the_table(world: ChangeWorld) -> None:
    stop = asyncio.Event()
    written = 0

    async def write() -> None:
        nonlocal written
        rng = random.Random(3)
        while not stop.is_set():
            await world.update(*(rng.randrange(world.many) for _ in range(5)), note=f"u{written}")
            await world.delete(rng.randrange(world.many))
            await world.insert(world.many + written)
            written += 1

    async with streaming(world) as stream:
        writing = asyncio.create_task(write())
        try:
            snapshot = await incremental(stream)
            items = []
            async for item in snapshot.items():
                items.append(item)
                before = written

                async def some_more(than: int = before) -> bool:
                    return written > than

                if isinstance(item, SnapshotPage):
                    await until(some_more)
        finally:
            stop.set()
            await writing
        await snapshot.advance_source()
        await stream.passed(await world.current())
        expected = await world.contents()
        await snapshot.close()
        await snapshot.close()
    touched = DedupWindow(stream.table, NOTHING, np.empty(0, np.int64))
    for batch in stream.batches:
        touched.record_changes(batch)
    read = [
        touched.without_superseded(p.batch, p.position, p.seen) for p in pages_of(items) if p.seen
    ]
    marker = marker_batch(stream.table, snapshot.point, snapshot.at)
    rows = pa.Table.from_batches([b.rows for b in [marker, *read, *stream.batches]])
    assert {row["id"]: row["note"] for row in fold(rows, ["id"])} == expected
    assert len(pages_of(items)) > 3
    assert touched.rows_to_read == 0


async def test_a_page_lies_above_all_that_it_sees(world: ChangeWorld) -> None:
    async with streaming(world) as stream:
        snapshot = await incremental(stream)
        items = []
        async for item in snapshot.items():
            if isinstance(item, SnapshotPage):
                oldest = snapshot.oldest()
                assert oldest is not None
                assert item.seen is not None
            items.append(item)
            await world.insert(world.many + len(items))
        await snapshot.advance_source()
        await stream.passed(await world.current())
        await snapshot.close()
    committed = changed_by(stream)
    for page in pages_of(items):
        assert page.seen is not None
        assert page.position >= snapshot.point
        lsns = set(page.batch.rows.column("_cdc_lsn").to_pylist())
        assert lsns <= {int(page.position)}
        assert set(page.batch.rows.column("_cdc_op").to_pylist()) <= {"r"}
        seen = dict(zip(committed, page.seen.sees(np.array([*committed])).tolist(), strict=True))
        assert all(lsn < page.position for xid, lsn in committed.items() if seen[xid])


async def test_every_split_ends_and_the_table_last(world: ChangeWorld) -> None:
    async with streaming(world) as stream:
        snapshot = await incremental(stream)
        assert snapshot.ratio_read(stream.table.id) == 0.0
        items = [item async for item in snapshot.items()]
        assert snapshot.ratio_read(stream.table.id) == pytest.approx(1.0)
        await snapshot.close()
    assert isinstance(items[-1], TableRead)
    splits = [item.where for item in items if isinstance(item, SplitRead)]
    assert len(splits) == len(set(splits)) > 3
    assert sorted(ids(pages_of(items))) == list(range(world.many))


async def test_no_page_is_older_than_the_oldest(world: ChangeWorld) -> None:
    """By that it is forgotten which changes a chunk may not have seen."""
    async with streaming(world) as stream:
        snapshot = await incremental(stream)
        told: list[PgSnapshot] = []
        given = 0
        async for item in snapshot.items():
            if isinstance(item, SnapshotPage):
                assert item.seen is not None
                assert all(oldest.age <= item.seen.age for oldest in told)
            elif isinstance(item, SplitRead):
                oldest = snapshot.oldest()
                assert oldest is not None
                told.append(oldest)
            await world.insert(world.many + given)
            given += 1
        await snapshot.close()
    assert len(told) > 3


async def test_rows_are_found_by_their_keys(world: ChangeWorld) -> None:
    async with streaming(world) as stream:
        snapshot = await incremental(stream)
        await world.delete(3)
        async with asyncio.timeout(LIMIT_S):
            pages = [p async for p in snapshot.rows_of(stream.table, {("1",), ("2",), ("3",)})]
            none = [p async for p in snapshot.rows_of(stream.table, {("3",)})]
        await snapshot.close()
    found = [key for page in pages for key in new_keys(page.batch.table, page.batch.rows)]
    assert sorted(found) == [("1",), ("2",)]
    assert none
    assert ids(none) == []
    assert all(page.seen is not None for page in [*pages, *none])


async def test_a_row_that_is_read_again_has_another_position(world: ChangeWorld) -> None:
    """In whichever order, by whichever snapshot; nothing else is written."""
    async with streaming(world) as stream, AsyncExitStack() as open_ones:
        keys = {(str(i),) for i in range(world.many)}
        pages: list[SnapshotPage] = []

        async def read(**options: Any) -> Snapshot:
            snapshot = await incremental(stream, **options)
            open_ones.push_async_callback(snapshot.close)
            pages.extend([p async for p in snapshot.rows_of(stream.table, keys)])
            pages.extend(pages_of([item async for item in snapshot.items()]))
            pages.extend([p async for p in snapshot.rows_of(stream.table, keys)])
            return snapshot

        first = await read()
        await read(where="id < 10")
        await read(remainder=first.remainder(stream.table.id, []))
        await read()
    found = [page.batch.rows.select(["id", "_cdc_lsn"]) for page in pages]
    rows = pa.Table.from_batches(found).to_pylist()
    places = Counter((row["id"], row["_cdc_lsn"]) for row in rows)
    assert len(places) > 9 * world.many
    assert set(places.values()) == {1}


async def test_resumes_with_what_was_left(world: ChangeWorld) -> None:
    async with streaming(world) as stream:
        first = await incremental(stream)
        given: list[SnapshotItem] = []
        items = first.items()
        async for item in items:
            given.append(item)
            if isinstance(item, SplitRead):
                break
        await items.aclose()
        done = [item.where for item in given if isinstance(item, SplitRead)]
        left = first.remainder(stream.table.id, done)
        await first.close()
        await world.insert(world.many)  # after the point: it comes with the stream
        second = await incremental(stream, remainder=left)
        assert second.point == first.point
        rest = [item async for item in second.items()]
        again = second.remainder(
            stream.table.id, [i.where for i in rest if isinstance(i, SplitRead)]
        )
        await second.close()
        third = await incremental(stream, remainder=again)
        assert ids(pages_of([item async for item in third.items()])) == []
        await third.close()
    not_again = set(range(world.many)) - set(ids(pages_of(rest)))
    assert not_again
    assert not_again <= set(ids(pages_of(given)))


async def test_what_was_left_is_void_in_another_file(world: ChangeWorld) -> None:
    async with streaming(world) as stream:
        first = await incremental(stream)
        left = ""
        items = first.items()
        async for item in items:
            if isinstance(item, SplitRead):
                left = first.remainder(stream.table.id, [item.where])
                break
        await items.aclose()
        await first.close()
        await world.rewrite()
        with pytest.raises(TableReplacedError):
            await read_left(stream, left)


async def read_left(stream: Stream, left: str) -> None:
    """It may be noticed as it begins or while it reads."""
    snapshot = await incremental(stream, remainder=left)
    try:
        async for item in snapshot.items():
            if isinstance(item, TableReplacedError):
                raise item
    finally:
        await snapshot.close()


async def test_a_rewrite_ends_a_reading(world: ChangeWorld) -> None:
    async with streaming(world) as stream:
        snapshot = await incremental(stream)
        items: list[SnapshotItem] = []
        async for item in snapshot.items():
            if not items:
                await world.rewrite()
            items.append(item)
        await snapshot.close()
    assert any(isinstance(item, TableReplacedError) for item in items)
    assert not any(isinstance(item, TableRead) for item in items)


async def test_an_abandoned_table_is_not_read_on(world: ChangeWorld) -> None:
    async with streaming(world) as stream:
        snapshot = await incremental(stream)
        items: list[SnapshotItem] = []
        async for item in snapshot.items():
            items.append(item)
            snapshot.abandon(stream.table.id)
        await snapshot.close()
    assert len(set(ids(pages_of(items)))) < world.many
    assert not any(isinstance(item, TableRead) for item in items)


async def test_a_partial_snapshot_gives_what_its_condition_chooses(world: ChangeWorld) -> None:
    async with streaming(world) as stream:
        snapshot = await incremental(stream, where="id < 10")
        items = [item async for item in snapshot.items()]
        done = [item.where for item in items if isinstance(item, SplitRead)]
        assert snapshot.remainder(stream.table.id, done[:1]) == ""
        await snapshot.close()
    assert sorted(ids(pages_of(items))) == list(range(10))


async def test_snapshot_boundary_a_commit_not_yet_visible(world: ChangeWorld) -> None:
    """It is streamed; chunks are marked as not seeing it."""
    async with streaming(world) as stream:
        snapshot = await incremental(stream)
        async with world.unseen(world.many):

            async def is_streamed() -> bool:
                return bool(changed_by(stream))

            await until(is_streamed)
            items = [item async for item in snapshot.items()]
        later = [page async for page in snapshot.rows_of(stream.table, {(str(world.many),)})]
        await snapshot.close()
    xids = np.array([*changed_by(stream)])
    assert sorted(ids(pages_of(items))) == list(range(world.many))
    assert not any(p.seen.sees(xids).any() for p in pages_of(items) if p.seen is not None)
    assert ids(later) == [world.many]
    assert all(p.seen is not None and p.seen.sees(xids).all() for p in later)


async def test_snapshot_boundary_a_later_run_awaits_invisible_commits(
    world: ChangeWorld,
) -> None:
    """An earlier run may have streamed them: the later one does not know."""
    async with streaming(world):
        pass
    hidden = AsyncExitStack()
    await hidden.enter_async_context(world.unseen(world.many))
    async with hidden, streaming(world) as stream:
        beginning = asyncio.create_task(incremental(stream))
        done, _ = await asyncio.wait([beginning], timeout=0.5)
        assert not done
        await hidden.aclose()
        snapshot = await beginning
        items = [item async for item in snapshot.items()]
        await snapshot.close()
    assert sorted(ids(pages_of(items))) == list(range(world.many + 1))
