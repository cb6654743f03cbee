from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.decode.packed import PackedMessages, PackedTooLargeError
from ingestd.errors import ProtocolError

HEADER = b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0)
TRAILER = struct.pack(">h", -1)
MESSAGES = st.lists(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=5), max_size=4)


def row(messages: list[bytes]) -> bytes:
    joined = b"".join(messages)
    array = struct.pack(">iiiii", 1, 0, 23, len(messages), 1)
    array += b"".join(struct.pack(">ii", 4, len(m)) for m in messages)
    fields = [joined, array]
    return struct.pack(">h", 2) + b"".join(struct.pack(">i", len(f)) + f for f in fields)


def unpack(*copy_data: bytes) -> list[bytes]:
    buffer = b"".join(copy_data)
    ends = np.cumsum([len(d) for d in copy_data])
    packed = PackedMessages()
    starts, stops = packed.unpack(buffer, ends - [len(d) for d in copy_data], ends)
    packed.finish()
    return [buffer[a:b] for a, b in zip(starts, stops, strict=True)]


@given(MESSAGES)
def test_gives_the_messages_in_their_order(rows: list[list[bytes]]) -> None:
    body = [row(messages) for messages in rows]
    first = HEADER + body[0] if body else HEADER
    assert unpack(first, *body[1:], TRAILER) == [m for messages in rows for m in messages]


@given(MESSAGES.filter(bool), st.data())
def test_garbage_is_a_protocol_error(rows: list[list[bytes]], data: st.DataObject) -> None:
    whole = bytearray(HEADER + row(rows[0]))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = unpack(bytes(whole), TRAILER)
    except ProtocolError:
        return
    assert sum(map(len, found)) == sum(map(len, rows[0]))


def test_an_end_without_trailer_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="no trailer"):
        unpack(HEADER + row([b"B"]))


def test_messages_that_were_left_out_are_told() -> None:
    fields = row([b"B" * 5])[2 + 4 + 5 :]
    left_out = struct.pack(">hi", 2, -1) + fields
    with pytest.raises(PackedTooLargeError, match="5 bytes"):
        unpack(HEADER + left_out, TRAILER)
