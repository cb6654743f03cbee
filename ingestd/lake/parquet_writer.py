"""A writer of one table's rows to Parquet files, which are committed later (ports.PageSink)."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ingestd.failpoints import reach
from ingestd.lake.delta.file_statistics import file_statistics
from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.store import Store
from ingestd.lake.threads import WorkerThreads
from ingestd.ports import Fragment

T = TypeVar("T")

FILE_BYTES = 128 << 20
"""A file is closed when it exceeds this."""
ROW_GROUP_ROWS = 1 << 20
ROW_GROUP_BYTES = 16 << 20
"""Arrow bytes that justify a row group, encoded while more rows arrive rather than at the end."""

_COLUMN_CHUNK_BYTES = 2700
"""Memory that an open file keeps for each column of each row group, for its footer."""
_BATCH_COLUMN_BYTES = 1 << 10
"""Overhead of a column of a batch besides its values: objects, and buffers that are rounded up."""

_SAMPLE_ROWS = 4096
_DISTINCT_SHARE = 0.2
"""A text column gets a dictionary if at most this share of a sample's values are distinct."""

_LONG_BYTES = 1 << 10
"""Values of this length on average get no dictionary."""

_TINY_ROWS, _TINY_BYTES = 100, 64 << 10
"""A file up to this size, as each of many tables has in an epoch, is not compressed."""
_JOINED_BYTES = 1 << 20
"""Buffers up to this size are copied into one chunk."""

_CONSTANT = frozenset({"_cdc_op", "_cdc_lsn", "_cdc_xid", "_cdc_ts", "_cdc_epoch"})
"""Columns with few distinct values by nature."""


@dataclass(slots=True)
class _OpenFile:
    name: str
    schema: pa.Schema
    sink: IO[bytes]
    writer: pq.ParquetWriter
    statistics: list[str]

    def close(self) -> int:
        """Write the footer; return the file's size."""
        try:
            self.writer.close()
            return self.sink.tell()
        finally:
            self.sink.close()

    def give_up(self) -> None:
        """Close the file although the rest can't be written, as on a full disk."""
        with contextlib.suppress(OSError, pa.ArrowException):
            self.close()


@dataclass(slots=True)
class FragmentWriter:
    """The blocking part: for a worker thread, one call at a time.

    `folder` is the table's, in `store`. `statistics` names the columns that get bounds. A file
    holds rows of one schema, which may lack columns of the table: Delta readers fill them with
    null. `open_bytes`: approximate memory of the open file, for its footer and for data uploaded in
    parts. Raises whatever `storage_fault` makes of an error.
    """

    store: Store
    folder: str
    statistics: Sequence[str]
    file_bytes: int = FILE_BYTES
    makes_folder: bool = True
    open_bytes: int = 0
    _footer_bytes: int = 0
    _open: _OpenFile | None = None
    _done: list[Fragment] = field(default_factory=list)
    _made: list[str] = field(default_factory=list)

    def write(self, tables: Iterable[pa.Table]) -> None:
        """Write row groups; begin a new file when the schema changes."""
        with storage_faults(self.store.uri(self.folder)):
            for table in tables:
                self._write(table)

    def close_file(self) -> None:
        """Close the open file, if any; later rows go to a new one."""
        with storage_faults(self.store.uri(self.folder)):
            if self._open is not None:
                self._close()

    def finish(self, tables: Iterable[pa.Table] = ()) -> list[Fragment]:
        """Write these tables, close the last file, make all files durable and return them."""
        with storage_faults(self.store.uri(self.folder)):
            tables = [in_one_piece(table) for table in tables]
            is_plain = self._open is None and len(tables) == 1 and _is_tiny(tables[0])
            for table in tables:
                self._write(table, is_plain=is_plain)
            if self._open is not None:
                self._close()
            if self._done:
                self.store.sync(self.folder, [fragment.path for fragment in self._done])
        return self._done

    def abort(self) -> None:
        """Remove the files written, as far as possible; may be called again for the rest."""
        with storage_faults(self.store.uri(self.folder)):
            file, self._open = self._open, None
            self._footer_bytes = self.open_bytes = 0
            if file is not None:
                file.give_up()
            self._done = []
            made, self._made = self._made, []
            fault: OSError | None = None
            for name in made:
                try:
                    self.store.remove(f"{self.folder}/{name}")
                except OSError as error:
                    self._made.append(name)
                    fault = fault or error
            if fault is not None:
                raise fault

    def _write(self, table: pa.Table, *, is_plain: bool = False) -> None:
        if self._open is not None and not self._open.schema.equals(table.schema):
            self._close()
        if self._open is None:
            self._open = self._create(table, is_plain=is_plain)
        reach("sink.parquet.before")
        with self.store.calls.during(self.store, f"{self.folder}/{self._open.name}"):
            self._open.writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
        reach("sink.parquet.after")
        row_groups = -(-table.num_rows // ROW_GROUP_ROWS)
        self._footer_bytes += row_groups * table.num_columns * _COLUMN_CHUNK_BYTES
        written, part_bytes = self._open.sink.tell(), self.store.part_bytes
        self.open_bytes = self._footer_bytes + (written % part_bytes if part_bytes else 0)
        if written > self.file_bytes:
            self._close()

    def _create(self, table: pa.Table, *, is_plain: bool) -> _OpenFile:
        if not self._made and self.makes_folder:
            self.store.make_folder(self.folder)
        name = f"part-{uuid.uuid4()}.parquet"
        self._made.append(name)
        statistics = [n for n in self.statistics if n in table.schema.names]
        dictionary = [] if is_plain else dictionary_columns(table)
        sink = self.store.create(f"{self.folder}/{name}")
        try:
            writer = pq.ParquetWriter(
                sink,
                table.schema,
                compression="none" if is_plain else "zstd",
                compression_level=None if is_plain else 1,
                use_dictionary=dictionary or False,
                write_statistics=statistics or False,
                store_schema=False,
            )
        except BaseException:
            sink.close()
            raise
        return _OpenFile(name, table.schema, sink, writer, statistics)

    def _close(self) -> None:
        file = self._open
        assert file is not None
        self._open, self._footer_bytes, self.open_bytes = None, 0, 0
        with self.store.calls.during(self.store, f"{self.folder}/{file.name}"):
            size = file.close()
        metadata = file.writer.writer.metadata
        self._done.append(
            Fragment(
                path=file.name,
                size_bytes=size,
                rows=metadata.num_rows,
                statistics=file_statistics(metadata, file.statistics),
                modification_time_ms=time.time_ns() // 1_000_000,
            )
        )


def _is_tiny(table: pa.Table) -> bool:
    """Return whether compression would take longer than writing, and save little."""
    return bool(table.num_rows <= _TINY_ROWS and table.nbytes <= _TINY_BYTES)


def in_one_piece(table: pa.Table) -> pa.Table:
    """Join the chunks of a table of few rows: each chunk of each column costs time."""
    is_small = table.num_rows <= _TINY_ROWS and table.get_total_buffer_size() <= _JOINED_BYTES
    return table.combine_chunks() if is_small else table


def dictionary_columns(table: pa.Table) -> list[str]:
    """Return the columns (as Parquet paths) that a dictionary makes smaller, by a sample."""
    sample = table.slice(0, _SAMPLE_ROWS)
    chosen = [name for name in table.schema.names if name in _CONSTANT]
    for name, column in zip(sample.schema.names, sample.columns, strict=True):
        if name in _CONSTANT or not (
            pa.types.is_string(column.type) or pa.types.is_binary(column.type)
        ):
            continue
        if column.nbytes > _LONG_BYTES * sample.num_rows:
            continue  # counting them would take as much time again
        if pc.count_distinct(column).as_py() <= _DISTINCT_SHARE * sample.num_rows:
            chosen.append(name)
    return chosen


class FragmentSink:
    """A buffer between one table's rows and its fragments (ports.PageSink).

    Rows are buffered until ROW_GROUP_BYTES of them make a row group, which a thread encodes while
    more arrive. Beyond `buffer_bytes`, `append_rows` waits as well. An owner that fills many sinks
    has its own budget: `add_rows` accepts rows without waiting, `spill` writes the buffered ones.
    `jobs`: the owner's worker threads, which do the work.
    """

    def __init__(
        self,
        writer: FragmentWriter,
        *,
        buffer_bytes: int = 64 << 20,
        jobs: WorkerThreads | None = None,
    ) -> None:
        self._writer = writer
        self._buffer_bytes = buffer_bytes
        self._waiting: list[pa.RecordBatch] = []
        self._jobs = WorkerThreads(at_once=1, within=jobs)
        self._background_write: asyncio.Task[None] | None = None
        self._is_over = False
        self._queued_bytes = 0
        self.waiting_bytes = 0
        self.rows = 0

    def add_rows(self, rows: pa.RecordBatch) -> int:
        """Accept rows; start to write those buffered if they make a row group.

        Return about how many bytes of memory they take. Raise RuntimeError after `finish` or
        `abort`, and the error of a background write.
        """
        self._refuse_if_over()
        nbytes = _held_bytes(rows) if rows.num_rows else 0
        if rows.num_rows:
            self._waiting.append(rows)
            self.waiting_bytes += nbytes
            self._queued_bytes += nbytes
            self.rows += rows.num_rows
        if self._background_write is not None and self._background_write.done():
            write, self._background_write = self._background_write, None
            write.result()
        if self._background_write is None and self._queued_bytes >= ROW_GROUP_BYTES:
            self._background_write = asyncio.create_task(self._write())
        return nbytes

    async def append_rows(self, rows: pa.RecordBatch) -> None:
        """Accept rows; return when there is room for more."""
        self.add_rows(rows)
        if self.waiting_bytes > self._buffer_bytes:
            await self.spill()

    async def spill(self) -> None:
        """Write the buffered rows."""
        write, self._background_write = self._background_write, None
        if write is not None:
            await write
        await self._write()

    @property
    def open_bytes(self) -> int:
        """Approximate memory of the open file."""
        return self._writer.open_bytes

    async def close_file(self) -> None:
        """Close the open file, which frees its memory."""
        await self._jobs.run(self._writer.close_file)

    async def finish(self) -> Sequence[Fragment]:
        """Make all fragments durable and return them.

        This is one job, so of many tables only few have a file open at a time.
        """
        self._refuse_if_over()
        self._is_over = True
        write, self._background_write = self._background_write, None
        if write is not None:
            await write
        fragments = await self._write_by(self._writer.finish)
        await self._jobs.settle()
        return fragments

    async def abort(self) -> None:
        """Remove the files written."""
        self._is_over = True
        self._waiting = []
        self.waiting_bytes -= self._queued_bytes
        self._queued_bytes = 0
        write, self._background_write = self._background_write, None
        if write is not None:
            await asyncio.gather(write, return_exceptions=True)
        try:
            await self._jobs.run(self._writer.abort)
        finally:
            await self._jobs.settle()

    async def _write(self) -> None:
        if self._waiting:
            await self._write_by(self._writer.write)

    async def _write_by(self, write: Callable[[list[pa.Table]], T]) -> T:
        waiting, self._waiting = self._waiting, []
        nbytes, self._queued_bytes = self._queued_bytes, 0
        try:
            return await self._jobs.run(write, _runs(waiting))
        finally:
            self.waiting_bytes -= nbytes  # only now are they no longer in memory

    def _refuse_if_over(self) -> None:
        if self._is_over:
            msg = "the page sink is finished"
            raise RuntimeError(msg)


def _held_bytes(rows: pa.RecordBatch) -> int:
    """Return about how much memory a batch takes; for a few rows, far more than the values.

    A slice of a large batch has few rows too, but is counted with all buffers: finding out its own
    share takes 60 us.
    """
    nbytes: int = rows.get_total_buffer_size() if rows.num_rows <= _TINY_ROWS else rows.nbytes
    columns: int = rows.num_columns
    return nbytes + _BATCH_COLUMN_BYTES * columns


def _runs(batches: Sequence[pa.RecordBatch]) -> list[pa.Table]:
    """Join adjacent batches of the same schema."""
    runs: list[list[Any]] = []
    for batch in batches:
        if runs and runs[-1][0].schema.equals(batch.schema):
            runs[-1].append(batch)
        else:
            runs.append([batch])
    return [pa.Table.from_batches(run) for run in runs]
