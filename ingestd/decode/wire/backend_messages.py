"""Splitting of a socket's bytes into backend messages.

A message's length is known before its content arrives. A length that no server sends is a
ProtocolError. A message over the limit is skipped piece by piece, and never buffered completely.
A message out of order is a ProtocolError, too: `FOLLOWING` defines the order.

Source: PostgreSQL documentation, "Message Formats": a type byte, an int32 length that counts
itself, the content; "Message Flow", COPY Operations.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ingestd.decode import native
from ingestd.decode.wire.shortener import DroppedMessage, Shortener
from ingestd.model.errors import ProtocolError

Ints = NDArray[np.int64]

COPY_DATA, COPY_BOTH, COPY_OUT, ERROR, READY = (ord(c) for c in "dWHEZ")
_ENDS = frozenset(b"EcCZ")
"""ErrorResponse, CopyDone, CommandComplete, ReadyForQuery: no data follows."""
ASIDES = frozenset(b"NSA")
"""Messages that may arrive at any time: notices, changed settings, notifications."""
_BEGINS = frozenset((COPY_BOTH, COPY_OUT))
_KNOWN = frozenset((COPY_DATA,)) | _BEGINS | _ENDS | ASIDES
QUERY = ord("Q")
FOLLOWING = {
    QUERY: _BEGINS | {ERROR},
    # A walsender that shuts down ends the command without CopyDone. libpq reports none for a COPY;
    # a binary one can do without it, because it has a trailer.
    COPY_OUT: frozenset(b"cCE"),
    COPY_BOTH: frozenset(b"cCE"),
    ord("c"): frozenset(b"CE"),
    ord("C"): frozenset(b"ZE"),
    ERROR: frozenset(b"ZE"),
    READY: frozenset[int](),
}
"""By the last message that was neither data nor an aside: the messages that may follow. Data may
follow only `COPY_OUT` and `COPY_BOTH`; asides may follow any message."""
HEADER_BYTES = _HEADER = 5
MOST_BYTES = 1 << 30
"""Limit of a message: the server allocates each in one piece (MaxAllocSize)."""
MOST_ASIDE_BYTES = 1 << 16
"""Limit of an error, a notice and the like; the rest is not kept."""
TEXT_BYTES = 2000
"""Limit of each text of an error."""
_SQLSTATE = ord("C")
_CODE = re.compile(rb"[0-9A-Z]{5}")
_LENGTH = struct.Struct(">i")
_NONE: Ints = np.empty(0, np.int64)
_CHAIN = 1 << 15
"""Messages located per step."""


@dataclass(frozen=True, slots=True)
class CutMessages:
    """The complete messages of a buffer.

    `starts`, `ends` (int64): contents of the CopyData messages. `used`: start of the first
    incomplete message. `last`: type and content of the message that ended the data. `passed_bytes`:
    size of the largest message over the limit, complete or not; 0 if there is none. `begun`: types
    of the messages that begin data, with the number of data messages before each.
    """

    starts: Ints
    ends: Ints
    used: int
    last: tuple[int, bytes] | None = None
    passed_bytes: int = 0
    begun: tuple[tuple[int, int], ...] = ()


def cut(buffer: bytes) -> CutMessages:
    """Locate the messages; the buffer must start with one. Raises ProtocolError."""
    compiled = native.compiled
    chains: _Chains = _Likely(buffer) if compiled is None else _Followed(buffer, compiled)
    starts, ends = [_NONE], [_NONE]
    begun: list[tuple[int, int]] = []
    last = None
    at = 0
    while last is None and len(buffer) - at >= _HEADER:
        chain = chains.at(at)
        if chain is not None:
            starts.append(chain[0])
            ends.append(chain[1])
            at = int(chain[1][-1])
            continue
        content, end = at + _HEADER, at + 1 + _length(buffer, at)
        if end > len(buffer):
            break
        if buffer[at] == COPY_DATA:
            starts.append(np.array([content]))
            ends.append(np.array([end]))
        elif buffer[at] in _BEGINS:
            begun.append((buffer[at], sum(map(len, starts))))
        elif buffer[at] in _ENDS:
            last = buffer[at], buffer[content:end]
        at = end
    return CutMessages(np.concatenate(starts), np.concatenate(ends), at, last, begun=tuple(begun))


class _Chains(Protocol):
    def at(self, place: int) -> tuple[Ints, Ints] | None:
        """Return the contents of consecutive CopyData messages from `place` on; None if none.

        More of them may follow.
        """


class _Followed:
    """Locates every message from the one before it, using the compiled extension."""

    def __init__(self, buffer: bytes, compiled: native.NativeFunctions) -> None:
        self._buffer = buffer
        self._compiled = compiled
        self._starts, self._ends = np.empty(_CHAIN, np.int64), np.empty(_CHAIN, np.int64)

    def at(self, place: int) -> tuple[Ints, Ints] | None:
        found = self._compiled.follow(self._buffer, place, self._starts, self._ends)
        return (self._starts[:found].copy(), self._ends[:found].copy()) if found else None


class _Likely:
    """Checks all places that may begin a message, without a step for each.

    Where each candidate leads to the next, the complete chain is taken at once. Messages of 16 MB
    or more are skipped: they would need candidates other than a 'd' before a 0.
    """

    def __init__(self, buffer: bytes) -> None:
        self._places, self._follows = _likely(buffer)
        is_break = np.append(self._follows[:-1] != self._places[1:], True)
        self._breaks = np.flatnonzero(is_break)

    def at(self, place: int) -> tuple[Ints, Ints] | None:
        index = int(np.searchsorted(self._places, place))
        if index == len(self._places) or self._places[index] != place:
            return None
        run = slice(index, int(self._breaks[np.searchsorted(self._breaks, index)]) + 1)
        return self._places[run] + _HEADER, self._follows[run]


def _likely(buffer: bytes) -> tuple[Ints, Ints]:
    """Return the places that look like a complete CopyData message, and the end of each."""
    size = len(buffer)
    if size < _HEADER:
        return _NONE, _NONE
    data = np.frombuffer(buffer, np.uint8)
    places = np.flatnonzero(data[: size - _HEADER + 1] == COPY_DATA)
    places = places[data[places + 1] == 0]
    lengths = np.ndarray((size - 3,), ">i4", buffer, 0, (1,))[places + 1]
    follows = places + 1 + lengths
    good = (lengths >= _LENGTH.size) & (follows <= size)
    return places[good], follows[good]


def _length(buffer: bytes, at: int) -> int:
    if buffer[at] not in _KNOWN:
        msg = f"unknown message {buffer[at : at + _HEADER]!r} in the stream"
        raise ProtocolError(msg)
    return length_of(buffer[at : at + _HEADER])


def length_of(header: bytes) -> int:
    """Return the length in a message's header. Raises ProtocolError."""
    length = int(_LENGTH.unpack_from(header, 1)[0])
    if not _LENGTH.size <= length <= MOST_BYTES:
        msg = f"message {header[:1]!r} has an invalid length of {length} bytes"
        raise ProtocolError(msg)
    return length


class Cutter:
    """Cuts a query's answer, which arrives in pieces, and keeps incomplete messages.

    Not thread-safe. A CopyData message of more than `limit_bytes` is not kept, but replaced by the
    output of `shortener`; by default that is nothing.
    """

    def __init__(
        self, limit_bytes: int = MOST_BYTES, shortener: Callable[[], Shortener] = DroppedMessage
    ) -> None:
        self._before = QUERY
        self._limit_bytes = limit_bytes
        self._shortener = shortener
        self._held: list[bytes] = []
        self.held_bytes = 0
        self._needed = 0
        self._passing: _Passing | None = None

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes, CutMessages]:
        """Return a buffer and its complete messages. Raises ProtocolError.

        An incomplete message is not scanned again before it is complete, however many pieces it
        takes.
        """
        self._held += pieces
        self.held_bytes += sum(map(len, pieces))
        passed_bytes = 0
        if self._passing is not None:
            passed_bytes = self._passing.row_bytes
            self._held = self._passing.consume(self._held)
            self.held_bytes = sum(map(len, self._held))
            if not self._passing.is_whole:
                return b"", CutMessages(_NONE, _NONE, 0, passed_bytes=passed_bytes)
            self._passing, self._needed = None, 0
        if self.held_bytes < self._needed:
            return b"", CutMessages(_NONE, _NONE, 0, passed_bytes=passed_bytes)
        buffer = b"".join(self._held)
        found = cut(buffer)
        self._check_order(found)
        rest = buffer[found.used :]
        self._held, self.held_bytes = [rest], len(rest)
        is_over = found.last is not None  # what follows no longer belongs to the caller
        self._needed = _HEADER if is_over or len(rest) < _HEADER else 1 + _length(rest, 0)
        if self._needed > _HEADER and self._is_large(rest):
            if rest[0] == COPY_DATA:
                self._check_data(1)
            self._passing = self._pass(rest)
            passed_bytes = max(passed_bytes, self._passing.row_bytes)
        return buffer, replace(found, passed_bytes=passed_bytes)

    def _check_order(self, messages: CutMessages) -> None:
        """Record the messages. Raises ProtocolError for one that may not follow its predecessor."""
        count = 0
        for kind, data_before in messages.begun:
            self._check_data(data_before - count)
            self._follow(kind)
            count = data_before
        self._check_data(len(messages.starts) - count)
        if messages.last is not None:
            self._follow(messages.last[0])

    def _follow(self, kind: int) -> None:
        if kind not in FOLLOWING[self._before]:
            raise _out_of_order(kind, self._before)
        self._before = kind

    def _check_data(self, count: int) -> None:
        if count and self._before not in _BEGINS:
            raise _out_of_order(COPY_DATA, self._before)

    def _is_large(self, rest: bytes) -> bool:
        """Return whether the message at the start of `rest` is over the limit."""
        content_bytes = self._needed - _HEADER
        return content_bytes > (self._limit_bytes if rest[0] == COPY_DATA else MOST_ASIDE_BYTES)

    def _pass(self, rest: bytes) -> _Passing:
        kind = rest[0]
        if kind == COPY_DATA:
            shortener = self._shortener()
        elif kind == ERROR:
            shortener = _Beginning()
        elif kind in ASIDES:
            shortener = DroppedMessage()
        else:
            msg = f"message {rest[:1]!r} has an invalid length of {self._needed - 1} bytes"
            raise ProtocolError(msg)
        self._held, self.held_bytes = [rest[_HEADER:]], len(rest) - _HEADER
        return _Passing(kind, self._needed - _HEADER, shortener)


def _out_of_order(kind: int, before: int) -> ProtocolError:
    return ProtocolError(f"message {bytes([kind])!r} out of order, after {bytes([before])!r}")


class _Passing:
    """A message of `nbytes` that is not buffered. `row_bytes`: its size if it is CopyData."""

    def __init__(self, kind: int, nbytes: int, shortener: Shortener) -> None:
        self.row_bytes = nbytes if kind == COPY_DATA else 0
        self._left = nbytes
        self._kind = kind
        self._shortener = shortener

    @property
    def is_whole(self) -> bool:
        return self._left == 0

    def consume(self, pieces: Sequence[bytes]) -> list[bytes]:
        """Consume the message's bytes; return its replacement and the bytes that follow it."""
        rest: list[bytes] = []
        for piece in pieces:
            taken = min(self._left, len(piece))
            if taken:
                self._shortener.feed(memoryview(piece)[:taken])
                self._left -= taken
            if taken < len(piece):
                rest.append(piece[taken:])
        if self._left:
            return []
        kind = bytes([self._kind])
        found = self._shortener.finish()
        return [kind + _LENGTH.pack(len(each) + 4) + each for each in found] + rest


class _Beginning:
    """Keeps the beginning of an error."""

    def __init__(self) -> None:
        self._kept = b""

    def feed(self, piece: memoryview) -> None:
        self._kept += bytes(piece[: MOST_ASIDE_BYTES - len(self._kept)])

    def finish(self) -> list[bytes]:
        return [self._kept]


def error_fields(content: bytes) -> dict[int, bytes]:
    """Return an ErrorResponse's fields by their type byte, in UTF-8, at most `TEXT_BYTES` each.

    An invalid SQLSTATE is omitted.
    """
    fields = {field[0]: _shortened(field[1:]) for field in content.split(b"\0") if field}
    if not _CODE.fullmatch(fields.get(_SQLSTATE, b"00000")):
        del fields[_SQLSTATE]
    return fields


def _shortened(text: bytes) -> bytes:
    """Return the beginning of a text. The replacement for an invalid byte takes three bytes."""
    valid = text[:TEXT_BYTES].decode("utf-8", "replace").encode()
    return valid[:TEXT_BYTES].decode("utf-8", "ignore").encode()
