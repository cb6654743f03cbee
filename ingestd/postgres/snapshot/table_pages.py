"""Reads a split by COPY at an exported snapshot, and decodes it to Arrow.

The server packs tables without TOAST into entire columns instead of rows, which is far less work on
both sides. Other tables are read row by row, as are those with too many columns, and those with
texts in other encodings.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

import numpy as np
import psycopg
import pyarrow as pa
from numpy.typing import NDArray
from psycopg import sql

from ingestd.decode.copy.columnar import AmbiguousMarkError, ColumnarDecoder
from ingestd.decode.copy.packing import packings_of
from ingestd.decode.copy.rows import CopyDecoder
from ingestd.decode.values.encodings import Encoding
from ingestd.model.changes import TableBatch, change_schema
from ingestd.model.errors import IngestdError, ProtocolError, TableChangedError, TableError
from ingestd.model.keys import Key
from ingestd.model.row_checks import refuse_too_large
from ingestd.ports import SnapshotPage, Split
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.connection.session import connect
from ingestd.postgres.snapshot.errors import snapshot_error
from ingestd.postgres.snapshot.key_lookup import KeyedRelation, KeyList
from ingestd.postgres.snapshot.queries import columns_query, rows_query
from ingestd.postgres.snapshot.read_view import LOCK_TIMEOUT_S, ReadPoint, ReadView
from ingestd.postgres.transport.copy_out import LARGE_BLOCK_BYTES, CopyBlock, CopyOut
from ingestd.process.tasks import cancel_all

BLOCKS_PER_RUN = 64
"""Half a MB of a table: a few thousand rows. Their packed columns are one message, up to a hundred
times as large if the values compress well."""


class _TooLargeToPackError(Exception):
    """The packed columns of some blocks exceed the memory limit: these blocks are read by row."""


class _Decoder(Protocol):
    def feed(
        self, buffer: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> TableBatch | None: ...

    def finish(self) -> None: ...


class TablePages:
    """A split's rows as `r` rows, read in a view. Always close it; not reusable.

    Its connection lives from the first page to `close`. Raises TableError if the table, or what the
    server sent of it, is the cause; TransientError, OperatorError. Memory: a few received blocks
    (`CopyBlock`) of 4 MB. `entered` is called with the read point of the rows before they are read.
    A row of more than `row_limit_bytes` raises TableError; a received block above
    `large_block_bytes` is not read ahead of. `columns`: those to read, None for all. `conditions`:
    only rows for which they hold; they may name any columns of the table.
    """

    def __init__(
        self,
        dsn: str,
        split: Split,
        view: ReadView,
        *,
        row_limit_bytes: int,
        large_block_bytes: int = LARGE_BLOCK_BYTES,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        entered: Callable[[ReadPoint], None] = lambda _: None,
        columns: Sequence[str] | None = None,
        conditions: Sequence[sql.Composable] = (),
    ) -> None:
        self._dsn = dsn
        self._row_limit_bytes = row_limit_bytes
        self._large_block_bytes = large_block_bytes
        self._lock_timeout_s = lock_timeout_s
        self._described = self._table = split.table
        if columns is not None:
            read = tuple(map(split.table.column, columns))
            self._table = replace(split.table, columns=read, key=(), before=())
        self._conditions = conditions
        blocks = BlockRange.parse(split.where)
        if blocks.is_whole and not blocks.oid:  # split by an earlier version
            blocks = replace(blocks, oid=split.table.oid)
        self._blocks = blocks
        self._view = view
        self._entered = entered
        self._copy: CopyOut | None = None
        self._encoding: Encoding | None = None
        self._reading: asyncio.Task[CopyBlock] | None = None

    async def pages(self) -> AsyncGenerator[SnapshotPage, None]:
        """Yield the rows.

        While the caller has a received block, or it is decoded, the next one is read, except for
        large ones.
        """
        blocks = self._blocks
        try:
            if blocks.is_packed and packings_of(self._table):
                async with aclosing(self._packed(blocks)) as pages:
                    async for page in pages:
                        yield page
                return
            async with aclosing(self._by_row(blocks)) as pages:
                async for page in pages:
                    yield page
        except psycopg.Error as error:
            raise self._failed(error) from error
        except ProtocolError as error:
            raise self._unreadable(error) from error
        finally:
            await self.close()

    async def _by_row(self, blocks: BlockRange) -> AsyncGenerator[SnapshotPage, None]:
        read_point = await self._enter(blocks)
        decoder = CopyDecoder(self._table, read_point.position, read_point.at, self._encoding)
        async for batch in self._read_pages(
            rows_query(self._table, blocks, self._conditions), decoder, by_row=True
        ):
            yield SnapshotPage(batch, read_point.position, read_point.pg_snapshot)

    async def _packed(self, blocks: BlockRange) -> AsyncGenerator[SnapshotPage, None]:
        """Read in the best packing; where that is ambiguous, continue in the next one."""
        packings = packings_of(self._table)
        for packing in packings:
            read_point = await self._enter(blocks)
            decoder = ColumnarDecoder(
                self._table,
                read_point.position,
                read_point.at,
                BLOCKS_PER_RUN,
                packing,
                encoding=self._encoding,
            )
            query = columns_query(self._table, blocks, BLOCKS_PER_RUN, packing, self._conditions)
            try:
                async for batch in self._read_pages(query, decoder):
                    yield SnapshotPage(batch, read_point.position, read_point.pg_snapshot)
            except AmbiguousMarkError:
                if packing is packings[-1]:
                    raise
                await self.close()
                blocks = replace(blocks, start=max(blocks.start, decoder.next_block))
            except _TooLargeToPackError:
                await self.close()
                blocks = replace(blocks, start=max(blocks.start, decoder.next_block))
                async with aclosing(self._by_row(blocks)) as pages:
                    async for page in pages:
                        yield page
                return
            else:
                return

    async def rows_of(
        self, keyed: KeyedRelation, keys: Collection[Key]
    ) -> AsyncGenerator[SnapshotPage, None]:
        """Yield the rows with these keys instead, at one position; at least one page."""
        table = self._table
        try:
            read_point = await self._enter(self._blocks)
            decoder = CopyDecoder(table, read_point.position, read_point.at, self._encoding)
            nothing = pa.RecordBatch.from_pylist([], change_schema(table))
            yield SnapshotPage(
                TableBatch(table, nothing, 0), read_point.position, read_point.pg_snapshot
            )
            query = rows_query(table, KeyList(table, keyed, tuple(keys)), self._conditions)
            async for batch in self._read_pages(query, decoder, by_row=True):
                yield SnapshotPage(batch, read_point.position, read_point.pg_snapshot)
        except psycopg.Error as error:
            raise self._failed(error) from error
        except ProtocolError as error:
            raise self._unreadable(error) from error
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop a running COPY, and close the connection. May be called twice."""
        reading, self._reading = self._reading, None
        copy, self._copy = self._copy, None
        if reading is not None:
            await cancel_all(reading)
        if copy is not None:
            await copy.close()

    def _failed(self, error: psycopg.Error) -> IngestdError:
        is_asked = self._table.row_filter is not None or bool(self._conditions)
        fault = snapshot_error(error, self._table.id, self._dsn, runs_users_sql=is_asked)
        if not isinstance(fault, TableError) or isinstance(fault, TableChangedError):
            return fault
        if not self._where:
            return fault
        what = f"{fault.reason}, {self._where}"
        return TableError(self._table.id, what, remedy=fault.remedy)

    def _unreadable(self, error: ProtocolError) -> TableError:
        """Return the error as the table's own: other tables and the stream are unaffected (I8)."""
        where = f" {self._where}" if self._where else ""
        what = f"the server sent rows{where} that can't be read: {error.what}"
        remedy = f"`ingestd snapshot` re-reads it; {error.remedy}"
        return TableError(self._table.id, what, remedy=remedy)

    @property
    def _where(self) -> str:
        """The blocks of the split, for messages."""
        blocks = self._blocks
        if blocks.is_whole or not blocks.oid:
            return ""
        return f"in blocks {blocks.start} to {'the last' if blocks.end is None else blocks.end - 1}"

    async def _enter(self, blocks: BlockRange) -> ReadPoint:
        connection = await connect(self._dsn, autocommit=False, lock_timeout_s=self._lock_timeout_s)
        try:
            read_point = await self._view.enter(connection, self._described, blocks)
            self._copy = CopyOut(connection, limit_bytes=self._row_limit_bytes)
        except BaseException:
            await connection.close()
            raise
        self._encoding = self._copy.encoding
        self._entered(read_point)
        return read_point

    async def _read_pages(
        self, query: sql.Composed, decoder: _Decoder, *, by_row: bool = False
    ) -> AsyncGenerator[TableBatch, None]:
        copy = self._copy
        assert copy is not None
        await copy.start(query)
        self._reading = asyncio.create_task(copy.read_block())
        while (reading := self._reading) is not None:
            block = await reading
            if by_row:
                refuse_too_large(
                    self._table.id, block.largest_bytes, self._row_limit_bytes, self._where
                )
            elif block.passed_bytes:
                raise _TooLargeToPackError
            is_large, is_last = len(block.buffer) > self._large_block_bytes, block.is_last
            if is_last or is_large:
                self._reading = None
            else:
                self._reading = asyncio.create_task(copy.read_block())
            del reading  # a task keeps its result
            batch = await asyncio.to_thread(decoder.feed, block.buffer, block.starts, block.ends)
            del block
            if batch is not None:
                yield batch
            if is_large and not is_last:
                self._reading = asyncio.create_task(copy.read_block())
        decoder.finish()
        await self.close()
