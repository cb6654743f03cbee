"""Backend messages inside the bytes of a socket: where each begins and ends.

Source: PostgreSQL documentation, "Message Formats": a type byte, an int32 length that counts
itself, the content.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    """Find the messages; the buffer begins with one. Raises ProtocolError.

    Every message is found from the one before it. So that this takes no step per message, all
    places are looked at that may begin a CopyData message; where one leads to the next, on and on,
    the chain is followed at once.
    """
    places, follows = _likely(buffer)
    breaks = np.flatnonzero(np.append(follows[:-1] != places[1:], True))
    starts, ends = [_NONE], [_NONE]
    last = None
    at = 0
    while last is None and len(buffer) - at >= _HEADER:
        index = int(np.searchsorted(places, at))
        if index < len(places) and places[index] == at:
            run = slice(index, int(breaks[np.searchsorted(breaks, index)]) + 1)
            starts.append(places[run] + _HEADER)
            ends.append(follows[run])
            at = int(follows[run][-1])
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


def _likely(buffer: bytes) -> tuple[Ints, Ints]:
    """Give the places that look like a whole CopyData message, and where each of them ends.

    Those of 16 MB or more are left out: few other places have a 'd' before a 0.
    """
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
