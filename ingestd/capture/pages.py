"""Reads a split by COPY at an exported snapshot, and decodes it to Arrow.

Tables without TOAST come packed by the server, whole columns instead of rows: far less work on both
sides. What does not suit that, and all others, comes row by row.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from datetime import datetime
from typing import Protocol

import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg import sql

from ingestd.capture.blocks import BlockRange
from ingestd.capture.copy_out import Block, CopyOut
from ingestd.capture.copy_queries import columns_query, rows_query
from ingestd.capture.rewrites import ensure_described, lock_unless_rewritten
from ingestd.capture.session import connect
from ingestd.capture.splits import enter_snapshot, read_error
from ingestd.changes import TableBatch
from ingestd.decode.columnar import ColumnarDecoder, UnexpectedNullError
from ingestd.decode.copy import CopyDecoder
from ingestd.ports import Split
from ingestd.positions import Lsn

BLOCKS_PER_RUN = 64
"""Half a MB of a table: some thousands of rows. Its packed columns are one message, which can be a
hundred times that if the values are well compressed."""


class _Decoder(Protocol):
    def feed(
        self, buffer: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> TableBatch | None: ...

    def finish(self) -> None: ...


class TablePages:
    """A split's rows as `r` rows at (`point`, 0), read at time `at`. Close it always; not reusable.

    Its connection lives from the first batch to `close`. Raises TableError if the table is the
    reason, TransientError, OperatorError, ProtocolError. Memory: some blocks of 4 MB.
    """

    def __init__(self, dsn: str, split: Split, point: Lsn, at: datetime) -> None:
        self._dsn = dsn
        self._split = split
        self._table = split.table
        self._blocks = BlockRange.parse(split.where)
        self._point = point
        self._at = at
        self._copy: CopyOut | None = None
        self._reading: asyncio.Task[Block] | None = None

    async def batches(self) -> AsyncGenerator[TableBatch, None]:
        """Give the rows; while a block is decoded or in the caller's hands the next is read."""
        try:
            blocks = self._blocks
            if blocks.is_packed and self._table.columns:
                packed = ColumnarDecoder(self._table, self._point, self._at, BLOCKS_PER_RUN)
                query = columns_query(self._table, blocks, BLOCKS_PER_RUN)
                try:
                    async for batch in self._read(query, packed):
                        yield batch
                except UnexpectedNullError:
                    await self.close()
                    blocks = replace(blocks, start=max(blocks.start, packed.next_block))
                else:
                    return
            decoder = CopyDecoder(self._table, self._point, self._at)
            async for batch in self._read(rows_query(self._table, blocks), decoder):
                yield batch
        except psycopg.Error as error:
            raise read_error(error, self._table.id, self._dsn) from error
        finally:
            await self.close()

    async def close(self) -> None:
        """Stop the COPY, if it still runs, and close the connection. Twice is fine."""
        reading, self._reading = self._reading, None
        copy, self._copy = self._copy, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        if copy is not None:
            await copy.close()

    async def _read(
        self, query: sql.Composed, decoder: _Decoder
    ) -> AsyncGenerator[TableBatch, None]:
        connection = await connect(self._dsn, autocommit=False)
        copy = self._copy = CopyOut(connection)
        await enter_snapshot(connection, self._split.snapshot)
        await ensure_described(connection, self._table)
        if not self._blocks.is_whole:
            await lock_unless_rewritten(connection, self._dsn, self._table.id, self._blocks)
        await copy.start(query)
        self._reading = asyncio.create_task(copy.read_block())
        while (reading := self._reading) is not None:
            block = await reading
            self._reading = None if block.is_last else asyncio.create_task(copy.read_block())
            batch = await asyncio.to_thread(decoder.feed, block.buffer, block.starts, block.ends)
            if batch is not None:
                yield batch
        decoder.finish()
        await self.close()
