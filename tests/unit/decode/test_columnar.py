"""Columns packed by the server: right ones come out whole, garbage gives ProtocolError."""

from __future__ import annotations

import contextlib
import struct
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingestd.decode.calendar import date_text, timestamp_text
from ingestd.decode.columnar import ColumnarDecoder, UnexpectedNullError
from ingestd.decode.types import lake_type
from ingestd.errors import ProtocolError
from ingestd.positions import Lsn
from ingestd.schema import Column, Table, TableId
from tests.unit.decode import pgoutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ingestd.changes import TableBatch

COLUMNS = [("id", 20, False), ("n", 23, True), ("s", 25, True), ("b", 17, True), ("d", 1082, True)]
TABLE = Table(
    TableId("public", "t"),
    1,
    tuple(Column(n, oid, -1, lake_type(oid, -1), nullable=null) for n, oid, null in COLUMNS),
    key=("id",),
    before=("id",),
)
HEADER = b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 0)
TRAILER = b"\xff\xff"
AT = datetime(2024, 5, 6, 7, 8, 9, 123, tzinfo=UTC)
Row = tuple[int, int | None, str | None, bytes | None, int | None]


def array(code: str, values: Sequence[int], *, nulls: int = 0) -> bytes:
    size = struct.calcsize(f">{code}")
    items = b"".join(struct.pack(f">i{code}", size, v) for v in values)
    return struct.pack(">iiiii", 1, nulls, 23, len(values), 1) + items


def joined(values: Sequence[bytes | None]) -> list[bytes | None]:
    lengths = array("i", [-1 if v is None else len(v) for v in values])
    if all(v is None for v in values):
        return [None, lengths]
    return [b"".join(v or b"" for v in values), lengths]


def packed(block: int, rows: Sequence[Row]) -> bytes:
    ids, ns, ss, bs, ds = zip(*rows, strict=True)
    flags = [(n is None) | (d is None) << 1 for n, d in zip(ns, ds, strict=True)]
    fields = [
        struct.pack(">q", block),
        struct.pack(">i", len(rows)),
        array("i", flags),
        array("q", ids),
        array("i", [n or 0 for n in ns]),
        *joined([None if s is None else s.encode() for s in ss]),
        *joined(bs),
        array("i", [d or 0 for d in ds]),
    ]
    parts = (b"\xff" * 4 if f is None else struct.pack(">i", len(f)) + f for f in fields)
    return struct.pack(">h", len(fields)) + b"".join(parts)


def decode(messages: Sequence[bytes], size: int = 100) -> list[TableBatch]:
    decoder = ColumnarDecoder(TABLE, Lsn(77), AT, 64)
    found = []
    for start in range(0, len(messages), size):
        batch = decoder.feed(*pgoutput.laid_out(list(messages[start : start + size]), gap=b"ab"))
        if batch is not None:
            batch.rows.validate(full=True)
            found.append(batch)
    decoder.finish()
    return found


def values(batches: Sequence[TableBatch]) -> list[tuple[Any, ...]]:
    names = [c.name for c in TABLE.columns]
    return [tuple(r[n] for n in names) for b in batches for r in b.rows.to_pylist()]


int32 = st.integers(-(2**31), 2**31 - 1)
row_lists = st.lists(
    st.tuples(
        st.integers(-(2**63), 2**63 - 1),
        st.none() | int32,
        st.none() | st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=9),
        st.none() | st.binary(max_size=9),
        st.none() | st.integers(-700_000, 2_900_000),
    ),
    min_size=1,
    max_size=8,
)


@given(st.lists(row_lists, max_size=5), st.sampled_from([1, 2, 100]))
@settings(deadline=None, max_examples=150)
def test_lossless_whatever_the_values(runs: list[list[Row]], size: int) -> None:
    messages = [packed(i * 64, rows) for i, rows in enumerate(runs)]
    whole = [HEADER + messages[0], *messages[1:], TRAILER] if messages else [HEADER + TRAILER]
    day = date(2000, 1, 1)
    expected = [
        (i, n, s, b, None if d is None else day + timedelta(days=d))
        for rows in runs
        for i, n, s, b, d in rows
    ]
    assert values(decode(whole, size)) == expected


def test_what_a_date_cannot_hold_is_in_cdc_raw() -> None:
    special = {-(2**31): "-infinity", 2**31 - 1: "infinity", -730_485: "0001-01-01 BC"}
    rows: list[Row] = [(i, 1, "", b"", day) for i, day in enumerate([0, *special, *special])]
    [batch] = decode([HEADER, packed(0, rows), TRAILER])
    found = batch.rows.to_pylist(maps_as_pydicts="strict")
    assert [r["d"] for r in found] == [date(2000, 1, 1), *[None] * 6]
    assert [(r["_cdc_raw"] or {}).get("d") for r in found] == [
        None,
        *special.values(),
        *special.values(),
    ]


def test_next_block_follows_what_was_given() -> None:
    decoder = ColumnarDecoder(TABLE, Lsn(77), AT, 64)
    row: Row = (1, None, None, None, None)
    assert decoder.next_block == 0
    decoder.feed(*pgoutput.laid_out([HEADER + packed(128, [row]), packed(192, [row])], gap=b""))
    assert decoder.next_block == 256
    bad = packed(256, [row]).replace(array("q", [1]), array("q", [1], nulls=1))
    with pytest.raises(UnexpectedNullError):
        decoder.feed(*pgoutput.laid_out([bad], gap=b""))
    assert decoder.next_block == 256


GOOD = [HEADER, packed(0, [(1, 2, "ab", b"\0", 3), (4, None, None, None, None)]), TRAILER]


@pytest.mark.parametrize(
    "messages",
    [GOOD[:2], GOOD[1:], [HEADER, TRAILER, GOOD[1]], [HEADER[:9]], [HEADER, GOOD[1][:-1], TRAILER]],
)
def test_a_broken_frame_is_refused(messages: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(messages)


@given(st.data())
@settings(deadline=None, max_examples=400)
def test_garbage_gives_protocol_error_and_nothing_else(data: st.DataObject) -> None:
    message = bytearray(GOOD[1])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(message) - 1))
        message[at] = data.draw(st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFF]))
    end = data.draw(st.integers(1, len(message)))
    cut = bytes(message[:end]) if data.draw(st.booleans()) else bytes(message)
    with contextlib.suppress(ProtocolError):
        decode([HEADER, cut, TRAILER])


@given(st.datetimes())
def test_timestamps_are_written_as_the_server_does(at: datetime) -> None:
    us = (at - datetime(1970, 1, 1)) // timedelta(microseconds=1)  # noqa: DTZ001
    expected = str(at).rstrip("0") if "." in str(at) else str(at)
    assert timestamp_text(us, "") == expected
    assert date_text(us // 86_400_000_000) == str(at.date())


@pytest.mark.parametrize(
    ("days", "text"),
    [
        (-719_162, "0001-01-01"),
        (-719_163, "0001-12-31 BC"),
        (-719_528, "0001-01-01 BC"),
        (-719_469, "0001-02-29 BC"),
        (-2_440_588, "4714-11-24 BC"),
        (2_932_897, "10000-01-01"),
        (2_145_042_905, "5874897-12-31"),
    ],
)
def test_dates_beyond_pythons(days: int, text: str) -> None:
    assert date_text(days) == text
