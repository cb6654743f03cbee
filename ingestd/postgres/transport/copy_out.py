"""COPY TO STDOUT read without libpq, which takes a call per row and buffers each row completely.

Between two COPYs libpq uses the connection, and knows nothing of them. Source: PostgreSQL
documentation, "Message Flow", COPY Operations.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg import sql

from ingestd.decode.values.encodings import Encoding
from ingestd.decode.wire.backend_messages import ERROR, MOST_BYTES, READY, CutMessages
from ingestd.decode.wire.shortener import DroppedMessage, Shortener
from ingestd.model.errors import TableError
from ingestd.postgres.connection.errors import lost
from ingestd.postgres.connection.liveness import LivenessCheckedConnection
from ingestd.postgres.connection.session import query_bytes, read_bytes_as_they_are, sent_encoding
from ingestd.postgres.transport.channels.choice import Channels
from ingestd.postgres.transport.copy_reader import CopyReader, fault_of

CANCEL_LIMIT_S = 2.0
LARGE_BLOCK_BYTES = 64 << 20
"""A larger block has one large row. It is processed before the next block is read."""
_LINGER_S = 0.05
"""How long to wait for a block to fill up."""


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """CopyData messages in one buffer, delimited by `starts` and `ends` (int64).

    `passed_bytes`: size of the largest message that is too large to buffer, complete or not.
    """

    buffer: bytes
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    is_last: bool
    passed_bytes: int = 0

    @property
    def largest_bytes(self) -> int:
        """Size of the largest message, buffered or not."""
        return max(self.passed_bytes, int((self.ends - self.starts).max(initial=0)))


class CopyOut:
    """Runs one COPY after another on a connection that it owns from now on.

    Always `close` it. Raises psycopg.Error; ProtocolError. A row of more than `limit_bytes` is not
    buffered: see `CopyReader`.
    """

    def __init__(
        self,
        connection: LivenessCheckedConnection,
        *,
        limit_bytes: int = MOST_BYTES,
        shortener: Callable[[], Shortener] = DroppedMessage,
    ) -> None:
        self._connection = connection
        self._channels = Channels(connection)
        self._limit_bytes = limit_bytes
        self._shortener = shortener
        self._reader: CopyReader | None = None
        self._last: tuple[int, bytes] | None = None
        self._taking: asyncio.Task[tuple[bytes, CutMessages]] | None = None

    @property
    def encoding(self) -> Encoding | None:
        """The encoding of texts; None for UTF-8."""
        return sent_encoding(self._connection)

    async def start(self, query: sql.Composed) -> None:
        """Send the command; return when data may arrive."""
        await read_bytes_as_they_are(self._connection)
        self._last = None
        with self._expecting():
            self._reader = CopyReader(
                await self._channels.open(),
                limit_bytes=self._limit_bytes,
                shortener=self._shortener,
            )
            try:
                await self._reader.start(query_bytes(self._connection, query))
            except psycopg.Error:
                self._last = ERROR, b""
                raise

    async def read_block(self) -> CopyBlock:
        """Return the next block. Only the last one may be empty."""
        assert self._reader is not None
        buffer, found = await self._next(self._reader)
        passed = found.passed_bytes
        if found.last is None:
            return CopyBlock(buffer, found.starts, found.ends, is_last=False, passed_bytes=passed)
        await self._end(self._reader, found.last)
        return CopyBlock(buffer, found.starts, found.ends, is_last=True, passed_bytes=passed)

    async def discard_rest(self) -> None:
        """Read to the end after an error or a cancel, so that the connection can be reused."""
        reader = self._reader
        if reader is None:
            return
        last = self._last
        while last is None:
            _, found = await self._next(reader)
            last = found.last
        while last[0] != READY:
            last = await self._after(reader)
        await self._finish(reader)

    async def give_up(self) -> None:
        """Stop a running COPY, so that the connection can be reused."""
        if self._reader is not None:
            await self._connection.cancel_safe(timeout=CANCEL_LIMIT_S)
            await self.discard_rest()

    async def _end(self, reader: CopyReader, last: tuple[int, bytes]) -> None:
        """Read what follows the data. Raises psycopg.Error."""
        while last[0] != READY:
            if last[0] == ERROR:
                self._last = last
                raise fault_of(last)
            last = await self._after(reader)
        await self._finish(reader)
        await read_bytes_as_they_are(self._connection, yes=False)

    async def _after(self, reader: CopyReader) -> tuple[int, bytes]:
        """Return the message that follows one of those that end the data."""
        _, after = await self._next(reader, has_more=True)
        assert after.last is not None  # the cutter refuses data after an end
        return after.last

    async def _finish(self, reader: CopyReader) -> None:
        await reader.close()
        self._reader = None

    async def close(self) -> None:
        """Stop a running COPY, and close the connection. Idempotent."""
        try:
            if self._reader is not None and not self._connection.closed:
                with contextlib.suppress(psycopg.Error):  # the server may have stopped as well
                    await self._connection.cancel_safe(timeout=CANCEL_LIMIT_S)
        finally:
            try:
                if self._taking is not None:
                    self._taking.cancel()
                    await asyncio.wait([self._taking])
                if self._reader is not None:
                    await self._reader.close()
            finally:
                await self._connection.close()

    async def _next(
        self, reader: CopyReader, *, has_more: bool = False
    ) -> tuple[bytes, CutMessages]:
        """Wait for and return complete rows, the message that ends them, or a too large row's size.

        `has_more`: received bytes may remain uncut because an end preceded them. If this is
        cancelled, the next call returns what has arrived meanwhile: `discard_rest` misses no end.
        """
        if self._taking is None:
            self._taking = asyncio.create_task(self._next_messages(reader, has_more=has_more))
        try:
            found = await asyncio.shield(self._taking)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._taking = None
            raise
        self._taking = None
        return found

    async def _next_messages(
        self, reader: CopyReader, *, has_more: bool
    ) -> tuple[bytes, CutMessages]:
        while True:
            fault = None
            if not has_more:
                try:
                    with self._expecting():
                        await reader.collect(_LINGER_S)
                except psycopg.OperationalError as error:
                    fault = error  # the server may have reported why before it closed
            buffer, found = await asyncio.to_thread(reader.taken().cut)
            if len(found.starts) or found.last is not None or found.passed_bytes:
                return buffer, found
            if fault is not None:
                raise fault
            has_more = False

    @contextlib.contextmanager
    def _expecting(self) -> Iterator[None]:
        with self._connection.expecting():
            try:
                yield
            except (EOFError, OSError) as error:
                raise psycopg.OperationalError(lost(error)) from error


@contextlib.asynccontextmanager
async def copying(
    connection: LivenessCheckedConnection,
    query: sql.Composed,
    *,
    limit_bytes: int,
    limit_s: float | None = None,
) -> AsyncGenerator[AsyncIterator[CopyBlock], None]:
    """Return the blocks of one COPY. The connection can run other queries afterwards.

    It can also after an error of the server or of the table, and if not all blocks are read. A row
    of more than `limit_bytes` is not buffered: see `CopyOut`. `limit_s`: how long the server may
    send nothing; after that a QueryCanceled is raised.
    """
    copy = CopyOut(connection, limit_bytes=limit_bytes)
    try:
        yield _blocks(copy, connection, query, limit_s)
        await copy.give_up()
    except psycopg.Error:
        await copy.discard_rest()
        raise
    except (TableError, GeneratorExit):  # the consumer stops
        await copy.give_up()
        raise
    except BaseException:
        await copy.close()
        raise


async def _blocks(
    copy: CopyOut, connection: LivenessCheckedConnection, query: sql.Composed, limit_s: float | None
) -> AsyncGenerator[CopyBlock, None]:
    async with _within(connection, limit_s):
        await copy.start(query)
    is_last = False
    while not is_last:
        async with _within(connection, limit_s):
            block = await copy.read_block()
        is_last = block.is_last
        yield block


@contextlib.asynccontextmanager
async def _within(
    connection: LivenessCheckedConnection, limit_s: float | None
) -> AsyncGenerator[None, None]:
    """Cancel the server's work after the time limit. Raises QueryCanceled."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        await connection.cancel_safe(timeout=CANCEL_LIMIT_S)
        msg = f"sent nothing for {limit_s:g} s (`statement_timeout`)"
        raise psycopg.errors.QueryCanceled(msg) from error
