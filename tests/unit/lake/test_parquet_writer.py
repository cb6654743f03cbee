"""Files of an epoch: what waits for them; and an aborted epoch leaves none."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingestd.lake.delta.read import read_raw
from ingestd.lake.delta_lake import FILE_WORKERS, DeltaLake
from ingestd.lake.parquet_writer import FragmentWriter, in_one_piece
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync
from ingestd.model.errors import OperatorError
from tests.unit.lake.rows import inserts, make_table, summary
from tests.unit.pipeline.fixtures import until

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from ingestd.lake.store.plain_files import Durability
    from ingestd.ports import EpochWriter

NAMES = ("a", "b", "c")
LIMIT_S = 10.0


@dataclass
class Disk:
    """How much space is left."""

    free: int


class FileOnDisk(io.RawIOBase):
    def __init__(self, file: IO[bytes], disk: Disk) -> None:
        self._file = file
        self._disk = disk

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        nbytes = memoryview(data).nbytes
        if nbytes > self._disk.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._disk.free -= nbytes
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()


class SmallStore(LocalStore):
    """One on a disk that may be full."""

    def __init__(self, root: Path, disk: Disk) -> None:
        super().__init__(root, Fsync())
        self._disk = disk

    def create(self, path: str) -> IO[bytes]:
        file = (self.root / path).open("xb", buffering=0)
        return io.BufferedWriter(FileOnDisk(file, self._disk))


def rows(count: int) -> pa.Table:
    return pa.table({"id": range(count), "note": [os.urandom(40).hex() for _ in range(count)]})


def left(root: Path) -> list[Path]:
    return list(root.rglob("*.parquet"))


def still_open(root: Path) -> list[Path]:
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            found.append(descriptor.readlink())
    return [path for path in found if path.is_relative_to(root)]


class GatedFsync(Fsync):
    """Waits before a data file is durable, while its gate is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = 0

    def file(self, path: Path) -> None:
        if path.suffix == ".parquet":
            self.waiting += 1
            self.gate.wait(6 * LIMIT_S)
            self.waiting -= 1
        super().file(path)


async def test_decoding_does_not_wait_for_the_files_of_many_tables(tmp_path: Path) -> None:
    durability = GatedFsync()
    lake = await opened(tmp_path, durability)
    epoch = lake.begin_epoch()
    for n in range(2 * FILE_WORKERS):
        await epoch.append_batch(inserts(make_table(f"t{n}", oid=n + 1), 100, 1))
    durability.gate.clear()
    committing = asyncio.create_task(epoch.commit(summary(100, 200)))
    try:
        await until(lambda: durability.waiting == FILE_WORKERS)
        async with asyncio.timeout(LIMIT_S):
            await asyncio.to_thread(time.monotonic)  # as what is read is decoded
    finally:
        durability.gate.set()
    await committing


async def test_one_writer_no_thread_writes_after_the_lake_is_closed(tmp_path: Path) -> None:
    durability = GatedFsync()
    lake = await opened(tmp_path, durability)
    epoch = lake.begin_epoch()
    await epoch.append_batch(inserts(make_table("t"), 100, 1))
    durability.gate.clear()
    committing = asyncio.create_task(epoch.commit(summary(100, 200)))
    await until(lambda: durability.waiting == 1)
    committing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await committing
    closing = asyncio.create_task(lake.close())
    await asyncio.wait([closing], timeout=0.5)
    assert not closing.done()
    durability.gate.set()
    await closing
    assert durability.waiting == 0


async def test_a_lake_that_is_closed_keeps_no_thread(tmp_path: Path) -> None:
    """A source that fails opens one after another."""
    before = set(threading.enumerate())
    lake = await opened(tmp_path)
    epoch = lake.begin_epoch()
    for n in range(3):
        await epoch.append_batch(inserts(make_table(f"t{n}", oid=n + 1), 100, 1))
    await epoch.commit(summary(100, 200))
    await lake.close()
    await until(lambda: all("job" not in t.name for t in set(threading.enumerate()) - before))


async def opened(root: Path, durability: Durability | None = None) -> DeltaLake:
    lake = DeltaLake(str(root), "shop", buffer_bytes=400_000, durability=durability)
    await lake.open()
    await lake.fence()
    await lake.adopt("1")
    return lake


@pytest.mark.parametrize(
    ("before", "last", "compression"),
    [([], 20, "UNCOMPRESSED"), ([], 2000, "ZSTD"), ([20], 20, "ZSTD"), ([2000], 20, "ZSTD")],
)
def test_only_a_whole_file_that_is_tiny_is_not_compressed(
    tmp_path: Path, before: list[int], last: int, compression: str
) -> None:
    """One that is begun with a few rows may grow."""
    tables = [rows(count) for count in [*before, last]]
    writer = FragmentWriter(SmallStore(tmp_path, Disk(1 << 30)), "t", ["id"])
    writer.write(tables[:-1])
    [fragment] = writer.finish(tables[-1:])
    written = pq.ParquetFile(tmp_path / "t" / fragment.path)
    assert written.read() == pa.concat_tables(tables)
    groups = [written.metadata.row_group(n) for n in range(written.metadata.num_row_groups)]
    assert {g.column(n).compression for g in groups for n in range(2)} == {compression}
    assert json.loads(fragment.statistics)["maxValues"] == {"id": max([*before, last]) - 1}


def test_a_few_rows_are_joined_and_large_ones_are_not_copied() -> None:
    pieces = [rows(1).to_batches()[0]] * 12
    few = pa.Table.from_batches(pieces)
    joined = in_one_piece(few)
    assert joined == few
    assert joined.column("id").num_chunks == 1
    large = pa.RecordBatch.from_pydict({"id": [1], "body": ["x" * (1 << 20)]})
    for kept in (pa.Table.from_batches([large, large]), pa.Table.from_batches(pieces * 9)):
        assert in_one_piece(kept) is kept


class StoreOfParts(LocalStore):
    """Sends files in parts."""

    part_bytes = 2 << 20

    def __init__(self, root: Path, durability: Durability) -> None:
        super().__init__(root, durability)
        self.created: list[IO[bytes]] = []

    def create(self, path: str) -> IO[bytes]:
        self.created.append(super().create(path))
        return self.created[-1]

    @property
    def unsent_bytes(self) -> int:
        return sum(file.tell() % self.part_bytes for file in self.created if not file.closed)


@pytest.mark.slow
async def test_unsent_bytes_of_open_files_are_bounded_for_all_tables(tmp_path: Path) -> None:
    """Where files are sent in parts, as to a store: they are closed before each has one to send."""
    budget, store = 4 << 20, StoreOfParts(tmp_path, Fsync())
    lake = DeltaLake(str(tmp_path), "shop", buffer_bytes=budget, store=store)
    await lake.open()
    await lake.adopt("1")
    tables = [make_table(f"t{number}") for number in range(20)]
    writer = lake.begin_epoch()
    for lsn in range(8):
        for table in tables:
            batch = inserts(table, lsn + 1, *range(100))
            texts = pa.array([os.urandom(2500).hex() for _ in range(100)])
            note = batch.rows.schema.get_field_index("note")
            large = batch.rows.set_column(note, batch.rows.schema.field(note), texts)
            await writer.append_batch(replace(batch, rows=large))
            assert store.unsent_bytes <= 2 * budget
    assert store.created
    await writer.commit(summary(1, 9))
    for table in tables:
        assert len(read_raw(str(tmp_path), "shop", table.id)) == 800
    await lake.close()


@pytest.mark.parametrize("at", ["write", "finish"])
def test_a_file_is_removed_though_its_end_can_not_be_written(tmp_path: Path, at: str) -> None:
    disk = Disk(1 << 30)
    writer = FragmentWriter(SmallStore(tmp_path, disk), "t", ["id"])
    writer.write([rows(2000)])
    disk.free = 0
    with pytest.raises(OperatorError, match="the disk is full"):
        getattr(writer, at)([rows(2000)])
    writer.abort()
    assert not left(tmp_path)
    assert not still_open(tmp_path)
    assert not writer.finish()


class StubbornStore(SmallStore):
    """One in which nothing of table `a` can be removed."""

    def remove(self, path: str) -> None:
        if path.startswith("shop/public/a/"):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        super().remove(path)


async def filled_epoch(root: Path, store: LocalStore) -> EpochWriter:
    """Begin an epoch of several tables, all with a file."""
    lake = await opened(root)
    lake.store = store
    epoch = lake.begin_epoch()
    for n, name in enumerate(NAMES):
        await epoch.append_batch(inserts(make_table(name, oid=n + 1), 100, *range(20_000)))
    assert len(left(root)) == len(NAMES)
    return epoch


@pytest.mark.parametrize("is_committed", [False, True])
async def test_a_full_disk_keeps_no_file_of_an_epoch(tmp_path: Path, *, is_committed: bool) -> None:
    disk = Disk(1 << 30)
    epoch = await filled_epoch(tmp_path, SmallStore(tmp_path, disk))
    disk.free = 0
    if is_committed:
        with pytest.raises(OperatorError, match="the disk is full"):
            await epoch.commit(summary(100, 200))
    else:
        await epoch.abort()
    assert not left(tmp_path)
    assert not still_open(tmp_path)


@pytest.mark.parametrize("is_committed", [False, True])
async def test_isolated_files_that_cannot_be_removed_of_one_table(
    tmp_path: Path, *, is_committed: bool
) -> None:
    disk = Disk(1 << 30)
    epoch = await filled_epoch(tmp_path, StubbornStore(tmp_path, disk))
    if is_committed:
        disk.free = 0
        with pytest.raises(OperatorError, match="the disk is full"):
            await epoch.commit(summary(100, 200))
    else:
        with pytest.raises(OperatorError, match="permission denied"):
            await epoch.abort()
    assert {file.parent.name for file in left(tmp_path)} == {"a"}
    assert not still_open(tmp_path)
