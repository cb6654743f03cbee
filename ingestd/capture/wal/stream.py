"""START_REPLICATION: from the socket to blocks of whole CopyData messages.

Source: PostgreSQL documentation, "Streaming Replication Protocol" and "Logical Streaming
Replication Protocol".

A reader task collects messages while the previous block is decoded elsewhere: it takes whatever has
arrived, then naps for a millisecond, because the server sends each message on its own and a wake-up
costs more than a message. It stops reading when enough is collected (the server then waits), but
status updates go on by a timer of their own: a slow lake never trips wal_sender_timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg import AsyncConnection, sql
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult

from ingestd.capture.readiness import readable, writable
from ingestd.capture.session import classify, connect, read_bytes_as_they_are
from ingestd.decode.frames import standby_status
from ingestd.errors import IngestdError, TransientError
from ingestd.positions import ZERO, Lsn

TCP_NAP_S = 0.001
"""On TCP this saves half of the reader's CPU. A unix socket holds 200 kB only, which the server
fills in a millisecond or two: any nap there starves it."""
STATUS_INTERVAL_S = 10.0
_MESSAGE_OVERHEAD = 128
"""Bytes that a message takes as an object until it is joined, beside what it holds."""
INPUT_BUFFER_BYTES = 1 << 20
"""What libpq's input buffer is grown to, so that one wake-up reads many messages."""


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How much is collected before a block is given, and before reading stops.

    A block is given when it has `block_bytes`, or `linger_s` after its first message. Reading stops
    at `limit_bytes`.
    """

    limit_bytes: int
    block_bytes: int = 4 << 20
    linger_s: float = 0.02
    status_interval_s: float = STATUS_INTERVAL_S


@dataclass(frozen=True, slots=True)
class Block:
    """Messages joined in one buffer; `lengths` (int64) cuts it into CopyData messages."""

    buffer: bytes
    lengths: NDArray[np.int64]


class ReplicationStream:
    """A running START_REPLICATION. Made by `open_stream`; `close` it always."""

    def __init__(
        self,
        connection: AsyncConnection[Any],
        where: str,
        limits: StreamLimits,
    ) -> None:
        self._connection = connection
        self._pg: PGconn = connection.pgconn
        self._where = where
        self._limits = limits
        self._nap_s = 0.0 if connection.info.host.startswith("/") else TCP_NAP_S
        self._messages: list[Any] = []
        self._nbytes = 0
        self._since = 0.0
        self._ready = asyncio.Event()
        self._room = asyncio.Event()
        self._sending = asyncio.Lock()
        self._received = self._confirmed = ZERO
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, slot: str, publication: str, after: Lsn, confirmed: Lsn) -> None:
        """Send the command and begin to read."""
        command = sql.SQL(
            "START_REPLICATION SLOT {} LOGICAL {} (proto_version '1', publication_names {})"
        ).format(sql.Identifier(slot), sql.SQL(str(after)), sql.Literal(_quoted_name(publication)))
        self._pg.send_query(command.as_bytes(None))
        await self._flush()
        while self._pg.is_busy():
            await readable(self._pg.socket)
            self._pg.consume_input()
        result = self._pg.get_result()
        if result is None or result.status != ExecStatus.COPY_BOTH:
            raise self._server_error(result)
        self._confirmed, self._received = confirmed, after
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._report())]

    async def take(self) -> Block:
        """Give what has been collected; waits for the first. Raises what ended the stream."""
        waiter = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait([waiter, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
        if not self._messages:
            for task in self._tasks:
                if task.done():
                    task.result()
        messages, self._messages, self._nbytes = self._messages, [], 0
        self._ready.clear()
        self._room.set()
        return await asyncio.to_thread(_join, messages)

    def received(self, position: Lsn) -> None:
        """Note how far the stream has been read, for the next status update."""
        self._received = max(self._received, position)

    async def confirm(self, position: Lsn) -> None:
        """Tell the server that everything below `position` is durable."""
        self._confirmed = max(self._confirmed, position)
        self.received(position)
        await self.send_status()

    async def send_status(self) -> None:
        """Send a standby status update now."""
        now_us = time.time_ns() // 1000
        message = standby_status(
            self._received, self._confirmed, self._confirmed, now_us, reply=False
        )
        with self._errors():
            self._pg.put_copy_data(message)
        await self._flush()

    async def close(self) -> None:
        """End the stream. The server frees the slot when the connection is gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connection.close()

    async def _read(self) -> None:
        while True:
            waited = bool(self._messages)
            with self._errors():
                found = self._drain()
            now = time.monotonic()
            if not waited:
                self._since = now
            if self._messages and (
                self._nbytes >= self._limits.block_bytes
                or now - self._since >= self._limits.linger_s
            ):
                self._ready.set()
            if self._nbytes >= self._limits.limit_bytes:
                self._ready.set()  # the limit may be less than a block
                self._room.clear()
                await self._room.wait()
            elif found:
                await asyncio.sleep(self._nap_s)
            else:
                linger_s = self._limits.linger_s if self._messages else None
                await readable(self._pg.socket, linger_s)

    def _drain(self) -> bool:
        """Collect what has arrived; whether there was anything."""
        pg, append = self._pg, self._messages.append
        pg.consume_input()
        nbytes = self._nbytes
        count, data = pg.get_copy_data(1)
        if count == 0:
            return False
        while count > 0:
            append(data)
            nbytes += count + _MESSAGE_OVERHEAD
            count, data = pg.get_copy_data(1)
        self._nbytes = nbytes
        if count < 0:
            raise self._server_error(pg.get_result())
        return True

    async def _report(self) -> None:
        while True:
            await self.send_status()
            await asyncio.sleep(self._limits.status_interval_s)

    async def _flush(self) -> None:
        async with self._sending:
            with self._errors():
                while self._pg.flush():
                    await writable(self._pg.socket)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            raise classify(error, self._where) from error

    def _server_error(self, result: PGresult | None) -> IngestdError:
        if result is not None and result.status == ExecStatus.FATAL_ERROR:
            return classify(error_from_result(result), self._where)
        return TransientError(
            f"{self._where}: the server ended the stream", reason="connection_lost"
        )


def _join(messages: list[memoryview]) -> Block:
    lengths = np.fromiter(map(len, messages), np.int64, len(messages))
    return Block(b"".join(messages), lengths)


async def open_stream(
    dsn: str,
    slot: str,
    publication: str,
    after: Lsn,
    confirmed: Lsn,
    *,
    where: str,
    limits: StreamLimits,
) -> ReplicationStream:
    """Connect and start to stream transactions with commit_lsn >= `after`.

    `confirmed` is what the first status update tells: a durable position, not above `after`.
    Raises TransientError (the slot is active for another pid, the server is away), OperatorError.
    """
    try:
        connection = await connect(dsn, replication=True)
    except psycopg.Error as error:
        raise classify(error, where, dsn) from error
    try:
        await connection.execute(f"SELECT repeat('x', {INPUT_BUFFER_BYTES})")
        await read_bytes_as_they_are(connection)
        stream = ReplicationStream(connection, where, limits)
        await stream.start(slot, publication, after, confirmed)
    except psycopg.Error as error:
        await connection.close()
        raise classify(error, where) from error
    except BaseException:
        await connection.close()
        raise
    return stream


def _quoted_name(publication: str) -> str:
    # publication_names is a list of identifiers, which the server unquotes.
    return sql.Identifier(publication).as_string(None)
