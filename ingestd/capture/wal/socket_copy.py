"""COPY TO STDOUT read past libpq, which would take a call for each row.

Between two COPYs libpq has the connection, and knows nothing of them. Source: PostgreSQL
documentation, "Message Flow", COPY Operations.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import psycopg
from psycopg import sql

from ingestd.capture.copy_out import CANCEL_LIMIT_S, Block
from ingestd.capture.faults import lost
from ingestd.capture.session import query_bytes, read_bytes_as_they_are
from ingestd.capture.wal.socket_reader import SocketReader, fault_of
from ingestd.capture.watched import WatchedConnection
from ingestd.decode.wire import ERROR, READY, Cut
from ingestd.errors import ProtocolError

_LINGER_S = 0.05
"""How long it is waited for a block to become full."""


class SocketCopy:
    """One COPY after another on a connection without encryption (`socket_reader.is_plain`).

    `close` it always. Raises psycopg.Error; ProtocolError.
    """

    def __init__(self, connection: WatchedConnection) -> None:
        self._connection = connection
        self._reader: SocketReader | None = None

    async def start(self, query: sql.Composed) -> None:
        """Send the command; return when data may come."""
        await read_bytes_as_they_are(self._connection)
        with self._expecting():
            self._reader = SocketReader(self._connection)
            await self._reader.start(query_bytes(self._connection, query))

    async def read_block(self) -> Block:
        """Give the next block, which may be empty if it is the last."""
        assert self._reader is not None
        buffer, found = await self._next(self._reader)
        last = found.last
        if last is None:
            return Block(buffer, found.starts, found.ends, is_last=False)
        while last[0] != READY:
            if last[0] == ERROR:
                raise fault_of(last)
            _, after = await self._next(self._reader, has_more=True)
            if after.last is None:
                msg = "rows after the end of a COPY"
                raise ProtocolError(msg)
            last = after.last
        await self._reader.close()
        self._reader = None
        await read_bytes_as_they_are(self._connection, yes=False)
        return Block(buffer, found.starts, found.ends, is_last=True)

    async def close(self) -> None:
        """Stop the COPY if one runs, and close the connection. Twice is fine."""
        try:
            if self._reader is not None and not self._connection.closed:
                with contextlib.suppress(psycopg.Error):  # the server may be gone as well
                    await self._connection.cancel_safe(timeout=CANCEL_LIMIT_S)
        finally:
            try:
                if self._reader is not None:
                    await self._reader.close()
            finally:
                await self._connection.close()

    async def _next(self, reader: SocketReader, *, has_more: bool = False) -> tuple[bytes, Cut]:
        """Give whole rows, or what ends them; waits until they have come.

        `has_more`: some of what has come may not be cut yet, because an end came before it.
        """
        while True:
            fault = None
            if not has_more:
                try:
                    with self._expecting():
                        await reader.collect(_LINGER_S)
                except psycopg.OperationalError as error:
                    fault = error  # the server may have said why before it closed
            buffer, found = await asyncio.to_thread(reader.taken().cut)
            if len(found.starts) or found.last is not None:
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
