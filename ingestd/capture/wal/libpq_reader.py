"""Reading a replication connection by libpq, which alone can where it is encrypted.

A call for each message. Naps between two looks save half of the CPU.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
from psycopg import AsyncConnection
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult

from ingestd.capture.copy_both import TURN_BYTES, Block
from ingestd.capture.readiness import readable, writable

NAP_S = 0.001
INPUT_BUFFER_BYTES = 1 << 20
"""What libpq's input buffer is grown to, so that one wake-up reads many messages."""
_MESSAGE_OVERHEAD = 128
"""Bytes that a message takes as an object until it is joined, beside what it holds."""


class LibpqReader:
    """See `copy_both.Reader`."""

    def __init__(self, connection: AsyncConnection[Any]) -> None:
        self._connection = connection
        self._pg: PGconn = connection.pgconn
        self._sending = asyncio.Lock()
        self._messages: list[Any] = []
        self.heard_s = time.monotonic()

    async def start(self, command: bytes) -> None:
        """Send the command; return when the server agrees."""
        self._pg.send_query(command)
        await self._flush()
        while self._pg.is_busy():
            await readable(self._pg.socket)
            self._pg.consume_input()
        result = self._pg.get_result()
        if result is None or result.status != ExecStatus.COPY_BOTH:
            raise _ended(result)

    async def collect(self, linger_s: float) -> int:
        """Take what comes."""
        nbytes = found = self._drain()
        while found == 0:
            await readable(self._pg.socket)
            self.heard_s = time.monotonic()  # perhaps of a message only that goes on coming
            nbytes = found = self._drain()
        until = time.monotonic() + linger_s
        while nbytes < TURN_BYTES and (left_s := until - time.monotonic()) > 0:
            if found:
                await asyncio.sleep(NAP_S)
            else:
                await readable(self._pg.socket, left_s)
            found = self._drain()
            if found:
                self.heard_s = time.monotonic()
            nbytes += found
        return nbytes

    def take(self) -> Messages | None:
        """Give the messages."""
        messages, self._messages = self._messages, []
        return Messages(messages) if messages else None

    async def send(self, message: bytes) -> None:
        """Send it; waits while the server does not read."""
        self._pg.put_copy_data(message)
        await self._flush()

    async def close(self) -> None:
        """Do nothing: the connection is its maker's."""

    def _drain(self) -> int:
        """Collect what has arrived."""
        pg, append = self._pg, self._messages.append
        pg.consume_input()
        nbytes = 0
        count, data = pg.get_copy_data(1)
        while count > 0:
            append(data)
            nbytes += count + _MESSAGE_OVERHEAD
            count, data = pg.get_copy_data(1)
        if count < 0:
            raise _ended(pg.get_result())
        return nbytes

    async def _flush(self) -> None:
        async with self._sending:
            while self._pg.flush():
                await writable(self._pg.socket)


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages as libpq gave them (`copy_both.Collected`)."""

    messages: list[memoryview]

    def block(self) -> Block:
        """Join them."""
        ends = np.cumsum(np.fromiter(map(len, self.messages), np.int64, len(self.messages)))
        return Block(b"".join(self.messages), np.append([0], ends[:-1]), ends)


def _ended(result: PGresult | None) -> psycopg.Error:
    if result is not None and result.status == ExecStatus.FATAL_ERROR:
        return error_from_result(result)
    return psycopg.OperationalError("the server ended the stream: the connection is closed")
