"""Catching up: a backlog drained through the SQL functions, which beat any walsender.

A walsender sends each message on its own. Here the server joins hundreds of messages in a row of a
COPY, on a temporary copy of the slot. States::

    copied ----> draining, call by call ----> drained: the temporary slot has passed `target`
      each call gives whole transactions and moves the temporary slot beyond them

The main slot stays where it is confirmed; whoever uses this goes on by START_REPLICATION at the
decoder's position, which gives exactly the transactions that follow. Source: PostgreSQL
documentation, "Replication Management Functions".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from psycopg import AsyncConnection, sql

from ingestd.capture.copy_out import Block, CopyOut
from ingestd.capture.wal.slot import temporary_name
from ingestd.changes import Chunk
from ingestd.decode.packed import PackedMessages
from ingestd.decode.stream import StreamDecoder
from ingestd.positions import Lsn

CATCH_UP_ABOVE_BYTES = 64 << 20
"""With less to read, streaming is as fast: the SQL functions give nothing until a call is done."""
CALL_BYTES = 1 << 30
"""WAL that one call covers: the server keeps its result in temporary files of about that size."""
DECODING_MEMORY = "256MB"
"""Of the server, while it lasts: with the default 64 MB larger transactions go through its disk."""
ROW_BYTES = 1 << 18
"""Messages of this size together make a row of the COPY; a larger one is a row of its own."""


@dataclass(slots=True)
class CatchUpPolicy:
    """When it pays: `above_bytes` of WAL behind. `is_refused`: it failed here, so stream."""

    above_bytes: int
    is_refused: bool = False

    def pays(self, behind_bytes: int) -> bool:
        """Whether to catch up rather than to stream."""
        return not self.is_refused and behind_bytes > self.above_bytes


class CatchUp:
    """One draining of a slot's backlog. `connection` is an ordinary one and belongs to it.

    Raises psycopg.Error. `close` it always: that drops the temporary slot.
    """

    def __init__(self, connection: AsyncConnection[Any], slot: str, publication: str) -> None:
        self._connection = connection
        self._slot = slot
        self._copy_name = temporary_name(slot, "catch_up")
        self._publication = publication
        self._copy = CopyOut(connection)
        self._reading: asyncio.Task[Block | None] | None = None

    async def begin(self, start: Lsn) -> None:
        """Copy the slot, and move the copy to `start` if that is later."""
        # Groups come in the order of the sort, not of a hash table.
        await self._connection.execute("SET enable_hashagg = off")
        await self._connection.execute(f"SET logical_decoding_work_mem = '{DECODING_MEMORY}'")
        await self._connection.execute(
            "SELECT pg_copy_logical_replication_slot(%s, %s, true)", (self._slot, self._copy_name)
        )
        if await self._position() < start:
            await self._connection.execute(
                "SELECT pg_replication_slot_advance(%s, %s::pg_lsn)", (self._copy_name, str(start))
            )

    async def chunks(self, target: Lsn, decoder: StreamDecoder) -> AsyncGenerator[Chunk, None]:
        """Give the transactions up to about `target`; while a block is decoded the next is read."""
        blocks = self._blocks(target)
        packed = PackedMessages()
        try:
            reading = self._reading = asyncio.create_task(anext(blocks, None))
            while (block := await reading) is not None:
                reading = self._reading = asyncio.create_task(anext(blocks, None))
                for chunk in await asyncio.to_thread(_decode, decoder, packed, block):
                    yield chunk
                if block.is_last:
                    packed = PackedMessages()
        finally:
            await self._stop_reading()
            await blocks.aclose()

    async def _blocks(self, target: Lsn) -> AsyncGenerator[Block, None]:
        """Give packed messages, up to the last transaction that ends at or below `target`.

        A block with `is_last` ends one COPY; another may follow. (A transaction or two beyond
        `target` may come as well.)
        """
        before = -1
        while before < (position := await self._position()) < target:
            before = position
            await self._copy.start(self._query(Lsn(min(target, position + CALL_BYTES))))
            is_last = False
            while not is_last:
                block = await self._copy.read_block()
                is_last = block.is_last
                yield block

    async def close(self) -> None:
        """Stop what runs, and drop the temporary slot. At any time, also while `chunks` waits."""
        await self._stop_reading()  # a connection may not be closed under who uses it
        await self._copy.close()

    async def _stop_reading(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _position(self) -> Lsn:
        cursor = await self._connection.execute(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s",
            (self._copy_name,),
        )
        row = await cursor.fetchone()
        assert row is not None
        return Lsn.parse(row[0])

    def _query(self, upto: Lsn) -> sql.Composed:
        # The sort keeps messages in their order whatever plan is chosen for the grouping.
        return sql.SQL(
            "COPY (SELECT string_agg(data, ''::bytea), array_agg(length) FROM ("
            "SELECT data, octet_length(data) AS length, number,"
            " sum(octet_length(data)) OVER (ORDER BY number) / {} AS part"
            " FROM pg_logical_slot_get_binary_changes({}, {}, NULL,"
            " 'proto_version', '1', 'publication_names', {})"
            " WITH ORDINALITY AS change(lsn, xid, data, number) ORDER BY part, number"
            ") AS ordered GROUP BY part) TO STDOUT (FORMAT binary)"
        ).format(
            sql.Literal(ROW_BYTES),
            sql.Literal(self._copy_name),
            sql.Literal(str(upto)),
            sql.Literal(sql.Identifier(self._publication).as_string(None)),
        )


def _decode(decoder: StreamDecoder, packed: PackedMessages, block: Block) -> list[Chunk]:
    starts, ends = packed.unpack(block.buffer, block.starts, block.ends)
    if block.is_last:
        packed.finish()
    return timed_feed(decoder, block.buffer, starts, ends)


def timed_feed(
    decoder: StreamDecoder, buffer: bytes, starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> list[Chunk]:
    """Decode, and note in the first chunk how long it took."""
    began = time.perf_counter()
    chunks = decoder.feed(buffer, starts, ends)
    if chunks:
        chunks[0] = replace(chunks[0], decode_s=time.perf_counter() - began)
    return chunks
