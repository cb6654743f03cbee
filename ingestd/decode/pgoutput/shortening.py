"""Shortening of changes that are too large to buffer, value by value, while they arrive.

Each value that does not fit is replaced by the mark of an unchanged, unsent one. A message of our
own follows the change and lists these values; the server never sends its type. So the decoder knows
whether a captured value is missing (`row_limit.py`)::

    change    as the server sends it, with 'u' for omitted values
    'L'       in a segment of an open transaction its id, int4
              OID of the relation, int4
              for each omitted value: number of the column, int2; its size in bytes, int4

Source: PostgreSQL documentation, "Logical Replication Message Formats", Insert, Update, Delete,
TupleData.
"""

from __future__ import annotations

import struct
from collections.abc import Generator

from ingestd.model.errors import ProtocolError

SHORTENED = ord("L")
"""The type of the message that follows a shortened change."""
_CHANGES, _UPDATE, _MESSAGE = b"IUD", ord("U"), ord("M")
_AFTER = "bytes after the tuples of a large change"
_TUPLES = b"NKO"
_FIRST = {ord("I"): b"N", ord("U"): b"NKO", ord("D"): b"KO"}
"""By change type: kinds of its first tuple. In an update, the new tuple follows an old one."""
_TEXT, _NULL, _UNCHANGED = b"t", b"n", b"u"
_OID = _XID = 4
_COUNT, _LENGTH = struct.Struct(">h"), struct.Struct(">i")
_VALUE = struct.Struct(">Hi")

_Taking = Generator[int, bytes, list[bytes]]
"""Requests so many bytes, or with a negative number skips them; returns messages."""


class _Taker:
    """A `Shortener` that feeds a generator, in portions of as many bytes as it requests."""

    def __init__(self, taking: _Taking) -> None:
        self._taking = taking
        self._held = bytearray()
        self._result: list[bytes] | None = None
        self._wanted = next(taking)

    def feed(self, piece: memoryview) -> None:
        """Consume the next piece. Raises ProtocolError."""
        at = 0
        while at < len(piece):
            if self._result is not None:
                raise ProtocolError(_AFTER)
            if self._wanted < 0:
                passed = min(-self._wanted, len(piece) - at)
                self._wanted += passed
                at += passed
                if self._wanted == 0:
                    self._feed_part(b"")
                continue
            taken = min(self._wanted - len(self._held), len(piece) - at)
            self._held += piece[at : at + taken]
            at += taken
            if len(self._held) == self._wanted:
                given, self._held = bytes(self._held), bytearray()
                self._feed_part(given)

    def finish(self) -> list[bytes]:
        """Return the contents of the messages that replace it. Raises ProtocolError."""
        if self._result is None:
            try:
                self._taking.throw(EOFError())
            except StopIteration as ended:
                return list(ended.value)
            except EOFError as error:
                msg = "a large change ends in the middle of a value"
                raise ProtocolError(msg) from error
        return self._result or []

    def _feed_part(self, given: bytes) -> None:
        try:
            self._wanted = self._taking.send(given)
        except StopIteration as ended:
            self._result = list(ended.value)


class StreamedChange(_Taker):
    """Shortens a change in the stream (XLogData). `room_bytes`: limit for its kept values."""

    def __init__(self, room_bytes: int) -> None:
        super().__init__(_streamed(room_bytes))


class CopiedChange(_Taker):
    """Shortens a change that is the only field of a row in a binary COPY."""

    def __init__(self, room_bytes: int) -> None:
        super().__init__(_copied(room_bytes))


def _streamed(room_bytes: int) -> _Taking:
    header = yield 25
    if header[:1] != b"w":
        msg = f"a message of type {header[:1]!r} is too large in a stream"
        raise ProtocolError(msg)
    messages = yield from _changed(room_bytes)
    return [header + message for message in messages]


def _copied(room_bytes: int) -> _Taking:
    head = yield 6
    header = b""
    if head == b"PGCOPY":  # the COPY's header precedes its first row
        header = head + (yield 13)
        if header[11:] != bytes(8):
            msg = "malformed header of COPY data"
            raise ProtocolError(msg)
        head = yield 6
    if head[:2] != b"\0\x01":
        msg = "a row of another width is too large in a COPY"
        raise ProtocolError(msg)
    messages = yield from _changed(room_bytes)
    rows = [b"\0\x01" + _LENGTH.pack(len(message)) + message for message in messages]
    if header:
        rows[:1] = [header + b"".join(rows[:1])]
    return rows


def _changed(room_bytes: int) -> _Taking:
    """Parse a pgoutput message. A logical message is dropped, because any role may write one."""
    head = yield 10
    kind = head[0]
    if kind == _MESSAGE:  # none of ours is this large (`messages.MOST_DDL_BYTES`)
        while True:
            try:
                yield -(1 << 31)
            except EOFError:
                return []
    if kind not in _CHANGES:
        msg = f"a message of type {head[:1]!r} is too large"
        raise ProtocolError(msg)
    has_xid = _is_in_segment(head)
    ids = 1 + _OID + _XID * has_xid
    out, omitted = bytearray(head[:ids]), bytearray(bytes([SHORTENED]) + head[1:ids])
    ahead = bytearray(head[ids:])
    expected = _FIRST[kind]
    while expected:
        begun = yield from _next(ahead, 1)
        if begun not in expected:
            msg = "unexpected kind of tuple in a large change"
            raise ProtocolError(msg)
        out += begun
        room_bytes = yield from _tuple(ahead, out, omitted, room_bytes)
        expected = b"N" if kind == _UPDATE and begun != b"N" else b""
    if ahead:
        raise ProtocolError(_AFTER)
    return [bytes(out), bytes(omitted)]


def _is_in_segment(head: bytes) -> bool:
    """Return whether the transaction's id precedes the relation's: the tuple's kind is then at 9.

    Otherwise it is at 5, and at 9 is a column's kind or the upper byte of a length, neither of
    which is a tuple's kind. The exception is an old tuple of one column without a text: the new one
    begins at 9 then.
    """
    is_old_before_new = head[5] in b"KO" and head[6:8] == b"\0\1" and head[8] in b"nu"
    return head[9] in _TUPLES and not (is_old_before_new and head[9:10] == b"N")


def _next(ahead: bytearray, count: int) -> Generator[int, bytes, bytes]:
    """Read so many bytes, buffered ones first."""
    if len(ahead) < count:
        ahead += yield count - len(ahead)
    found = bytes(ahead[:count])
    del ahead[:count]
    return found


def _tuple(
    ahead: bytearray, out: bytearray, omitted: bytearray, room_bytes: int
) -> Generator[int, bytes, int]:
    """Copy a tuple after its kind; return the remaining room."""
    counted = yield from _next(ahead, _COUNT.size)
    out += counted
    for column in range(_COUNT.unpack(counted)[0]):
        kind = yield from _next(ahead, 1)
        if kind in {_NULL, _UNCHANGED}:
            out += kind
            continue
        (length,) = _LENGTH.unpack((yield from _next(ahead, _LENGTH.size)))
        if kind != _TEXT or length < 0:
            msg = "tuple column that is neither text, null nor unchanged, or of a negative length"
            raise ProtocolError(msg)
        if length <= room_bytes:
            out += kind + _LENGTH.pack(length)
            out += yield from _next(ahead, length)
            room_bytes -= length
        else:
            out += _UNCHANGED
            omitted += _VALUE.pack(column, length)
            yield -length  # nothing is buffered ahead: it was less than the columns' heads
    return room_bytes


def omitted_bytes(message: bytes) -> dict[int, int]:
    """Return the columns in an 'L' message outside of segments, with the size of each value."""
    body = message[1 + _OID :]
    if len(message) <= _OID or len(body) % _VALUE.size:
        msg = f"malformed message {message[:1]!r} of {len(message)} bytes"
        raise ProtocolError(msg)
    found: dict[int, int] = {}
    for column, nbytes in _VALUE.iter_unpack(body):
        found[column] = found.get(column, 0) + nbytes
    return found
