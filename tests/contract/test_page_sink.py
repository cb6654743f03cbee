"""What every PageSink must do (ports.PageSink), on the fake and on Parquet files."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from ingestd.lake.parquet_writer import FragmentSink, FragmentWriter
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync
from ingestd.testing.fakes.sink import MemoryPageSink

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ingestd.ports import Fragment, PageSink

NARROW = pa.schema([("id", pa.int64())])
WIDE = pa.schema([("id", pa.int64()), ("note", pa.string())])
BUFFER_BYTES = 1000


def page(schema: pa.Schema, count: int, first: int = 0) -> pa.RecordBatch:
    values: dict[str, list[Any]] = {
        "id": list(range(first, first + count)),
        "note": [f"note {i}" if i % 3 else None for i in range(count)],
    }
    return pa.RecordBatch.from_arrays(
        [pa.array(values[f.name], f.type) for f in schema], schema=schema
    )


class SinkWorld(Protocol):
    """Sinks of one table, and their results."""

    def sink(self) -> PageSink: ...

    def rows(self, fragments: Sequence[Fragment]) -> list[dict[str, Any]]:
        """The rows of finished fragments, in their order."""

    def left(self) -> int:
        """How many files, or rows in memory, belong to no finished sink."""


@dataclass
class MemoryWorld:
    sinks: list[MemoryPageSink] = field(default_factory=list)

    def sink(self) -> PageSink:
        self.sinks.append(MemoryPageSink())
        return self.sinks[-1]

    def rows(self, fragments: Sequence[Fragment]) -> list[dict[str, Any]]:
        found = [row for s in self.sinks for p in s.pages for row in p.to_pylist()]
        assert len(found) == sum(f.rows for f in fragments)
        return found

    def left(self) -> int:
        return sum(p.num_rows for s in self.sinks for p in s.pages)


@dataclass
class NotedFsync(Fsync):
    """Records what was made durable."""

    done: list[Path] = field(default_factory=list)

    def file(self, path: Path) -> None:
        super().file(path)
        self.done.append(path)

    def folder(self, path: Path) -> None:
        super().folder(path)
        self.done.append(path)


@dataclass
class ParquetWorld:
    root: Path
    durability: NotedFsync = field(default_factory=NotedFsync)

    @property
    def folder(self) -> Path:
        return self.root / "s" / "t"

    def sink(self) -> FragmentSink:
        writer = FragmentWriter(LocalStore(self.root, self.durability), "s/t", ["id"])
        return FragmentSink(writer, buffer_bytes=BUFFER_BYTES)

    def rows(self, fragments: Sequence[Fragment]) -> list[dict[str, Any]]:
        parts = [pq.read_table(self.folder / f.path).to_pylist() for f in fragments]
        return [row for part in parts for row in part]

    def left(self) -> int:
        return len(list(self.folder.rglob("*")))


@pytest.fixture(params=["memory", "parquet"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> SinkWorld:
    return MemoryWorld() if request.param == "memory" else ParquetWorld(tmp_path)


@pytest.fixture
def parquet(tmp_path: Path) -> ParquetWorld:
    return ParquetWorld(tmp_path)


async def test_finish_gives_every_row_once_with_its_values(world: SinkWorld) -> None:
    sink = world.sink()
    pages = [page(WIDE, count, count * 10_000) for count in (10, 0, 1000, 3)]
    for each in pages:
        await sink.append_rows(each)
    fragments = await sink.finish()
    assert sum(f.rows for f in fragments) == 1013
    assert sum(json.loads(f.statistics)["numRecords"] for f in fragments) == 1013
    assert all(f.size_bytes > 0 for f in fragments)
    assert world.rows(fragments) == [row for each in pages for row in each.to_pylist()]


async def test_a_fragment_has_one_schema(world: SinkWorld) -> None:
    sink = world.sink()
    pages = [page(NARROW, 5), page(WIDE, 6), page(WIDE, 7), page(NARROW, 8)]
    for each in pages:
        await sink.append_rows(each)
    fragments = await sink.finish()
    assert [f.rows for f in fragments] == [5, 13, 8]
    assert world.rows(fragments) == [row for each in pages for row in each.to_pylist()]


async def test_without_rows_there_is_no_fragment(world: SinkWorld) -> None:
    sink = world.sink()
    await sink.append_rows(page(WIDE, 0))
    assert list(await sink.finish()) == []
    assert world.left() == 0


async def test_after_finish_it_takes_no_more(world: SinkWorld) -> None:
    sink = world.sink()
    await sink.append_rows(page(WIDE, 5))
    await sink.finish()
    with pytest.raises(RuntimeError):
        await sink.append_rows(page(WIDE, 1))
    with pytest.raises(RuntimeError):
        await sink.finish()


async def test_abort_removes_what_was_written(world: SinkWorld) -> None:
    sink = world.sink()
    await sink.append_rows(page(WIDE, 1000))
    await sink.append_rows(page(NARROW, 1000))
    await sink.abort()
    await sink.abort()
    assert world.left() == 0
    with pytest.raises(RuntimeError):
        await sink.append_rows(page(WIDE, 1))
    with pytest.raises(RuntimeError):
        await sink.finish()


async def test_abort_before_the_first_row_and_after_finish(world: SinkWorld) -> None:
    """After finish: a caller that could not commit the fragments removes them all."""
    await world.sink().abort()
    sink = world.sink()
    await sink.append_rows(page(WIDE, 1000))
    assert await sink.finish()
    await sink.abort()
    assert world.left() == 0


async def test_abort_after_a_cancelled_append_leaves_nothing(world: SinkWorld) -> None:
    sink = world.sink()
    await sink.append_rows(page(WIDE, 1000))
    task = asyncio.create_task(_append(sink, page(WIDE, 200_000)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await sink.abort()
    assert world.left() == 0


async def _append(sink: PageSink, rows: pa.RecordBatch) -> None:
    await sink.append_rows(rows)


async def test_sinks_of_one_table_do_not_touch_each_other(world: SinkWorld) -> None:
    kept, given_up = world.sink(), world.sink()
    for number in range(3):
        await kept.append_rows(page(WIDE, 500, number * 500))
        await given_up.append_rows(page(WIDE, 500))
    await given_up.abort()
    assert [row["id"] for row in world.rows(await kept.finish())] == list(range(1500))


# --- Parquet only ----------------------------------------------------------------------------


async def test_append_returns_when_there_is_room(parquet: ParquetWorld) -> None:
    sink = parquet.sink()
    for _ in range(5):
        await sink.append_rows(page(WIDE, 1000))
        assert sink.waiting_bytes <= BUFFER_BYTES
    await sink.finish()
    assert sink.waiting_bytes == 0


async def test_ack_after_durable_finish_syncs_files_and_their_folder(
    parquet: ParquetWorld,
) -> None:
    sink = parquet.sink()
    await sink.append_rows(page(NARROW, 5))
    await sink.append_rows(page(WIDE, 5))
    fragments = await sink.finish()
    files = [parquet.folder / f.path for f in fragments]
    assert len(files) == 2
    done = parquet.durability.done
    assert set(files) <= set(done)
    assert done.index(parquet.folder) > max(map(done.index, files))


async def test_a_splits_fragments_go_into_one_delta_commit(parquet: ParquetWorld) -> None:
    schema = pa.schema([*WIDE])
    table = DeltaTable.create(str(parquet.folder), schema)
    sinks = [parquet.sink(), parquet.sink()]
    for number, sink in enumerate(sinks):
        await sink.append_rows(page(NARROW, 10, number * 100))
        await sink.append_rows(page(WIDE, 10, number * 100 + 50))
    fragments = [f for sink in sinks for f in await sink.finish()]
    actions: list[AddAction | RemoveAction] = [
        AddAction(
            f.path,
            f.size_bytes,
            {},
            modification_time=f.modification_time_ms,
            data_change=True,
            stats=f.statistics,
        )
        for f in fragments
    ]
    table.create_write_transaction(
        actions, "append", table.schema(), commit_properties=CommitProperties()
    )
    found = DeltaTable(str(parquet.folder))
    assert found.version() == 1
    adds = pa.table(found.get_add_actions(flatten=True))
    assert sum(adds.column("num_records").to_pylist()) == 40
    assert sorted(adds.column("min.id").to_pylist()) == [0, 50, 100, 150]
