"""COPY TO STDOUT as blocks of whole CopyData messages.

Source: PostgreSQL documentation, "Message Flow", COPY Operations; libpq, "Functions Associated with
the COPY Command".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg import sql
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGconn, PGresult

from ingestd.capture.readiness import readable, writable
from ingestd.capture.session import query_bytes, read_bytes_as_they_are, sent_encoding
from ingestd.capture.watched import WatchedConnection
from ingestd.decode.encodings import Encoding
from ingestd.errors import ProtocolError

BLOCK_BYTES = 4 << 20
"""How much is collected into a block."""
LARGE_BLOCK_BYTES = 64 << 20
"""A larger block has one large row: it is done with before the next is read."""
BLOCK_MESSAGES = 1 << 16
"""Each message is an object while it is collected, which outweighs a short one."""
INPUT_BUFFER_BYTES = 1 << 20
"""What libpq's input buffer is grown to, so that one wake-up reads many messages."""
_TURN_MESSAGES = 4096
"""So many are taken before other tasks have their turn (some ms)."""
CANCEL_LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Block:
    """CopyData messages joined in one buffer; `starts` and `ends` (int64) cut it.

    `passed_bytes`: of the largest that was too large to be held, or is and has begun.
    """

    buffer: bytes
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    is_last: bool
    passed_bytes: int = 0

    @property
    def largest_bytes(self) -> int:
        """Size of the largest message, held or not."""
        return max(self.passed_bytes, int((self.ends - self.starts).max(initial=0)))


class CopyOut:
    """One COPY on a connection that belongs to it from now on. `close` it always.

    Raises psycopg.Error; ProtocolError if the server does not follow the command by a COPY.
    """

    def __init__(self, connection: WatchedConnection) -> None:
        self._connection = connection
        self._pg: PGconn = connection.pgconn
        self._is_running = False
        self._is_copying = False

    @property
    def encoding(self) -> Encoding | None:
        """What texts come in; None for UTF-8."""
        return sent_encoding(self._connection)

    async def start(self, query: sql.Composed, *, is_small: bool = False) -> None:
        """Send the command; return when data may come. `is_small`: for less than a buffer."""
        if not is_small:
            await self._connection.execute(
                sql.SQL("SELECT pg_catalog.repeat('x', {})").format(INPUT_BUFFER_BYTES)
            )
        await read_bytes_as_they_are(self._connection)
        self._pg.send_query(query_bytes(self._connection, query))
        self._is_running = True
        while self._pg.flush():
            await writable(self._pg.socket)
        result = await self._result()
        if result is None or result.status != ExecStatus.COPY_OUT:
            raise _fault(result)
        self._is_copying = True

    async def read_block(self) -> Block:
        """Give the next block, which may be empty if it is the last."""
        take = self._pg.get_copy_data
        messages: list[Any] = []
        append = messages.append
        nbytes, turn = 0, _TURN_MESSAGES
        while nbytes < BLOCK_BYTES and len(messages) < BLOCK_MESSAGES:
            size, message = take(1)
            if size > 0:
                append(message)
                nbytes += size
                if len(messages) >= turn:
                    turn += _TURN_MESSAGES
                    await asyncio.sleep(0)
            elif size == 0:
                await self._more()
            else:
                self._is_copying = False
                await self._end()
                return await asyncio.to_thread(_join, messages, is_last=True)
        return await asyncio.to_thread(_join, messages, is_last=False)

    async def close(self) -> None:
        """Stop the COPY if it runs, and close the connection. Twice is fine."""
        try:
            if self._is_running and not self._connection.closed:
                self._is_running = False
                with contextlib.suppress(psycopg.Error):  # the server may be gone as well
                    await self._connection.cancel_safe(timeout=CANCEL_LIMIT_S)
        finally:
            await self._connection.close()

    async def drain(self) -> None:
        """Take what follows an error or a cancel, so that the connection can be used again."""
        while True:
            while self._is_copying:
                size, _ = self._pg.get_copy_data(1)
                if size == 0:
                    await self._more()
                self._is_copying = size >= 0
            result = await self._result()
            if result is None:
                break
            self._is_copying = result.status == ExecStatus.COPY_OUT
        self._is_running = False

    async def _end(self) -> None:
        """Take what follows the data: an error, or the command's end."""
        while (result := await self._result()) is not None:
            if result.status != ExecStatus.COMMAND_OK:
                raise _fault(result)
        self._is_running = False
        await read_bytes_as_they_are(self._connection, yes=False)

    async def _result(self) -> PGresult | None:
        while self._pg.is_busy():
            await self._more()
        return self._pg.get_result()

    async def _more(self) -> None:
        """Take what comes next; waits for it."""
        with self._connection.expecting():
            await readable(self._pg.socket)
        self._pg.consume_input()


def _fault(result: PGresult | None) -> Exception:
    if result is not None and result.status == ExecStatus.FATAL_ERROR:
        return error_from_result(result, encoding="utf-8")
    return ProtocolError("the server did not answer COPY as the protocol says")


def _join(messages: Sequence[memoryview], *, is_last: bool) -> Block:
    lengths = np.fromiter(map(len, messages), np.int64, len(messages))
    ends = np.cumsum(lengths)
    return Block(b"".join(messages), ends - lengths, ends, is_last)
