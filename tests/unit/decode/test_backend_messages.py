"""Messages cut from a socket's bytes: whatever the pieces, the same as one by one."""

from __future__ import annotations

import struct
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.decode.wire.backend_messages import Cutter, cut, error_fields
from ingestd.model.errors import ProtocolError


def message(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">ci", kind, len(content) + 4) + content


def cut_in(pieces: list[bytes]) -> tuple[list[bytes], tuple[int, bytes] | None]:
    cutter, found, last = Cutter(), [], None
    cutter.feed([message(b"W", bytes(3))])  # CopyBothResponse
    for piece in pieces:
        buffer, part = cutter.feed([piece])
        found += [buffer[s:e] for s, e in zip(part.starts, part.ends, strict=True)]
        last = last or part.last
    return found, last


# Contents that look like the beginnings of messages, complete or not.
TREACHEROUS = st.lists(
    st.sampled_from([b"d", b"\0", b"d\0\0\0\4", b"d\0\0\0\x05x", b"d\0\0\1", b"dd\0\0", b"wx"]),
    max_size=8,
).map(b"".join)
OTHERS = st.sampled_from(
    [message(b"N", b"notice\0"), message(b"S", b""), message(b"A", b"d\0\0\0")]
)


@given(
    contents=st.lists(TREACHEROUS | st.binary(max_size=40), max_size=12),
    others=st.lists(st.tuples(st.integers(0, 12), OTHERS), max_size=3),
    ends=st.booleans(),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_pieces_do_not_matter(
    contents: list[bytes], others: list[tuple[int, bytes]], *, ends: bool, cuts: list[int]
) -> None:
    messages = [message(b"d", c) for c in contents]
    for place, other in others:
        messages.insert(place, other)
    stream = b"".join(messages) + (message(b"E", b"SFATAL\0\0") if ends else b"")
    bounds = sorted({0, len(stream), *(min(c, len(stream)) for c in cuts)})
    found, last = cut_in([stream[a:b] for a, b in pairwise(bounds)])
    assert found == contents
    assert last == ((ord("E"), b"SFATAL\0\0") if ends else None)


def test_a_message_larger_than_a_search_window() -> None:
    large = b"w" * (17 << 20)
    stream = message(b"d", b"a") + message(b"d", large) + message(b"d", b"b")
    step = 1 << 20
    found, _ = cut_in([stream[i : i + step] for i in range(0, len(stream), step)])
    assert found == [b"a", large, b"b"]


def test_what_is_not_whole_is_left() -> None:
    whole = message(b"d", b"abc")
    for length in range(len(whole)):
        found = cut(whole + whole[:length])
        assert (found.used, len(found.starts)) == (len(whole), 1)


@pytest.mark.parametrize("bytes_", [b"x\0\0\0\x05y", b"d\0\0\0\3", b"d\xff\xff\xff\xff", b"\0" * 9])
def test_unknown_messages_are_refused(bytes_: bytes) -> None:
    with pytest.raises(ProtocolError):
        cut(message(b"d", b"x") + bytes_)


def test_bytes_after_the_final_error_are_ignored() -> None:
    """The server's error is reported, whatever follows it (found by the fuzzer)."""
    error = message(b"E", b"SFATAL\0\0")
    assert cut_in([message(b"d", b"x") + error + b"TAL\0\0"]) == ([b"x"], (ord("E"), error[5:]))


@given(st.binary(max_size=200))
def test_only_a_protocol_error_comes_out(bytes_: bytes) -> None:
    try:
        found = cut(bytes_)
    except ProtocolError:
        return
    assert found.used <= len(bytes_)


def test_fields_of_an_error() -> None:
    assert error_fields(b"SFATAL\0C57P01\0Mterminating\0\0") == {
        ord("S"): b"FATAL",
        ord("C"): b"57P01",
        ord("M"): b"terminating",
    }


def test_chains_of_few_messages_keep_no_more_than_they_are() -> None:
    """Each notice breaks a chain, as anything else does that is no data."""
    pair = b"d\0\0\0\4" + b"N\0\0\0\4"
    found = cut(pair * 10_000)
    assert (len(found.starts), found.used) == (10_000, 100_000)
    tracemalloc.start()
    try:
        cut(pair * 10_000)
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()


ORDERS: dict[bytes, bool] = {
    b"HdddcCZ": True,
    b"NHSdNdcACZ": True,
    b"HcCZ": True,
    b"HdCZ": True,
    b"HddEZ": True,
    b"HdcEZ": True,
    b"HdcCEEZ": True,
    b"EZ": True,
    b"WddcCZ": True,
    b"WddC": True,
    b"WE": True,
    b"dH": False,
    b"NdH": False,
    b"Z": False,
    b"c": False,
    b"C": False,
    b"HH": False,
    b"WW": False,
    b"HW": False,
    b"HdHd": False,
    b"HdZ": False,
    b"HdccCZ": False,
    b"HdcZ": False,
    b"HdcdCZ": False,
    b"HdcCdZ": False,
    b"HdcCCZ": False,
    b"HdEd": False,
    b"HdEC": False,
    b"HdcCZd": False,
    b"HdcCZZ": False,
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("at_once", [True, False])
def test_messages_come_in_the_order_of_the_protocol(order: bytes, *, at_once: bool) -> None:
    """As their reader has it: what ends the data is followed by what it is asked for next."""
    sent = [message(bytes([kind]), b"x") for kind in order]
    pieces = [b"".join(sent)] if at_once else sent

    def read() -> None:
        cutter = Cutter()
        for piece in [*pieces, *[b""] * len(order)]:
            cutter.feed([piece])

    if ORDERS[order]:
        read()
        return
    with pytest.raises(ProtocolError, match="out of order"):
        read()


@pytest.mark.parametrize("code", [b"57P01", b"", b"\xff\xfe", b"57p01", b"57P011", b"x" * 9999])
def test_a_code_that_is_none_is_left_out(code: bytes) -> None:
    fields = error_fields(b"SFATAL\0C" + code + b"\0Mterminating\0\0")
    assert fields.get(ord("C")) == (code if code == b"57P01" else None)
    assert fields[ord("M")] == b"terminating"
