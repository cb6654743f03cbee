"""Reading COPY data past libpq: the socket's bytes, cut later, all at once.

A walsender sends each message on its own, so what is done per message is done millions of times.
Here nothing is: what little comes is read on the event loop, a few times while it is waited for
more; what comes without a pause is put together in a thread that is not woken for each, which is
what costs most, the server too. Nobody may look away for long: a unix socket holds 277 messages,
and the server stands still while it is full.

libpq must be idle when its socket is taken over, and sees nothing of what is read: afterwards it is
closed, or goes on where the server is ready again (`socket_copy`). Under TLS it can't be: see
`libpq_reader`. Source: PostgreSQL documentation, "Message Formats", "Error and Notice
Message Fields".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.pq import DiagnosticField

from ingestd.capture.copy_both import TURN_BYTES, Block
from ingestd.capture.readiness import readable, writable
from ingestd.decode.shortening import Passed, Shortener
from ingestd.decode.wire import (
    ASIDES,
    COPY_BOTH,
    COPY_OUT,
    ERROR,
    HEADER_BYTES,
    MOST_BYTES,
    Cut,
    Cutter,
    error_fields,
    length_of,
)

GLANCE_S = 0.005
"""How often the event loop looks: a unix socket is full with 277 messages."""
GLANCE_BYTES = 1 << 16
BUSY_BYTES = 1 << 13
"""After so much in a glance more is expected without a pause."""
PAUSE_BYTES = 1 << 17
"""When so little comes in a turn that is over because of its time, the event loop takes over."""
LOW_WATER_BYTES = 1 << 16
"""On TCP the thread sleeps until so much has come: to be woken for each message takes it, and the
server that wakes it, longer than all else."""
NAP_S = 0.0003
"""A unix socket wakes whoever waits for it, so nobody does: the thread looks so often."""
_HEADER = struct.Struct(">ci")
_READY = b"Z\0\0\0\5"
"""ReadyForQuery, but for its last byte: nothing follows."""
_FIELDS = frozenset(int(field) for field in DiagnosticField)


async def is_plain(connection: AsyncConnection[Any]) -> bool:
    """Whether the socket has what the server sends, neither TLS nor Kerberos between."""
    if connection.pgconn.ssl_in_use:
        return False
    # libpq does not tell of Kerberos.
    cursor = await connection.execute(
        "SELECT encrypted FROM pg_catalog.pg_stat_gssapi WHERE pid = pg_catalog.pg_backend_pid()"
    )
    row = await cursor.fetchone()
    return row is not None and not row[0]


class SocketReader:
    """See `copy_both.Reader`.

    A message of more than `limit_bytes` is passed, and what `shortener` makes of it stands for it.
    """

    def __init__(
        self,
        connection: AsyncConnection[Any],
        *,
        limit_bytes: int = MOST_BYTES,
        shortener: Callable[[], Shortener] = Passed,
    ) -> None:
        self._socket = socket.socket(fileno=os.dup(connection.pgconn.socket))
        # For the thread; on the event loop each call says that it does not wait.
        self._socket.settimeout(None)
        self._thread = ThreadPoolExecutor(1, "copy-data")
        self._sending = asyncio.Lock()
        self._pieces: list[bytes] = []
        self._cutter = Cutter(limit_bytes, shortener)
        self._is_busy = self._has_read_on = False
        self._closed: asyncio.Future[None] | None = None
        self.heard_s = time.monotonic()

    async def start(self, command: bytes) -> None:
        """Send the command; return when the server agrees. What follows its answer stays unread."""
        await self._send(b"Q", command + b"\0")
        while (kind := await self._next_kind()) in ASIDES:
            await self._pass()
        while kind not in {COPY_BOTH, COPY_OUT}:  # an error, whatever of it has come yet
            await self.collect(0)
            taken = self.take()
            if taken is not None and (ended := taken.block().ended) is not None:
                raise ended

    async def _next_kind(self) -> int:
        await readable(self._socket.fileno())
        kind = self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        if not kind:
            raise EOFError
        return kind[0]

    async def _pass(self) -> None:
        """Read one message, and forget it."""
        left = HEADER_BYTES
        header = b""
        while left:
            await readable(self._socket.fileno())
            found = self._socket.recv(min(left, GLANCE_BYTES), socket.MSG_DONTWAIT)
            if not found:
                raise EOFError
            left -= len(found)
            if len(header) < HEADER_BYTES:
                header += found
                if not left:
                    left = length_of(header) - 4

    async def collect(self, linger_s: float) -> int:
        """Read in glances, or in the thread while there is no pause."""
        if self._is_busy:
            loop = asyncio.get_running_loop()
            self._has_read_on = True
            piece = await loop.run_in_executor(self._thread, _read_on, self._socket, linger_s)
            self._is_busy = len(piece) >= PAUSE_BYTES
            return self._keep(piece)
        await readable(self._socket.fileno())
        until = time.monotonic() + linger_s
        nbytes = 0
        while True:
            nbytes += (found := self._keep(_read(self._socket)))
            self._is_busy = found >= BUSY_BYTES
            if self._is_busy or time.monotonic() >= until or self._is_over():
                return nbytes
            await asyncio.sleep(GLANCE_S)

    def _is_over(self) -> bool:
        """Whether nothing more is to be waited for, by the looks of it."""
        return bool(self._pieces) and _is_last(self._pieces[-1])

    def _keep(self, piece: bytes) -> int:
        if piece:
            self._pieces.append(piece)
            self.heard_s = time.monotonic()
        return len(piece)

    def take(self) -> Pieces | None:
        """Give the pieces."""
        return self.taken() if self._pieces else None

    def taken(self) -> Pieces:
        """Give the pieces, of which there may be none: what was left of those before them."""
        pieces, self._pieces = self._pieces, []
        return Pieces(pieces, self._cutter)

    async def send(self, message: bytes) -> None:
        """Send it; waits while the server does not read."""
        await self._send(b"d", message)

    async def _send(self, kind: bytes, content: bytes) -> None:
        data = _HEADER.pack(kind, len(content) + 4) + content
        async with self._sending:
            while data:
                with contextlib.suppress(BlockingIOError):
                    data = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
                if data:
                    await writable(self._socket.fileno())

    async def close(self) -> None:
        """Close it when the thread has read, for a moment at most. Twice is fine."""
        if self._closed is None:
            self._socket.settimeout(0)  # libpq says goodbye, and may not wait for that
            if self._has_read_on:
                self._closed = asyncio.wrap_future(self._thread.submit(self._socket.close))
                self._thread.shutdown(wait=False)
            else:
                self._socket.close()
                self._closed = asyncio.get_running_loop().create_future()
                self._closed.set_result(None)
        await asyncio.shield(self._closed)  # also if this is cancelled


@dataclass(frozen=True, slots=True)
class Pieces:
    """Bytes as they came (`copy_both.Collected`)."""

    pieces: list[bytes]
    cutter: Cutter

    def block(self) -> Block:
        """Cut them, and what was left of those before."""
        buffer, found = self.cut()
        ended = None if found.last is None else fault_of(found.last)
        return Block(buffer, found.starts, found.ends, ended)

    def cut(self) -> tuple[bytes, Cut]:
        """Give a buffer and the messages in it. Raises ProtocolError."""
        return self.cutter.feed(self.pieces)


def _read(source: socket.socket) -> bytes:
    """Read what there is. Raises EOFError if nothing comes any more."""
    try:
        found = source.recv(GLANCE_BYTES, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""
    if not found:
        raise EOFError
    return found


def _read_on(source: socket.socket, limit_s: float) -> bytes:
    """Read a turn, or for so long. Raises EOFError as `_read`; an end after data comes again."""
    if source.family == socket.AF_UNIX:
        return _read_in_looks(source, limit_s)
    source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(limit_s))
    source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, LOW_WATER_BYTES)
    try:
        found = source.recv(TURN_BYTES, socket.MSG_WAITALL)
    except BlockingIOError:
        return b""
    finally:
        with contextlib.suppress(OSError):
            source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)  # for the event loop
    if not found:
        raise EOFError
    return found


def _read_in_looks(source: socket.socket, limit_s: float) -> bytes:
    until = time.monotonic() + limit_s
    pieces: list[bytes] = []
    nbytes = 0
    while nbytes < TURN_BYTES and time.monotonic() < until:
        try:
            found = _read(source)
        except (EOFError, OSError):
            if pieces:  # the server may have said why
                break
            raise
        if found:
            pieces.append(found)
            nbytes += len(found)
        if _is_last(found):
            break
        if len(found) < GLANCE_BYTES:
            time.sleep(NAP_S)
    return b"".join(pieces)


def _is_last(piece: bytes) -> bool:
    return piece[-6:-1] == _READY


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("ll", whole, round((seconds - whole) * 1e6) or 1)


def fault_of(last: tuple[int, bytes]) -> psycopg.Error:
    """Make of the message that ended the data the error that libpq would."""
    kind, content = last
    if kind != ERROR:
        return psycopg.OperationalError("the server ended the stream: the connection is closed")
    info: dict[int, bytes | None] = {
        DiagnosticField(k): v for k, v in error_fields(content).items() if k in _FIELDS
    }
    text = info.get(DiagnosticField.MESSAGE_PRIMARY) or b""
    try:
        error = psycopg.errors.lookup((info.get(DiagnosticField.SQLSTATE) or b"").decode())
    except KeyError:
        error = psycopg.DatabaseError
    return error(text.decode("utf-8", "replace"), info=info)
