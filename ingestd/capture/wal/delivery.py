"""The slot's changes: a backlog packed by the server first, then the stream; and the confirmation.

Who moves a position: `changes` delivers, `confirm` takes what the pipeline made durable; it goes to
the stream while there is one, to the slot itself while a backlog is drained, else with the start of
the next stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace

import psycopg

from ingestd.capture.session import classify, connect
from ingestd.capture.settings import WalSettings
from ingestd.capture.wal.catch_up import CatchUp, CatchUpPolicy, timed_feed
from ingestd.capture.wal.relations import Relations
from ingestd.capture.wal.server import Server
from ingestd.capture.wal.stream import (
    STATUS_INTERVAL_S,
    Block,
    ReplicationStream,
    StreamLimits,
    open_stream,
)
from ingestd.changes import Chunk, idle_chunk
from ingestd.decode.frames import split_frames
from ingestd.decode.stream import StreamDecoder
from ingestd.errors import TransientError
from ingestd.positions import ZERO, Lsn

ADVANCE_BYTES = 256 << 20
"""How much is confirmed at a time while a backlog is drained: each costs the server a scan."""


class Delivery:
    """One slot's changes, given once. `close` it always.

    `memory_bytes`: for what is read and not decoded yet. `checkpoint_requested`: the server waits
    for a reply with everything sent.
    """

    def __init__(
        self,
        source: str,
        settings: WalSettings,
        relations: Relations,
        *,
        memory_bytes: int,
        catch_up: CatchUpPolicy,
    ) -> None:
        self._source = source
        self._dsn = settings.dsn.get_secret_value()
        self._slot = settings.slot
        self._publication = settings.publication
        self._relations = relations
        self._memory_bytes = memory_bytes
        self._catch_up = catch_up
        self._stream: ReplicationStream | None = None
        self._draining: CatchUp | None = None
        self._decoder: StreamDecoder | None = None
        self._slot_lock = asyncio.Lock()
        self._delivered = self._confirmed = self._advanced = ZERO
        self.checkpoint_requested = False

    async def changes(
        self, start: Lsn, flushed: Lsn, server: Server
    ) -> AsyncGenerator[Chunk, None]:
        """Give the changes of transactions with commit_lsn >= `start`, the slot's or later.

        `flushed`: how far the server is. Raises TransientError, OperatorError, ProtocolError.
        """
        confirmed = self._advanced = start
        if self._catch_up.pays(flushed - start):
            async with contextlib.aclosing(self._backlog(start, flushed)) as chunks:
                async for chunk in chunks:
                    yield self._deliver(chunk)
                    start = max(start, chunk.position)
        async with self._slot_lock:
            stream = self._stream = await open_stream(
                self._dsn,
                self._slot,
                self._publication,
                start,
                max(confirmed, self._confirmed),
                where=f"source {self._source}, stream",
                limits=self._limits(server),
            )
        decoder = self._new_decoder()
        try:
            yield self._deliver(decoder.idle(start) or idle_chunk(start))
            while True:
                block = await stream.take()
                found, asked = await asyncio.to_thread(_decode, decoder, block)
                # Until something is confirmed: the pipeline looks only now and then.
                self.checkpoint_requested |= asked and decoder.position > self._confirmed
                stream.received(decoder.position)
                for chunk in found:
                    yield self._deliver(chunk)
        finally:
            self._stream = None
            await stream.close()

    def delivered(self, position: Lsn) -> None:
        """Take that everything below `position` is delivered, by a snapshot's rows."""
        self._delivered = max(self._delivered, position)

    def resolve_again(self) -> None:
        """Take that other tables are captured from here on."""
        if self._decoder is not None:
            self._decoder.resolve_again()

    def begin_anew(self) -> None:
        """Take that the slot is a new one."""
        self._confirmed = ZERO

    async def confirm(self, position: Lsn) -> None:
        """Note it, and send it if the stream runs; else the stream's start will.

        Raises ValueError beyond what was delivered.
        """
        if position > self._delivered:
            msg = f"confirm {position} is beyond what was delivered, {self._delivered}"
            raise ValueError(msg)
        if position <= self._confirmed:
            return
        self._confirmed = position
        self.checkpoint_requested = False
        async with self._slot_lock:  # not while the stream takes the slot over
            if self._stream is not None:
                await self._stream.confirm(position)
            elif position - self._advanced >= ADVANCE_BYTES:
                self._advanced = position
                await self._advance_slot(position)

    async def close(self) -> None:
        """Close its connections. At any time, twice."""
        if self._stream is not None:
            await self._stream.close()
        if self._draining is not None:
            await self._draining.close()

    async def _backlog(self, start: Lsn, target: Lsn) -> AsyncGenerator[Chunk, None]:
        """Give the transactions from `start` to about `target`, packed by the server.

        Where the server refuses, nothing is given and streaming does it. If it fails later, the
        source starts anew, without this.
        """
        decoder = self._new_decoder()
        decoder.idle(start)
        has_given = False
        try:
            connection = await connect(self._dsn)
            backlog = self._draining = CatchUp(connection, self._slot, self._publication)
            try:
                await backlog.begin(start)
                async with contextlib.aclosing(backlog.chunks(target, decoder)) as chunks:
                    async for chunk in chunks:
                        has_given = True
                        yield chunk
            finally:
                self._draining = None
                await backlog.close()
        except psycopg.Error as error:
            fault = classify(error, f"source {self._source}, catch-up", self._dsn)
            if isinstance(fault, TransientError):
                raise fault from error
            self._catch_up.is_refused = True
            if has_given:
                raise TransientError(fault.what, reason="catch_up_refused") from error

    async def _advance_slot(self, position: Lsn) -> None:
        """Free WAL while no stream does: a backlog of any size may be under way."""
        try:
            async with await connect(self._dsn) as connection:
                await connection.execute(
                    "SELECT pg_replication_slot_advance(%s, %s::pg_lsn)",
                    (self._slot, str(position)),
                )
        except psycopg.Error as error:
            raise classify(error, f"source {self._source}, confirm", self._dsn) from error

    def _new_decoder(self) -> StreamDecoder:
        hold_bytes = min(8 << 20, self._memory_bytes // 8)
        self._decoder = StreamDecoder(self._relations.resolve, hold_bytes=hold_bytes)
        return self._decoder

    def _deliver(self, chunk: Chunk) -> Chunk:
        self.delivered(chunk.position)
        left_out = self._relations.take_left_out()
        return replace(chunk, left_out=left_out) if left_out else chunk

    def _limits(self, server: Server) -> StreamLimits:
        interval = STATUS_INTERVAL_S
        if server.sender_timeout_s > 0:
            interval = min(interval, server.sender_timeout_s / 4)
        return StreamLimits(
            limit_bytes=max(1 << 20, self._memory_bytes // 8), status_interval_s=interval
        )


def _decode(decoder: StreamDecoder, block: Block) -> tuple[list[Chunk], bool]:
    """Give the block's chunks, and whether the server waits for a reply."""
    frames = split_frames(block.buffer, block.lengths)
    chunks = timed_feed(decoder, block.buffer, frames.starts, frames.ends)
    if frames.keepalive is not None:
        idle = decoder.idle(Lsn(frames.keepalive))
        if idle is not None:
            chunks.append(idle)
    return chunks, frames.reply_requested
