"""What the decoder's layers do, one message at a time: what the fuzzer compares them with."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from ingestd.decode.wire.backend_messages import MOST_ASIDE_BYTES, MOST_BYTES
from tests.unit.decode.plain import Refused

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DATA_ENDS = b"EcCZ"
BEGINS = {b"W", b"H"}
KNOWN = b"dWHNSA" + DATA_ENDS
_COPY_HEADER = b"PGCOPY\n\xff\r\n\0"


def socket_messages(stream: bytes) -> tuple[list[bytes], tuple[int, bytes] | None, int]:
    """Return the CopyData contents, what ended them, and how many bytes were used.

    Data has begun, if its first message does not say so: it does not begin once more, nor is the
    server ready before it has ended.
    """
    found, at = [], 0
    before = None if stream[:1] in BEGINS else b"W"
    while len(stream) - at >= 5:
        kind, length = struct.unpack_from(">Bi", stream, at)
        if kind not in KNOWN or not 4 <= length <= MOST_BYTES:
            raise Refused
        end = at + 1 + length
        if end > len(stream):
            if kind in b"cCZHW" and length - 4 > MOST_ASIDE_BYTES:
                raise Refused
            break
        content, at = stream[at + 5 : end], end
        if bytes([kind]) in BEGINS and before is None:
            before = bytes([kind])
        elif kind in b"WHZ":
            raise Refused
        if kind == ord("d"):
            found.append(content)
        elif kind in DATA_ENDS:
            return found, (kind, content), at
    return found, None, at


def frames(messages: Iterable[bytes]) -> tuple[list[bytes], int | None, bool]:
    """Return the payloads, the highest wal_end after them, whether a reply is wanted."""
    found: list[bytes] = []
    idle, asked = None, False
    for message in messages:
        if message[:1] == b"w" and len(message) >= 25:
            found.append(message[25:])
            idle = None
        elif message[:1] == b"k" and len(message) == 18:
            told, _, reply = struct.unpack(">QqB", message[1:])
            if told >= 1 << 63:
                raise Refused
            idle, asked = max(told, idle or 0), asked or reply != 0
        else:
            raise Refused
    return found, idle, asked


def copied_rows(messages: Sequence[bytes], columns: int) -> list[list[bytes | None]]:
    """Return the fields of each row of a COPY; the last message is its trailer."""
    rows: list[list[bytes | None]] = []
    for number, whole in enumerate(messages):
        message = whole
        if number == 0:
            signature, flags, extension = struct.unpack_from(">11sii", message)
            if signature != _COPY_HEADER or flags >> 16 or extension < 0:
                raise Refused
            if 19 + extension > len(message):
                raise Refused
            message = message[19 + extension :]
            if not message:
                continue
        if message == b"\xff\xff" and number == len(messages) - 1:
            return rows
        rows.append(_row(message, columns))
    raise Refused


def _row(message: bytes, columns: int) -> list[bytes | None]:
    (count,) = struct.unpack_from(">h", message)
    if count != columns:
        raise Refused
    fields: list[bytes | None] = []
    at = 2
    for _ in range(columns):
        (length,) = struct.unpack_from(">i", message, at)
        at += 4
        if length < -1 or at + max(length, 0) > len(message):
            raise Refused
        fields.append(None if length < 0 else message[at : at + length])
        at += max(length, 0)
    if at != len(message):
        raise Refused
    return fields


class PlainOrder:
    """Open transactions put back into commit order, message by message."""

    def __init__(self) -> None:
        self.given: list[bytes] = []
        self._segment: int | None = None
        self._kept: dict[int, list[tuple[int, int, bytes]]] = {}
        self._newest: dict[int, tuple[int, bytes]] = {}
        self._number = 0

    def feed(self, message: bytes) -> None:
        kind = message[:1]
        if kind in {b"S", b"E", b"c", b"A"}:
            self._control(kind, message)
            return
        self._number += 1
        if self._segment is None:
            if self._kept and kind == b"R":
                self._newest[_oid(message)] = self._number, message
            self.given.append(message)
        elif kind != b"O":
            if kind not in {b"R", b"Y", b"I", b"U", b"D", b"T", b"M"} or len(message) <= 5:
                raise Refused
            (xid,) = struct.unpack_from(">I", message, 1)
            kept = self._kept[self._segment]
            kept.append((xid, self._number, kind + message[5:]))

    def _control(self, kind: bytes, message: bytes) -> None:
        if (kind == b"E") == (self._segment is None):
            raise Refused
        if kind == b"E":
            self._segment = None
        elif kind == b"S":
            _, xid, is_first = struct.unpack(">cIB", message)
            if is_first:
                self._kept[xid] = []
            elif xid not in self._kept:
                raise Refused
            self._segment = xid
        elif kind == b"A":
            _, xid, subxid = struct.unpack(">cII", message)
            self._abort(xid, subxid)
        else:
            self._commit(*struct.unpack(">cIBQQq", message)[1:])

    def _abort(self, xid: int, subxid: int) -> None:
        if xid == subxid:
            self._kept.pop(xid, None)
        kept = self._kept.get(xid, [])
        # an id is earlier if it is less, on a ring of 32 bits
        while kept and (kept[-1][0] - subxid) % 2**32 < 2**31:
            kept.pop()
        self._forget()

    def _commit(self, xid: int, flags: int, lsn: int, end_lsn: int, time: int) -> None:
        if xid not in self._kept:
            raise Refused
        self.given.append(struct.pack(">cQqI", b"B", lsn, time, xid))
        told: dict[int, tuple[int, bytes]] = {}
        for _, number, message in self._kept.pop(xid):
            self.given.append(message)
            if message[:1] == b"R":
                told[_oid(message)] = number, message
        for oid, last in told.items():
            newest = max(last, self._newest.get(oid, last))
            if newest is not last:
                self.given.append(newest[1])
            self._newest[oid] = newest
        self._forget()
        self.given.append(struct.pack(">cBQQq", b"C", flags, lsn, end_lsn, time))

    def _forget(self) -> None:
        if not self._kept:
            self._newest.clear()


def _oid(relation: bytes) -> int:
    found: int = struct.unpack_from(">I", relation, 1)[0]
    return found
