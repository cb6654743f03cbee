"""What every PageSink must do (ports.PageSink), on the fake and on Parquet files."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from ingestd.fakes.sink import MemoryPageSink
from ingestd.ports import PageSink
from ingestd.sink.durable import Fsync
from ingestd.sink.fragments import FragmentSink, FragmentWriter
from ingestd.sink.store import LocalStore

NARROW = pa.schema([("id", pa.int64())])
WIDE = pa.schema([("id", pa.int64()), ("note", pa.string())])


def page(schema: pa.Schema, count: int) -> pa.RecordBatch:
    values = {"id": range(count), "note": ["n"] * count}
    return pa.RecordBatch.from_arrays(
        [pa.array(values[f.name], f.type) for f in schema], schema=schema
    )


def parquet_files(folder: Path) -> list[Path]:
    return list(folder.rglob("*.parquet"))


@pytest.fixture(params=["memory", "parquet"])
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> PageSink:
    if request.param == "memory":
        return MemoryPageSink()
    writer = FragmentWriter(LocalStore(tmp_path, Fsync()), "s/t", ["id"])
    return FragmentSink(writer, buffer_bytes=1000)


async def test_finish_gives_every_row_once(sink: PageSink) -> None:
    for count in (10, 0, 1000, 3):
        await sink.append(page(WIDE, count))
    fragments = await sink.finish()
    assert sum(f.rows for f in fragments) == 1013
    assert sum(json.loads(f.stats_json)["numRecords"] for f in fragments) == 1013
    assert all(f.size_bytes > 0 for f in fragments)


async def test_a_fragment_has_one_schema(sink: PageSink) -> None:
    await sink.append(page(NARROW, 5))
    await sink.append(page(WIDE, 6))
    await sink.append(page(WIDE, 7))
    assert [f.rows for f in await sink.finish()] == [5, 13]


async def test_without_rows_there_is_no_fragment(sink: PageSink) -> None:
    await sink.append(page(WIDE, 0))
    assert list(await sink.finish()) == []


async def test_abort_removes_what_was_written(sink: PageSink, tmp_path: Path) -> None:
    await sink.append(page(WIDE, 1000))
    await sink.append(page(NARROW, 1000))
    await sink.abort()
    await sink.abort()
    assert not parquet_files(tmp_path)
    with pytest.raises(RuntimeError):
        await sink.append(page(WIDE, 1))
    with pytest.raises(RuntimeError):
        await sink.finish()
