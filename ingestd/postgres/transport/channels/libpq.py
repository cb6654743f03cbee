"""Messages that libpq read, framed as the server sent them.

libpq buffers each message completely, up to 1 GB of it, and needs a call for each. This channel is
used if nothing else can decrypt the connection.
"""

from __future__ import annotations

import select
import struct
import threading
from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.pq import DiagnosticField, ExecStatus
from psycopg.pq.abc import PGconn, PGresult

from ingestd.decode.wire.backend_messages import HEADER_BYTES
from ingestd.postgres.connection.liveness import LivenessCheckedConnection
from ingestd.postgres.transport.channels.channel import PIECE_BYTES, read_turn

_HEADER = struct.Struct(">ci")
_MOST_READS = 2
"""libpq's buffer has room for at least half of the largest record, and the rest of a record does
not make the socket readable."""
_BEGINS = {ExecStatus.COPY_OUT: b"H", ExecStatus.COPY_BOTH: b"W"}


class LibpqChannel:
    """See `Channel`."""

    wants_write = False

    def __init__(self, connection: LivenessCheckedConnection) -> None:
        self._pg: PGconn | None = connection.pgconn
        self._fd = connection.pgconn.socket
        # A connection is used by one thread at a time. Not held while waiting for the network.
        self._lock = threading.Lock()
        self._is_flushing = self._is_copying = False
        self._is_over = True
        connection.lend(self)

    def fileno(self) -> int:
        """Return libpq's descriptor."""
        return self._fd

    def read(self) -> bytes:
        """Return the bytes that have arrived, in complete messages."""
        with self._lock:
            if (pg := self._pg) is None:
                raise EOFError
            pieces: list[Any] = []
            try:
                self._drain_messages(pg, pieces)
            except psycopg.OperationalError:
                if not pieces:  # else the next call raises it
                    raise
            return b"".join(pieces)

    def _drain_messages(self, pg: PGconn, pieces: list[Any]) -> None:
        """Collect the messages that have arrived. One `consume_input` may read only one record."""
        nbytes = idle = 0
        while nbytes < PIECE_BYTES and idle < _MOST_READS:
            idle = 0 if self._wait(0) else idle + 1
            try:
                pg.consume_input()
            finally:  # data before the end, and the server's message about it
                while (found := self._next(pg)) is not None:
                    kind, content = found
                    pieces += [_HEADER.pack(kind, len(content) + 4), content]
                    nbytes += HEADER_BYTES + len(content)

    def _next(self, pg: PGconn) -> tuple[bytes, Any] | None:
        """Return the next message; None if none has arrived. Raises psycopg.OperationalError."""
        if self._is_copying:
            size, content = pg.get_copy_data(1)
            if size > 0:
                return b"d", content
            self._is_copying = size == 0
        return (
            None
            if self._is_copying or self._is_over or pg.is_busy()
            else self._result(pg.get_result())
        )

    def _result(self, result: PGresult | None) -> tuple[bytes, bytes]:
        if result is None:
            self._is_over = True
            return b"Z", b"I"
        if (begins := _BEGINS.get(ExecStatus(result.status))) is not None:
            self._is_copying = True
            return begins, b""
        if result.status == ExecStatus.FATAL_ERROR:
            return b"E", _fields(result)
        self._is_over = result.status != ExecStatus.COMMAND_OK  # the server may wait for more
        return b"C", b""

    def read_turn(self, limit_s: float) -> list[bytes]:
        """Read for a turn."""
        return read_turn(self.read, self._wait, limit_s)

    def _wait(self, limit_s: float) -> bool:
        """Wait until the socket is readable or the time is over. Return whether it is readable."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(limit_s * 1000))

    def write(self, data: bytes) -> int:
        """Pass a message to libpq to send. What was not accepted must be passed again unchanged."""
        with self._lock:
            if (pg := self._pg) is None:
                raise EOFError
            if not self._is_flushing:
                kind, content = data[:1], data[HEADER_BYTES:]
                if kind == b"Q":
                    pg.send_query(content.removesuffix(b"\0"))
                    self._is_over = False
                elif not pg.put_copy_data(content):
                    return 0
            self._is_flushing = bool(pg.flush())
            return 0 if self._is_flushing else len(data)

    def release(self) -> None:
        """Stop using the connection."""
        with self._lock:
            self._pg = None

    def close(self) -> None:
        """Do nothing: libpq owns the descriptor."""


def _fields(result: PGresult) -> bytes:
    """Return a server error as sent. Raises psycopg.OperationalError for an error of libpq's."""
    if result.error_field(DiagnosticField.SQLSTATE) is None:
        raise psycopg.OperationalError(result.get_error_message())
    fields = [(field, result.error_field(field)) for field in DiagnosticField]
    return b"".join(bytes([field]) + text + b"\0" for field, text in fields if text) + b"\0"


async def is_encrypted_by_kerberos(connection: AsyncConnection[Any]) -> bool:
    """Return whether Kerberos encrypts it, or may. libpq does not report this."""
    cursor = await connection.execute(
        "SELECT encrypted FROM pg_catalog.pg_stat_gssapi WHERE pid = pg_catalog.pg_backend_pid()"
    )
    row = await cursor.fetchone()
    return row is None or bool(row[0])
