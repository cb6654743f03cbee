"""Reading of COPY data without libpq: raw bytes of the connection, cut into messages later.

A walsender sends each message separately, so any per-message work is done millions of times. Here
there is none, except decryption. Sparse data is read on the event loop, a few times while waiting
for more. Continuous data is collected by a thread that is not woken for each message, because the
wake-up is the largest cost, for the server too. The reader must not pause for long: a unix socket
buffers 277 messages, and the server stops while it is full.

libpq must be idle when a channel takes over its socket or TLS session, and sees nothing of what is
read. Afterwards the connection is closed, or reused once the server is ready again (`copy_out`).
Source: PostgreSQL documentation, "Message Formats", "Error and Notice Message Fields".
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg.pq import DiagnosticField

from ingestd.decode.wire.backend_messages import (
    ASIDES,
    COPY_BOTH,
    COPY_OUT,
    ERROR,
    HEADER_BYTES,
    MOST_BYTES,
    CutMessages,
    Cutter,
    error_fields,
    length_of,
)
from ingestd.decode.wire.shortener import DroppedMessage, Shortener
from ingestd.postgres.transport.channels.channel import Channel, is_last

GLANCE_S = 0.005
"""The read interval of the event loop: a unix socket is full with 277 messages."""
BUSY_BYTES = 1 << 13
"""After a read of this size, continuous data is expected."""
PAUSE_BYTES = 1 << 17
"""After a turn that timed out with less than this, the event loop takes over."""
_HEADER = struct.Struct(">ci")
_FIELDS = frozenset(int(field) for field in DiagnosticField)


@dataclass(frozen=True, slots=True)
class StreamBlock:
    """CopyData messages in one buffer, delimited by `starts` and `ends` (int64).

    `ended`: the error with which the server ended the stream after them.
    """

    buffer: bytes
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    ended: psycopg.Error | None = None


class CopyReader:
    """Reads and writes the CopyData messages of a channel. Raises psycopg.Error, OSError, EOFError.

    A message of more than `limit_bytes` is skipped and replaced by the output of `shortener`.
    `heard_s`: when data last arrived, by the monotonic clock.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        limit_bytes: int = MOST_BYTES,
        shortener: Callable[[], Shortener] = DroppedMessage,
    ) -> None:
        self._channel = channel
        self._thread = ThreadPoolExecutor(1, "copy-data")
        self._sending = asyncio.Lock()
        self._pieces: list[bytes] = []
        self._early_bytes = 0
        self._cutter = Cutter(limit_bytes, shortener)
        self._is_busy = self.has_read_on = False
        self._closed: asyncio.Future[None] | None = None
        self.heard_s = time.monotonic()

    async def start(self, command: bytes) -> None:
        """Send the command; return when the server agrees: data may arrive."""
        await self._send(b"Q", command + b"\0")
        kind = await self._answer()
        while kind not in {COPY_BOTH, COPY_OUT}:  # an error, perhaps not complete yet
            taken = self.read_nowait()
            if taken is not None and (ended := taken.block().ended) is not None:
                raise ended
            await self.collect(0)

    async def _answer(self) -> int:
        """Return the type of the first message that answers. It and all later bytes are kept."""
        found, at = b"", 0
        while True:
            while len(found) - at < HEADER_BYTES:
                found, at = found[at:] + await self._read_next(), 0
                await asyncio.sleep(0)  # endless notices must not block the event loop
            if found[at] not in ASIDES:
                break
            at += 1 + length_of(found[at : at + HEADER_BYTES])
            while at > len(found):  # a notice may exceed the buffer limit
                at -= len(found)
                found = await self._read_next()
                await asyncio.sleep(0)
        found = found[at:]
        self._pieces, self._early_bytes = [found], len(found)
        return found[0]

    async def _read_next(self) -> bytes:
        """Wait for the next bytes and return them."""
        while not (found := self._channel.read()):
            wait = _writable if self._channel.wants_write else _readable
            await wait(self._channel.fileno())
            self.heard_s = time.monotonic()  # part of a TLS record is a sign of life, too
        self.heard_s = time.monotonic()
        return found

    async def collect(self, linger_s: float) -> int:
        """Wait for data, then read for about `linger_s` or a turn. Return the number of bytes.

        Reads on the event loop, or in the thread while data is continuous.
        """
        if self._is_busy:
            loop = asyncio.get_running_loop()
            self.has_read_on = True
            pieces = await loop.run_in_executor(self._thread, self._channel.read_turn, linger_s)
            nbytes = sum(map(self._keep, pieces))
            self._is_busy = nbytes >= PAUSE_BYTES
            return nbytes
        nbytes, self._early_bytes = self._early_bytes, 0
        found = 0 if nbytes else self._keep(await self._read_next())
        until = time.monotonic() + linger_s
        while True:
            nbytes += found
            self._is_busy = found >= BUSY_BYTES
            if self._is_busy or time.monotonic() >= until or self._is_over():
                return nbytes
            await asyncio.sleep(GLANCE_S)
            found = self._keep(self._channel.read())

    def _is_over(self) -> bool:
        """Return whether no more data can be expected."""
        return bool(self._pieces) and is_last(self._pieces[-1])

    def _keep(self, piece: bytes) -> int:
        if piece:
            self._pieces.append(piece)
            self.heard_s = time.monotonic()
        return len(piece)

    def read_nowait(self) -> ReceivedBytes | None:
        """Return what has been read since the last call; None for nothing."""
        return self.taken() if self._pieces else None

    def taken(self) -> ReceivedBytes:
        """Return the pieces read. Even without new ones, earlier bytes may remain to be cut."""
        pieces, self._pieces, self._early_bytes = self._pieces, [], 0
        return ReceivedBytes(pieces, self._cutter)

    async def send(self, message: bytes) -> None:
        """Send a CopyData message; waits while the server does not read.

        After a cancellation the connection is unusable.
        """
        await self._send(b"d", message)

    async def _send(self, kind: bytes, content: bytes) -> None:
        data = _HEADER.pack(kind, len(content) + 4) + content
        async with self._sending:
            while data:
                data = data[self._channel.write(data) :]
                if data:
                    await _writable(self._channel.fileno())

    async def close(self) -> None:
        """Release the connection; its owner closes it. May be called at any time, and twice."""
        if self._closed is None:
            self._channel.release()
            if self.has_read_on:  # the thread reads for at most a moment
                self._closed = asyncio.wrap_future(self._thread.submit(self._channel.close))
                self._thread.shutdown(wait=False)
            else:
                self._channel.close()
                self._closed = asyncio.get_running_loop().create_future()
                self._closed.set_result(None)
        await asyncio.shield(self._closed)  # even if this is cancelled


@dataclass(frozen=True, slots=True)
class ReceivedBytes:
    """Received bytes, to be cut in another thread, in the order in which they were read."""

    pieces: list[bytes]
    cutter: Cutter

    def block(self) -> StreamBlock:
        """Cut them into messages, with what earlier bytes left over. Raises ProtocolError."""
        buffer, found = self.cut()
        ended = None if found.last is None else fault_of(found.last)
        return StreamBlock(buffer, found.starts, found.ends, ended)

    def cut(self) -> tuple[bytes, CutMessages]:
        """Return a buffer and the messages in it. Raises ProtocolError."""
        return self.cutter.feed(self.pieces)


def fault_of(last: tuple[int, bytes]) -> psycopg.Error:
    """Convert the message that ended the data into the error that libpq would raise."""
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


async def _readable(socket: int) -> None:
    """Return when the socket, which libpq owns, is readable."""
    loop = asyncio.get_running_loop()
    await _ready(loop.add_reader, loop.remove_reader, socket)


async def _writable(socket: int) -> None:
    """Return when the socket is writable."""
    loop = asyncio.get_running_loop()
    await _ready(loop.add_writer, loop.remove_writer, socket)


async def _ready(
    add: Callable[[int, Callable[[], None]], object],
    remove: Callable[[int], object],
    socket: int,
) -> None:
    ready = asyncio.Event()
    add(socket, ready.set)
    try:
        await ready.wait()
    finally:
        remove(socket)
