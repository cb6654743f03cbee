"""The socket itself, for connections without TLS or Kerberos encryption."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from typing import Any

from psycopg import AsyncConnection

from ingestd.postgres.transport.channels.channel import (
    LOW_WATER_BYTES,
    PIECE_BYTES,
    TURN_BYTES,
    read_turn,
)

NAP_S = 0.0003
"""A unix socket wakes its reader for each message, so the thread polls at this interval instead."""


class PlainChannel:
    """See `Channel`. A unix socket buffers 277 messages: the server stops while it is full."""

    wants_write = False

    def __init__(self, connection: AsyncConnection[Any]) -> None:
        self._socket = socket.socket(fileno=os.dup(connection.pgconn.socket))
        # For the thread; all other calls pass MSG_DONTWAIT.
        self._socket.settimeout(None)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._socket.fileno()

    def read(self) -> bytes:
        """Return the bytes that have arrived."""
        try:
            found = self._socket.recv(PIECE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""
        if not found:
            raise EOFError
        return found

    def read_turn(self, limit_s: float) -> list[bytes]:
        """Read for a turn: on TCP with one call, assembled by the kernel."""
        if self._socket.family == socket.AF_UNIX:
            return read_turn(self.read, lambda _: time.sleep(NAP_S), limit_s)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(limit_s))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, LOW_WATER_BYTES)
        try:
            found = self._socket.recv(TURN_BYTES, socket.MSG_WAITALL)
        except BlockingIOError:
            return []
        finally:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)  # for the loop
        if not found:
            raise EOFError
        return [found]

    def write(self, data: bytes) -> int:
        """Write as much as possible without waiting."""
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def release(self) -> None:
        """Make the socket non-blocking again, for libpq's Terminate message."""
        if self._socket.fileno() >= 0:
            self._socket.settimeout(0)

    def close(self) -> None:
        """Close the descriptor."""
        self._socket.close()


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("ll", whole, round((seconds - whole) * 1e6) or 1)
