"""Backend messages inside the bytes of a socket: where each begins and ends.

Source: PostgreSQL documentation, "Message Formats": a type byte, an int32 length that counts
itself, the content.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ingestd.decode import native
from ingestd.errors import ProtocolError

Ints = NDArray[np.int64]

COPY_DATA, COPY_BOTH, COPY_OUT, ERROR, READY = (ord(c) for c in "dWHEZ")
_ENDS = frozenset(b"EcCZ")
"""ErrorResponse, CopyDone, CommandComplete, ReadyForQuery: no data follows."""
ASIDES = frozenset(b"NSA")
"""What may come at any time: notices, changed settings, notifications."""
_KNOWN = frozenset((COPY_DATA, COPY_BOTH, COPY_OUT)) | _ENDS | ASIDES
_HEADER = 5
_LENGTH = struct.Struct(">i")
_NONE: Ints = np.empty(0, np.int64)
_CHAIN = 1 << 15
"""So many messages are followed at a time."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The whole messages of a buffer.

    `starts`, `ends` (int64): contents of the CopyData messages. `used`: where the first message
    begins that is not whole. `last`: type and content of the message that ended the data.
    """

    starts: Ints
    ends: Ints
    used: int
    last: tuple[int, bytes] | None = None


def cut(buffer: bytes) -> Cut:
    """Find the messages; the buffer begins with one. Raises ProtocolError."""
    compiled = native.compiled
    chains: _Chains = _Likely(buffer) if compiled is None else _Followed(buffer, compiled)
    starts, ends = [_NONE], [_NONE]
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
        elif buffer[at] in _ENDS:
            last = buffer[at], buffer[content:end]
        at = end
    return Cut(np.concatenate(starts), np.concatenate(ends), at, last)


class _Chains(Protocol):
    def at(self, place: int) -> tuple[Ints, Ints] | None:
        """Give contents of CopyData messages that follow one another from there, if one is there.

        There may be more of them.
        """


class _Followed:
    """Finds every message from the one before it, by the compiled part."""

    def __init__(self, buffer: bytes, compiled: native.Compiled) -> None:
        self._buffer = buffer
        self._compiled = compiled
        self._starts, self._ends = np.empty(_CHAIN, np.int64), np.empty(_CHAIN, np.int64)

    def at(self, place: int) -> tuple[Ints, Ints] | None:
        found = self._compiled.follow(self._buffer, place, self._starts, self._ends)
        return (self._starts[:found].copy(), self._ends[:found].copy()) if found else None


class _Likely:
    """Looks at all places that may begin a message, without a step for each.

    Where one leads to the next, on and on, the chain is followed at once. Messages of 16 MB or more
    are left out: few other places have a 'd' before a 0.
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
    """Give the places that look like a whole CopyData message, and where each of them ends."""
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
    kind = buffer[at]
    length = int(_LENGTH.unpack_from(buffer, at + 1)[0])
    if length < _LENGTH.size or kind not in _KNOWN:
        msg = f"unknown message {buffer[at : at + _HEADER]!r} in the stream"
        raise ProtocolError(msg)
    return length


class Cutter:
    """Cuts a stream that comes in pieces, and keeps what is not whole yet. One thread at a time."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._needed = 0

    def feed(self, pieces: Sequence[bytes]) -> tuple[bytes, Cut]:
        """Give a buffer and its whole messages. Raises ProtocolError.

        A message is not looked for again before it is whole, however many pieces it takes.
        """
        self._held += pieces
        self._held_bytes += sum(map(len, pieces))
        if self._held_bytes < self._needed:
            return b"", Cut(_NONE, _NONE, 0)
        buffer = b"".join(self._held)
        found = cut(buffer)
        rest = buffer[found.used :]
        self._held, self._held_bytes = [rest], len(rest)
        is_over = found.last is not None  # what follows is the caller's no more
        self._needed = _HEADER if is_over or len(rest) < _HEADER else 1 + _length(rest, 0)
        return buffer, found


def error_fields(content: bytes) -> dict[int, bytes]:
    """Give an ErrorResponse's fields by their type byte."""
    return {field[0]: field[1:] for field in content.split(b"\0") if field}
