"""Results with segments of transactions, against a model of the server and of the query."""

from __future__ import annotations

import random
import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.pgoutput.reordered_drain import ReorderedDrain
from ingestd.model.errors import ProtocolError
from tests.harness.examples import examples
from tests.unit.decode import pgoutput
from tests.unit.decode.streamed_server import Server
from tests.unit.decode.test_stream_equals_plain import resolve
from tests.unit.decode.test_streamed_transactions import (
    CUTS,
    FIRST_XIDS,
    MemorySpool,
    assert_as_committed,
    damaged,
    ordered,
    prefixed,
)

LAST = (1 << 63) - 1


def xid_of(message: bytes) -> int:
    return int.from_bytes(message[1:5], "big")


def told(wire: list[bytes]) -> list[bytes]:
    """What `wal/drain/queries.py` makes of the messages of a call."""
    commits = [(n, xid_of(m)) for n, m in enumerate(wire, 1) if m[:1] == b"c"]
    tops: list[int | None] = []
    segment: int | None = None
    for message in wire:
        if message[:1] == b"S":
            segment = xid_of(message)
        tops.append(xid_of(message) if message[:1] == b"c" else segment)
        if message[:1] == b"E":
            segment = None
    found = [b"\0" + m for m in wire if m[:1] in b"SEcAR"]
    low = 0
    for at, xid in [*commits, (LAST, 0)]:
        found.append(span(0, low, at))
        found += [m for n, m in enumerate(wire, 1) if low < n < at and tops[n - 1] is None]
        if xid:
            found.append(span(xid, low, at))
            found += [
                m
                for m, top in zip(wire, tops, strict=True)
                if top == xid or (m[:1] == b"A" and xid_of(m) == xid)
            ]
        low = at
    return found


def span(xid: int, low: int, high: int) -> bytes:
    return struct.pack(">2sIQQ", b"\0<", xid, low, high)


def read(messages: list[bytes], cuts: list[int]) -> list[bytes]:
    order, found = ReorderedDrain(), []
    bounds = [0, *sorted(c % (len(messages) + 1) for c in cuts), len(messages)]
    for start, end in pairwise(bounds):
        for buffer, starts, ends in order.feed(*pgoutput.laid_out(messages[start:end])):
            found += [bytes(buffer[a:b]) for a, b in zip(starts, ends, strict=True)]
    order.finish()
    return found


@pytest.mark.thorough
@examples(150)
@given(st.integers(0, 2**32), FIRST_XIDS, CUTS, st.integers(0, 400))
def test_exactly_once_it_gives_what_a_spool_would_give(
    seed: int, first_xid: int, cuts: list[int], cut_off: int
) -> None:
    """I2, I3: also where the call ends while transactions are open."""
    server = Server(random.Random(seed), first_xid)
    server.run(400)
    assert_as_committed(server, read(told(server.wire), cuts))
    ended = server.wire[: whole(server.wire, cut_off)]
    assert read(told(ended), cuts) == ordered(ended, [], MemorySpool())


def whole(wire: list[bytes], least: int) -> int:
    """Where, at least so far in, neither a transaction nor a segment is begun."""
    is_inside = False
    for n, message in enumerate(wire):
        if n >= least and not is_inside:
            return n
        if message[:1] in (b"B", b"S"):
            is_inside = True
        if message[:1] in (b"C", b"E"):
            is_inside = False
    return len(wire)


def test_nothing_of_one_that_is_rolled_back_or_open_is_given() -> None:
    relation = pgoutput.relation(1, "t", [("a", 25, -1, False)])
    row = pgoutput.insert(1, [b"x"])
    segment = [struct.pack(">cIB", b"S", 9, 1), prefixed(relation, 9), prefixed(row, 9), b"E"]
    beside = [pgoutput.begin(7), relation, row, pgoutput.commit(7, 9)]
    for end in ([], [struct.pack(">cII", b"A", 9, 9)]):
        assert read(told([*segment, *beside, *end]), []) == beside


def test_aborts_of_what_was_never_sent_are_ignored() -> None:
    """PostgreSQL 18 sends them with any protocol."""
    relation = pgoutput.relation(1, "t", [("a", 25, -1, False)])
    row, abort = pgoutput.insert(1, [b"x"]), struct.pack(">cII", b"A", 9, 10)
    beside = [pgoutput.begin(7), relation, row, pgoutput.commit(7, 9)]
    segment = [struct.pack(">cIB", b"S", 9, 1), prefixed(relation, 9), prefixed(row, 9), b"E"]
    commit = struct.pack(">cIBQQq", b"c", 9, 0, 20, 28, 5)
    given_whole = [
        pgoutput.begin(20, ts=5, xid=9),
        relation,
        row,
        relation,
        pgoutput.commit(20, 28, ts=5),
    ]
    for wire in (
        [abort, *segment, *beside, commit],
        [*segment, abort, *beside, commit],
        [*segment, *beside, commit, abort],
    ):
        assert read(told(wire), []) == [*beside, *given_whole]


SEGMENT = struct.pack(">cIB", b"S", 9, 1)
COMMIT = struct.pack(">cIBQQq", b"c", 9, 0, 20, 28, 5)
TOLD = [b"\0" + SEGMENT, b"\0E", b"\0" + COMMIT]
BEFORE, OF = span(0, 0, 3), span(9, 0, 3)
AFTER = span(0, 3, LAST)
AHEAD = [*TOLD, BEFORE, OF]
ORDINARY = [pgoutput.begin(7), pgoutput.commit(7, 9)]


def test_a_result_may_have_nothing_but_spans() -> None:
    assert read([span(0, 0, LAST)], []) == []
    assert len(read([*AHEAD, SEGMENT, b"E", COMMIT, AFTER], [])) == 2


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ORDINARY,
        [span(0, 1, LAST), *ORDINARY],
        [span(9, 0, LAST)],
        [span(0, 0, LAST), span(0, LAST, LAST)],
        [span(0, 0, 3), *ORDINARY],
        [span(0, 0, 3), span(0, 3, LAST)],
        [span(0, 0, 3), span(9, 0, 3), span(0, 3, LAST)],
        [span(0, 0, LAST), b"\0" + SEGMENT, b"\0E"],
        [span(0, 0, LAST)[:-1]],
        [b"\0E", b"\0X"],
        [b"\0" + SEGMENT[:-1]],
        [b"\0" + COMMIT],
        [b"\0" + struct.pack(">cIB", b"S", 9, 0)],
        TOLD,
        [*TOLD, span(0, 0, LAST)],
        [*TOLD, OF, SEGMENT, b"E", COMMIT, AFTER],
        [*TOLD, BEFORE, SEGMENT, b"E", COMMIT, AFTER],
        [*TOLD, BEFORE, span(8, 0, 3), AFTER],
        [*AHEAD, AFTER],
        [*AHEAD, *ORDINARY, AFTER],
        [*AHEAD, SEGMENT, b"E", AFTER],
        [*AHEAD, SEGMENT, b"E", COMMIT],
        [*AHEAD, SEGMENT, b"E", COMMIT, *ORDINARY, AFTER],
        [*AHEAD, SEGMENT, b"E", COMMIT, span(0, 4, LAST)],
        [*AHEAD, SEGMENT],
        [*AHEAD, SEGMENT, b"E"],
        [*AHEAD, SEGMENT, b"E", pgoutput.begin(7)],
        [*AHEAD, SEGMENT, SEGMENT],
        [*AHEAD, SEGMENT, COMMIT],
        [*AHEAD, SEGMENT, b"E", COMMIT[:-1]],
        [*AHEAD, SEGMENT, b"E", COMMIT[:-1] + b"\1"],
        [*AHEAD, SEGMENT, b"E", COMMIT, SEGMENT],
        [*AHEAD, b"E"],
        [*AHEAD, COMMIT],
        [*AHEAD, SEGMENT, b"I\0\0\0"],
        [*AHEAD, struct.pack(">cIB", b"S", 8, 1)],
        [*AHEAD, SEGMENT, b"E", struct.pack(">cII", b"A", 9, 10), COMMIT],
        [
            *TOLD[:2],
            b"\0" + struct.pack(">cII", b"A", 9, 10),
            TOLD[2],
            BEFORE,
            OF,
            SEGMENT,
            b"E",
            COMMIT,
        ],
    ],
)
def test_damaged_results_give_protocol_error(messages: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        read(messages, [])


@examples(100)
@given(st.integers(0, 2**32), st.data())
def test_damaged_bytes_give_protocol_error_and_nothing_else(seed: int, data: st.DataObject) -> None:
    server = Server(random.Random(seed), 3)
    server.run(60)
    messages = damaged(told(server.wire), data)
    order, decoder = ReorderedDrain(), PgoutputDecoder(resolve, hold_bytes=60)
    try:
        for stretch in order.feed(*pgoutput.laid_out(messages)):
            decoder.feed(*stretch)
        order.finish()
    except ProtocolError:
        return
