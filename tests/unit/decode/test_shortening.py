"""Changes shortened on arrival: however they are cut, what fits is unchanged (I8, I9)."""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.pgoutput.relation import Relation, table_of
from ingestd.decode.pgoutput.shortening import (
    CopiedChange,
    StreamedChange,
    omitted_bytes,
)
from ingestd.decode.wire.backend_messages import MOST_ASIDE_BYTES, MOST_BYTES, Cutter
from ingestd.decode.wire.shortener import Shortener
from ingestd.model.errors import ProtocolError
from ingestd.model.schema import Table, with_before
from tests.unit.decode import pgoutput

OID, ROOM = 77, 30
HEADER = b"w" + bytes(24)
XID = b"\0\0\1\2"
VALUES = st.lists(
    st.none() | st.just(pgoutput.UNCHANGED) | st.binary(max_size=70), min_size=1, max_size=6
)


def shortened(shortener: Shortener, content: bytes, cuts: list[int]) -> list[bytes]:
    bounds = sorted({0, len(content), *(min(cut, len(content)) for cut in cuts)})
    for begin, end in pairwise(bounds):
        shortener.feed(memoryview(content)[begin:end])
    return shortener.finish()


def plainly(values: list[object], room: int) -> tuple[list[object], dict[int, int], int]:
    """Leave out what does not fit, value by value."""
    kept, omitted = [], {}
    for column, value in enumerate(values):
        if isinstance(value, bytes) and len(value) > room:
            omitted[column] = len(value)
            kept.append(pgoutput.UNCHANGED)
            continue
        room -= len(value) if isinstance(value, bytes) else 0
        kept.append(value)
    return kept, omitted, room


@given(
    new=VALUES,
    old=st.none() | VALUES,
    kind=st.sampled_from("KO"),
    cuts=st.lists(st.integers(0, 600), max_size=8),
    in_segment=st.booleans(),
    is_copied=st.booleans(),
)
def test_what_fits_is_kept_whatever_the_pieces(
    new: list[object], old: list[object] | None, kind: str, cuts: list[int], *,
    in_segment: bool, is_copied: bool,
) -> None:  # fmt: skip
    new = [*new, b"x" * 40]  # at least as long as what is read at once
    omitted: dict[int, int] = {}
    room, kept_old = ROOM, None
    if old is not None:
        kept_old, omitted, room = plainly(old, room)
    kept_new, more, _ = plainly(new, room)
    omitted = {n: omitted.get(n, 0) + more.get(n, 0) for n in {*omitted, *more}}

    def sent(message: bytes) -> bytes:
        message = message[:1] + XID + message[1:] if in_segment else message
        return (
            b"\0\1" + struct.pack(">i", len(message)) + message if is_copied else HEADER + message
        )

    change = pgoutput.update(OID, new, old, kind)  # type: ignore[arg-type]
    shortener = CopiedChange(ROOM) if is_copied else StreamedChange(ROOM)
    found, told = shortened(shortener, sent(change), cuts)
    assert found == sent(pgoutput.update(OID, kept_new, kept_old, kind))  # type: ignore[arg-type]
    message = told[6:] if is_copied else told[25:]
    message = message[:1] + message[5:] if in_segment else message
    assert message[:5] == b"L" + struct.pack(">I", OID)
    assert omitted_bytes(message) == omitted


@given(st.binary(max_size=120), st.sampled_from([HEADER, b"", b"\0\1\0\0\0\1", HEADER + b"I"]))
def test_only_a_protocol_error_comes_out(bytes_: bytes, before: bytes) -> None:
    for make in (CopiedChange, StreamedChange):
        try:
            shortened(make(ROOM), before + bytes_, [7, 31])
        except ProtocolError:
            continue


def test_an_old_tuple_of_one_null_is_none_of_a_segment() -> None:
    change = pgoutput.update(OID, [b"x" * 99], [None], "O")
    found, told = shortened(StreamedChange(ROOM), HEADER + change, [])
    assert found[25:] == pgoutput.update(OID, [pgoutput.UNCHANGED], [None], "O")
    assert omitted_bytes(told[25:]) == {0: 99}


def test_the_header_of_a_copy_stays_before_its_first_row() -> None:
    header = b"PGCOPY\n\xff\r\n\0" + bytes(8)
    change = pgoutput.insert(OID, [b"1", b"x" * 99])
    content = header + b"\0\1" + struct.pack(">i", len(change)) + change
    first, told = shortened(CopiedChange(ROOM), content, [3, 11, 20])
    assert first.startswith(header + b"\0\1")
    assert told[6:7] == b"L"


def test_a_logical_message_of_any_size_is_passed() -> None:
    message = b"M\0" + bytes(8) + b"anyone\0" + struct.pack(">i", 500) + b"x" * 500
    assert shortened(StreamedChange(ROOM), HEADER + message, [40]) == []


def wire(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">ci", kind, len(content) + 4) + content


def begun(limit_bytes: int = MOST_BYTES) -> Cutter:
    """Return a cutter that was told that data follows (CopyBothResponse)."""
    cutter = Cutter(limit_bytes)
    cutter.feed([wire(b"W", bytes(3))])
    return cutter


@pytest.mark.parametrize("step", [1, 7, 64, 999])
def test_bounded_a_cutter_holds_nothing_of_what_is_too_large(step: int) -> None:
    rows = [b"a", b"x" * 3000, b"b", b"y" * 3001, b"z" * 3002, b"c"]
    stream = b"".join(wire(b"d", row) for row in rows) + wire(b"N", b"n" * 99)
    cutter, found, most, passed = begun(1000), [], 0, set()
    for at in range(0, len(stream), step):
        buffer, cut = cutter.feed([stream[at : at + step]])
        found += [buffer[s:e] for s, e in zip(cut.starts, cut.ends, strict=True)]
        most = max(most, cutter.held_bytes)
        passed.add(cut.passed_bytes)
    assert found == [b"a", b"b", b"c"]
    assert most <= 1000 + step
    assert passed >= {3000, 3001, 3002}


@pytest.mark.parametrize("kind", [b"d", b"N", b"S", b"A", b"E", b"C", b"Z", b"W"])
@pytest.mark.parametrize("length", [-(1 << 31), -1, 3, MOST_BYTES + 1, (1 << 31) - 1])
def test_bounded_a_length_that_no_server_sends_is_refused(kind: bytes, length: int) -> None:
    cutter = begun()
    with pytest.raises(ProtocolError, match="has an invalid length"):
        cutter.feed([wire(b"d", b"x"), kind + struct.pack(">i", length)])


@pytest.mark.parametrize("kind", [b"c", b"C", b"Z", b"H", b"W"])
def test_bounded_what_ends_the_data_is_short(kind: bytes) -> None:
    with pytest.raises(ProtocolError, match="has an invalid length"):
        begun().feed([kind + struct.pack(">i", MOST_ASIDE_BYTES + 100)])


@pytest.mark.parametrize("kind", [b"I", b"U", b"D"])
@pytest.mark.parametrize("tuples", [b"N\0\0", b"K\0\0", b"O\0\1n", b"K\0\0N\0\0", b"N\xff\xff"])
def test_bounded_a_change_of_many_tuples_is_refused(kind: bytes, tuples: bytes) -> None:
    """Of each tuple its columns' kinds are kept: of many, that would be as large as the change."""
    shortener = StreamedChange(ROOM)
    shortener.feed(memoryview(HEADER + kind + struct.pack(">I", OID)))
    with pytest.raises(ProtocolError):
        shortener.feed(memoryview(tuples * 1000))


@pytest.mark.slow
def test_of_a_long_error_its_beginning_is_kept() -> None:
    content = b"SERROR\0C22012\0M" + b"m" * 40_000_000 + b"\0\0"
    cutter, last = Cutter(), None
    for piece in (
        wire(b"E", content)[i : i + (1 << 20)] for i in range(0, len(content) + 5, 1 << 20)
    ):
        last = last or cutter.feed([piece])[1].last
        assert cutter.held_bytes < 2 << 20
    assert last == (ord("E"), content[:MOST_ASIDE_BYTES])


@pytest.mark.parametrize("captures_body", [True, False])
def test_isolated_a_shortened_change_stops_its_table_if_captured(*, captures_body: bool) -> None:
    def resolve(relation: Relation) -> Table:
        table = with_before(table_of(relation), full=True)
        return table if captures_body else replace(table, columns=table.columns[:1], before=())

    columns = [("id", 20, -1, True), ("body", 25, -1, False)]
    change = pgoutput.insert(OID, [b"2", b"x" * 5000])
    messages = [pgoutput.begin(100), pgoutput.relation(OID, "big", columns)]
    messages += [part[25:] for part in shortened(StreamedChange(ROOM), HEADER + change, [])]
    messages += [pgoutput.insert(OID, [b"3", b"b"]), pgoutput.commit(100, 110)]
    [chunk] = PgoutputDecoder(resolve, row_limit_bytes=1000).feed(*pgoutput.laid_out(messages))
    [batch] = chunk.batches
    assert batch.rows.column("id").to_pylist() == ([3] if captures_body else [2, 3])
    assert batch.rows.column("_cdc_seq").to_pylist()[-1] == 2
    assert [str(error.table) for error in chunk.refused] == ["public.big"] * captures_body
    assert np.all(batch.rows.column("_cdc_lsn").to_numpy() == 100)
