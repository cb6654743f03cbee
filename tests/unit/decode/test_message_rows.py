from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.decode.copy.message_rows import MessageRows
from ingestd.model.errors import ProtocolError

HEADER = b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0)
TRAILER = struct.pack(">h", -1)
MESSAGES = st.lists(st.binary(min_size=1, max_size=9), max_size=9)


def row(message: bytes) -> bytes:
    return struct.pack(">hi", 1, len(message)) + message


def unpack(*blocks: list[bytes]) -> list[bytes]:
    single, found = MessageRows(), []
    for copy_data in blocks:
        # what lies before a message in the buffer, and behind it, is the protocol's
        buffer = b"d123" + b"d1234".join(copy_data)
        lengths = np.array([len(data) for data in copy_data], np.int64)
        ends = np.cumsum(lengths + 5) - 1
        starts, stops = single.unpack(buffer, ends - lengths, ends)
        found += [buffer[a:b] for a, b in zip(starts, stops, strict=True)]
    single.finish()
    return found


@given(messages=MESSAGES, bound=st.integers(0, 11), has_header_alone=st.booleans())
def test_gives_the_messages_in_their_order(
    messages: list[bytes], bound: int, *, has_header_alone: bool
) -> None:
    body = [row(message) for message in messages] + [TRAILER]
    copy_data = [HEADER, *body] if has_header_alone else [HEADER + body[0], *body[1:]]
    assert unpack(copy_data) == messages
    assert unpack(copy_data[:bound], copy_data[bound:]) == messages


@given(MESSAGES.filter(bool), st.data())
def test_garbage_is_a_protocol_error(messages: list[bytes], data: st.DataObject) -> None:
    copy_data = [HEADER, *map(row, messages), TRAILER]
    number = data.draw(st.integers(0, len(copy_data) - 1))
    broken = bytearray(copy_data[number])
    at = data.draw(st.integers(0, min(len(broken), 6 if number > 0 else 99) - 1))
    broken[at] ^= data.draw(st.integers(1, 255))
    copy_data[number] = bytes(broken)
    try:
        found = unpack(copy_data)
    except ProtocolError:
        return
    assert number == 0, "only flags of the header may be others"
    assert found == messages


@pytest.mark.parametrize(
    ("copy_data", "said"),
    [
        ([HEADER, row(b"B")], "no trailer"),
        ([HEADER, TRAILER, row(b"B")], "row after the trailer"),
        ([HEADER, row(b"B"), row(b""), TRAILER], "empty message"),
        ([HEADER, struct.pack(">hi", 1, -1), TRAILER], "empty message"),
        ([HEADER, struct.pack(">hi", 1, 5) + b"B", TRAILER], "do not fill"),
        ([HEADER, struct.pack(">hi", 2, 1) + b"B", TRAILER], "wrong number of fields"),
        ([row(b"B"), TRAILER], "cut short"),
    ],
)
def test_what_is_no_row_of_one_message_is_a_protocol_error(
    copy_data: list[bytes], said: str
) -> None:
    with pytest.raises(ProtocolError, match=said):
        unpack(copy_data)


def test_a_row_after_the_trailer_of_a_block_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="after the trailer"):
        unpack([HEADER, row(b"B"), TRAILER], [row(b"B")])
