"""Open transactions put back into commit order, against a model of the server that sends them."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.pgoutput.streamed_transactions import (
    OpenMessages,
    Spool,
    StreamedTransactions,
    count_before,
)
from ingestd.model.errors import ProtocolError
from tests.harness.examples import examples
from tests.unit.decode import pgoutput
from tests.unit.decode.plain import Reader, read_relation
from tests.unit.decode.streamed_server import Server
from tests.unit.decode.test_stream_equals_plain import resolve, rows_of

FIRST_XIDS = st.sampled_from([3, 700, 2**31 - 20, 2**32 - 30])
CUTS = st.lists(st.integers(0, 400), max_size=8)


class MemorySpool:
    """The plain spool: it knows sub-transactions by nothing but the rule of `count_before`."""

    def __init__(self) -> None:
        self.kept: dict[int, list[OpenMessages]] = {}

    def append_messages(self, xid: int, messages: OpenMessages) -> None:
        self.kept.setdefault(xid, []).append(messages)

    def abort(self, xid: int, subxid: int) -> None:
        pieces = self.kept.get(xid, [])
        while pieces:
            last = pieces.pop()
            if count := count_before(last.xids, subxid):
                pieces.append(last.first(count))
                return

    def drop(self, xid: int) -> None:
        self.kept.pop(xid, None)

    def pop_transaction(self, xid: int) -> Iterator[OpenMessages]:
        yield from self.kept.pop(xid, [])


def ordered(wire: list[bytes], cuts: list[int], spool: Spool) -> list[bytes]:
    """What leaves, with the wire's messages fed in pieces."""
    order, found = StreamedTransactions(spool), []
    bounds = [0, *sorted(c % (len(wire) + 1) for c in cuts), len(wire)]
    for start, end in pairwise(bounds):
        for buffer, starts, ends in order.feed(*pgoutput.laid_out(wire[start:end])):
            found += [bytes(buffer[a:b]) for a, b in zip(starts, ends, strict=True)]
    return found


def transactions(messages: list[bytes]) -> list[tuple[int, list[str]]]:
    """(commit_lsn, texts) of each; that every change has the definition it was made with."""
    found: list[tuple[int, list[str]]] = []
    known: dict[int, str] = {}
    is_open = False
    for message in messages:
        reader = Reader(message)
        kind = reader.take("c")[0]
        if kind == b"B":
            assert not is_open
            is_open = True
            found.append((reader.take("QqI")[0], []))
        elif kind == b"C":
            _, lsn, end, ts = reader.take("BQQq")
            assert (lsn, end, ts) == (found[-1][0], lsn + 8, lsn)
            is_open = False
        elif kind == b"R":
            relation = read_relation(reader)
            known[relation.oid] = relation.columns[0].name
        elif kind == b"I":
            assert is_open
            text = message.split(b"t", 1)[1][4:].decode()
            (oid,) = reader.take("I")
            assert text.endswith("/" + known[oid])
            found[-1][1].append(text)
    assert not is_open
    return found


def assert_as_committed(server: Server, messages: list[bytes]) -> None:
    expected = [(lsn, [c.text for c in made]) for lsn, made in server.committed]
    assert transactions(messages) == expected
    begun = [n for n, message in enumerate(messages) if message[:1] == b"B"]
    replicated = [messages[n] for n in begun if messages[n + 1][:1] == b"O"]
    assert [Reader(m[1:]).take("QqI")[0] for m in replicated] == server.replicated
    assert sum(m[:1] == b"O" for m in messages) == len(replicated)


@examples(100)
@given(st.integers(0, 2**32), FIRST_XIDS, CUTS)
def test_whole_transactions_in_commit_order_with_definitions(
    seed: int, first_xid: int, cuts: list[int]
) -> None:
    server = Server(random.Random(seed), first_xid)
    server.run(400)
    spool = MemorySpool()
    assert_as_committed(server, ordered(server.wire, cuts, spool))
    assert spool.kept == {}


@examples(25)
@given(st.integers(0, 2**32), CUTS)
def test_decoder_takes_what_is_put_in_order(seed: int, cuts: list[int]) -> None:
    server = Server(random.Random(seed), 3)
    server.run(200)
    decoder = PgoutputDecoder(lambda r: None if r.oid > 2 else resolve(r), hold_bytes=200)
    order, chunks = StreamedTransactions(MemorySpool()), []
    bounds = [0, *sorted(c % (len(server.wire) + 1) for c in cuts), len(server.wire)]
    for start, end in pairwise(bounds):
        for stretch in order.feed(*pgoutput.laid_out(server.wire[start:end])):
            chunks += decoder.feed(*stretch)
    rows = [r for found in rows_of(chunks).values() for r in found]
    captured = [(lsn, [c for c in made if c.oid <= 2]) for lsn, made in server.committed]
    expected = [
        (lsn, seq, f"v{c.version}", c.text)
        for lsn, made in captured
        for seq, c in enumerate(made, 1)
    ]
    found = []
    for row in rows:
        [(name, text)] = [(k, v) for k, v in row.items() if k.startswith("v")]
        found.append((row["_cdc_lsn"], row["_cdc_seq"], name, text))
    assert sorted(found) == expected
    if server.committed:
        assert decoder.position == server.committed[-1][0] + 8


def test_idle_position_of_a_keepalive_in_an_open_transaction() -> None:
    """It commits above what the server has read: confirming the position does not lose it."""
    decoder, order = PgoutputDecoder(resolve), StreamedTransactions(MemorySpool())
    relation = pgoutput.relation(1, "t", [("a", 25, -1, False)])
    row = pgoutput.insert(1, [b"x"])

    def feed(*messages: bytes) -> list[tuple[int, bool, int]]:
        chunks = []
        for stretch in order.feed(*pgoutput.laid_out(messages)):
            chunks += decoder.feed(*stretch)
        return [
            (c.position, c.ends_in_transaction, sum(len(b.rows) for b in c.batches)) for c in chunks
        ]

    segment = [struct.pack(">cIB", b"S", 9, 1), prefixed(relation, 9), prefixed(row, 9), b"E"]
    assert feed(*segment) == []
    assert decoder.position == 0
    idle = decoder.idle(decoder.position.__class__(500))
    assert idle is not None
    assert idle.position == 500
    assert feed(pgoutput.begin(500), relation, row, pgoutput.commit(500, 510)) == [(510, False, 1)]
    commit = struct.pack(">cIBQQq", b"c", 9, 0, 510, 520, 0)
    assert feed(commit) == [(520, False, 1)]


def prefixed(message: bytes, xid: int) -> bytes:
    return message[:1] + struct.pack(">I", xid) + message[1:]


def test_count_before_orders_ids_across_the_wraparound() -> None:
    xids = np.array([2**32 - 2, 2**32 - 1, 3, 2**32 - 1, 3, 4], np.uint32)
    assert count_before(xids, 3) == 4
    assert count_before(xids, 4) == 5
    assert count_before(xids, 2**32 - 1) == 1
    assert count_before(xids, 2**32 - 2) == 0
    assert count_before(xids, 5) == 6


SEGMENT = struct.pack(">cIB", b"S", 9, 1)


@pytest.mark.parametrize(
    "wire",
    [
        [b"E"],
        [SEGMENT, SEGMENT],
        [SEGMENT, pgoutput.begin(7)],
        [SEGMENT, b"I\0\0\0"],
        [SEGMENT, struct.pack(">cII", b"A", 9, 9)],
        [struct.pack(">cIB", b"S", 9, 0)],
        [struct.pack(">cIBQQq", b"c", 9, 0, 1, 2, 0)],
        [SEGMENT, b"E", b"c"],
        [SEGMENT[:-1]],
    ],
)
def test_damaged_segments_give_protocol_error(wire: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        ordered(wire, [], MemorySpool())


def damaged(messages: list[bytes], data: st.DataObject) -> list[bytes]:
    """Return them with a byte changed, one cut, left out or repeated, one to three times."""
    wire = list(messages) or [b"E"]
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(wire) - 1))
        message = bytearray(wire[at])
        how = data.draw(st.sampled_from(["byte", "cut", "drop", "twice"]))
        if how == "byte":
            message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
        elif how == "cut":
            del message[data.draw(st.integers(1, len(message))) :]
        wire[at : at + 1] = [bytes(message)] * {"drop": 0, "twice": 2}.get(how, 1)
        wire = wire or [b"E"]
    return wire


@examples(60)
@given(st.integers(0, 2**32), st.data())
def test_damaged_bytes_give_protocol_error_and_nothing_else(seed: int, data: st.DataObject) -> None:
    server = Server(random.Random(seed), 3)
    server.run(60)
    wire = damaged(server.wire, data)
    order, decoder = StreamedTransactions(MemorySpool()), PgoutputDecoder(resolve, hold_bytes=60)
    try:
        for stretch in order.feed(*pgoutput.laid_out(wire)):
            decoder.feed(*stretch)
    except ProtocolError:
        return


def test_aborts_of_what_was_never_sent_are_ignored() -> None:
    """PostgreSQL 18 sends them with any protocol, and through the SQL functions."""
    relation = pgoutput.relation(1, "t", [("a", 25, -1, False)])
    row, abort = pgoutput.insert(1, [b"x"]), struct.pack(">cII", b"A", 8, 9)
    transaction = [pgoutput.begin(7), relation, row, pgoutput.commit(7, 9)]
    for wire in ([abort, *transaction], [*transaction, abort], [abort]):
        chunks = PgoutputDecoder(resolve).feed(*pgoutput.laid_out(wire))
        assert [c.position for c in chunks] == ([9] if len(wire) > 1 else [])
        assert ordered(wire, [], MemorySpool()) == [m for m in wire if m != abort]


@pytest.mark.parametrize("find", [resolve, lambda _: None], ids=["captured", "not captured"])
def test_a_transaction_has_ended_with_its_commit_only(find: Callable[[Any], Any]) -> None:
    """A keepalive moves the position, and is no transaction."""
    decoder = PgoutputDecoder(find)
    relation = pgoutput.relation(1, "t", [("a", 25, -1, False)])
    decoder.idle(decoder.position.__class__(100))
    for messages, expected in (
        ([pgoutput.begin(500), relation, pgoutput.insert(1, [b"x"])], False),
        ([pgoutput.commit(500, 510)], True),
    ):
        list(decoder.feed(*pgoutput.laid_out(messages)))
        assert decoder.has_ended_transaction is expected
