"""COPY TO STDOUT read past libpq, which would take a call for each row.

Between two COPYs libpq has the connection, and knows nothing of them. Source: PostgreSQL
documentation, "Message Flow", COPY Operations.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

import psycopg
from psycopg import sql

from ingestd.capture.copy_out import Block
from ingestd.capture.session import read_bytes_as_they_are
from ingestd.capture.wal.socket_reader import SocketReader, fault_of
from ingestd.capture.watched import WatchedConnection
from ingestd.decode.wire import ERROR, READY, Cut, Cutter

_LINGER_S = 0.05
"""How long it is waited for a block to become full."""
_CANCEL_LIMIT_S = 2.0


class SocketCopy:
    """One COPY after another on a connection without encryption (`socket_reader.is_plain`).

    `close` it always. Raises psycopg.Error; ProtocolError.
    """

    def __init__(self, connection: WatchedConnection) -> None:
        self._connection = connection
        self._reader: SocketReader | None = None
        self._cutter = Cutter()

    async def start(self, query: sql.Composed) -> None:
        """Send the command; return when data may come."""
        await read_bytes_as_they_are(self._connection)
        self._reader, self._cutter = SocketReader(self._connection), Cutter()
        with self._expecting():
            await self._reader.start(query.as_bytes(None))

    async def read_block(self) -> Block:
        """Give the next block, which may be empty if it is the last."""
        assert self._reader is not None
        buffer, found = await self._next(self._reader)
        if found.last is None:
            return Block(buffer, found.starts, found.ends, is_last=False)
        ended = found
        while ended.last is None or ended.last[0] != READY:
            if ended.last is not None and ended.last[0] == ERROR:
                raise fault_of(ended.last)
            _, ended = await self._next(self._reader)
        await self._reader.close()
        self._reader = None
        await read_bytes_as_they_are(self._connection, yes=False)
        return Block(buffer, found.starts, found.ends, is_last=True)

    async def close(self) -> None:
        """Stop the COPY if one runs, and close the connection. Twice is fine."""
        reader, self._reader = self._reader, None
        try:
            if reader is not None and not self._connection.closed:
                with contextlib.suppress(psycopg.Error):  # the server may be gone as well
                    await self._connection.cancel_safe(timeout=_CANCEL_LIMIT_S)
        finally:
            if reader is not None:
                await reader.close()
            await self._connection.close()

    async def _next(self, reader: SocketReader) -> tuple[bytes, Cut]:
        """Give whole rows, or what ends them; waits until they have come."""
        pieces: Sequence[bytes] = ()
        while True:
            buffer, found = await asyncio.to_thread(self._cutter.feed, pieces)
            if len(found.starts) or found.last is not None:
                return buffer, found
            with self._expecting():
                await reader.collect(_LINGER_S)
            taken = reader.take()
            pieces = taken.pieces if taken is not None else ()

    @contextlib.contextmanager
    def _expecting(self) -> Iterator[None]:
        with self._connection.expecting():
            try:
                yield
            except (EOFError, OSError) as error:
                what = str(error) or "server closed the connection unexpectedly"
                raise psycopg.OperationalError(what) from error
