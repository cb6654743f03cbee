"""Open transactions, buffered until they commit: in memory, then in unlinked files.

Messages of a transaction are appended, and removed from the end when a subtransaction aborts. When
all transactions together exceed `memory_bytes`, the largest is written to its file, in frames; a
frame that must be shortened is read back first. Files are created in TMPDIR (else in Python's
tempfile default, /tmp) and unlinked at once, so that none remains however the process ends.
Nothing here outlives a connection: the slot sends it all again.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ingestd.decode.pgoutput.streamed_transactions import OpenMessages, count_before
from ingestd.model.errors import TransientError

FRAME_BYTES = 4 << 20
_OVERHEAD_BYTES = 1000
"""About what a piece in memory takes beyond its content."""
_HEADER = struct.Struct("<qqq")
_INDEX_TYPE = np.dtype("<u4")


@dataclass(slots=True)
class SpoolPolicy:
    """How much of open transactions may be buffered; 0: none, they are sent after their commit.

    `is_refused`: the limit was exceeded, there was no room, or the server failed: the next
    connection does without, the one after it tries again.
    """

    limit_bytes: int
    is_refused: bool = False

    @property
    def takes_open_transactions(self) -> bool:
        """True if the next connection asks for open transactions."""
        return self.limit_bytes > 0 and not self.is_refused

    def connected(self) -> None:
        """Record that a connection was made under this policy; a failed attempt does not count."""
        self.is_refused = False


@dataclass(slots=True)
class _Kept:
    """One transaction: `frames` in its file, each with its end and last xid; then `pieces`."""

    frame_bytes: int
    file: _UnlinkedFile | None = None
    frames: list[tuple[int, int]] = field(default_factory=list)
    pieces: list[OpenMessages] = field(default_factory=list)
    memory_bytes: int = 0

    @property
    def file_bytes(self) -> int:
        return self.frames[-1][0] if self.frames else 0

    def push(self, messages: OpenMessages) -> None:
        self.pieces.append(messages)
        self.memory_bytes += _size(messages)

    def write(self) -> None:
        """Move what is in memory to the file."""
        if self.file is None:
            self.file = _UnlinkedFile()
        start = end = self.file_bytes
        for n, piece in enumerate(self.pieces):
            end = self.file.write(piece, end)
            if end - start >= self.frame_bytes or n == len(self.pieces) - 1:
                self.frames.append((end, int(piece.xids[-1])))
                start = end
        self.pieces, self.memory_bytes = [], 0

    def truncate(self, subxid: int) -> None:
        """Drop the messages after the last one with an id before `subxid`."""
        while self.pieces or self._read_back(subxid):
            last = self.pieces.pop()
            self.memory_bytes -= _size(last)
            kept = count_before(last.xids, subxid)
            if kept:
                self.push(last if kept == len(last) else last.first(kept))
                return

    def _read_back(self, subxid: int) -> bool:
        """Move the last frame to memory, if some of it must be dropped."""
        if not self.frames or count_before(np.array([self.frames[-1][1]], np.uint32), subxid):
            return False
        end, _ = self.frames.pop()
        assert self.file is not None
        for piece in self.file.read(self.file_bytes, end):
            self.push(piece)
        self.file.truncate(self.file_bytes)
        return True

    def messages(self) -> Iterator[OpenMessages]:
        if self.file is not None:
            yield from self.file.read(0, self.file_bytes)
        yield from self.pieces


class FileSpool:
    """The `ingestd.decode.pgoutput.streamed_transactions.Spool` of one connection.

    Raises TransientError when `policy` allows no more or a file can't be written. It records that
    in `policy`, and the next connection does without.
    """

    def __init__(
        self,
        policy: SpoolPolicy,
        *,
        memory_bytes: int,
        where: str,
        frame_bytes: int = FRAME_BYTES,
    ) -> None:
        self._policy = policy
        self._frame_bytes = frame_bytes
        self._memory_limit_bytes = memory_bytes
        self._where = where
        self._kept: dict[int, _Kept] = {}

    @property
    def memory_bytes(self) -> int:
        """The bytes buffered in memory."""
        return sum(kept.memory_bytes for kept in self._kept.values())

    @property
    def nbytes(self) -> int:
        """The bytes buffered, in memory and in files."""
        return sum(kept.memory_bytes + kept.file_bytes for kept in self._kept.values())

    def append_messages(self, xid: int, messages: OpenMessages) -> None:
        """Buffer messages that follow those of earlier calls."""
        kept = self._kept
        kept.setdefault(xid, _Kept(self._frame_bytes)).push(messages)
        if self.nbytes > self._policy.limit_bytes:
            raise self._refusal(f"they exceed {self._policy.limit_bytes} bytes")
        while self.memory_bytes > self._memory_limit_bytes:
            largest = max(kept.values(), key=lambda one: one.memory_bytes)
            with self._errors():
                largest.write()

    def abort(self, xid: int, subxid: int) -> None:
        """Drop what the abort of a subtransaction undoes."""
        kept = self._kept.get(xid)
        if kept is not None:
            with self._errors():
                kept.truncate(subxid)

    def drop(self, xid: int) -> None:
        """Drop a transaction."""
        self._kept.pop(xid, None)

    def pop_transaction(self, xid: int) -> Iterator[OpenMessages]:
        """Yield the messages of a transaction, in order, and drop it."""
        kept = self._kept.pop(xid, None)
        if kept is not None:
            with self._errors():
                yield from kept.messages()

    def close(self) -> None:
        """Drop all of it, which also frees the room that its files take.

        A thread may still be writing: it holds its transactions itself, until it is done.
        """
        self._kept = {}

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._refusal(f"{_folder()}: {error.strerror or error}") from error

    def _refusal(self, why: str) -> TransientError:
        self._policy.is_refused = True
        return TransientError(
            f"{self._where}: can't buffer transactions that are still open ({self.nbytes} bytes): "
            f"{why}; the next connection has them sent after they commit",
            reason="open_transactions",
            remedy="make room there, or set TMPDIR to a folder with more; "
            "open_transaction_spool limits how much is buffered (0: none)",
        )


class _UnlinkedFile:
    """A file that only this process can see, closed with its last reference.

    `FileSpool.close` drops the references that outlast a connection.
    """

    def __init__(self) -> None:
        self._fd, path = tempfile.mkstemp(prefix="ingestd-")
        weakref.finalize(self, os.close, self._fd)
        os.unlink(path)  # noqa: PTH108

    def write(self, messages: OpenMessages, offset: int) -> int:
        """Write at an offset; return the end of what was written."""
        index = np.stack((messages.starts, messages.ends, messages.xids)).astype(_INDEX_TYPE)
        header = _HEADER.pack(len(messages.buffer), len(messages), messages.number)
        for part in (header, index.tobytes(), messages.buffer):
            view = memoryview(part)
            while view:
                written = os.pwrite(self._fd, view, offset)
                view, offset = view[written:], offset + written
        return offset

    def read(self, start: int, end: int) -> Iterator[OpenMessages]:
        """Yield what was written there."""
        while start < end:
            nbytes, count, number = _HEADER.unpack(self._read_at(start, _HEADER.size))
            start += _HEADER.size
            index_bytes = 3 * count * _INDEX_TYPE.itemsize
            index = np.frombuffer(self._read_at(start, index_bytes), _INDEX_TYPE).reshape(3, count)
            start += index_bytes
            starts, ends = index[:2].astype(np.int64)
            buffer = self._read_at(start, nbytes)
            start += nbytes
            yield OpenMessages(buffer, starts, ends, index[2].astype(np.uint32), number)

    def _read_at(self, start: int, nbytes: int) -> bytes:
        parts = []
        while nbytes > 0:
            part = os.pread(self._fd, nbytes, start)
            if not part:
                msg = "the file ends too early"
                raise OSError(msg)
            parts.append(part)
            start, nbytes = start + len(part), nbytes - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def truncate(self, nbytes: int) -> None:
        os.ftruncate(self._fd, nbytes)


def _size(messages: OpenMessages) -> int:
    return len(messages.buffer) + 3 * _INDEX_TYPE.itemsize * len(messages) + _OVERHEAD_BYTES


def _folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return "no folder for temporary files"
