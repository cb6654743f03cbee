"""Columns packed by the server: valid ones are decoded, garbage raises ProtocolError."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.decode.copy.columnar import AmbiguousMarkError, ColumnarDecoder
from ingestd.decode.copy.packing import ABSENT, BETWEEN, Packing, fixed, packings_of
from ingestd.decode.type_mapping import lake_type
from ingestd.decode.values.calendar import date_text, timestamp_text
from ingestd.model.errors import ProtocolError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Column, Mask, Table, TableId
from tests.harness.examples import examples
from tests.unit.decode import pgoutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ingestd.model.changes import TableBatch

COLUMNS = [("id", 20, False), ("n", 23, True), ("s", 25, True), ("b", 17, True), ("d", 1082, True)]
COLUMNS.append(("f", 16, True))
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
Row = tuple[int, int | None, str | None, bytes | None, int | None, bool | None]


def array(code: str, values: Sequence[int | None]) -> bytes:
    size = struct.calcsize(f">{code}")
    items = [
        struct.pack(">i", -1) if v is None else struct.pack(f">i{code}", size, v) for v in values
    ]
    return struct.pack(">iiiii", 1, None in values, 23, len(values), 1) + b"".join(items)


def measured(values: Sequence[bytes | None]) -> list[bytes | None]:
    lengths = array("i", [None if v is None else len(v) for v in values])
    if all(v is None for v in values):
        return [None, lengths]
    return [b"".join(v or b"" for v in values), lengths]


def separated(values: Sequence[bytes | None]) -> list[bytes | None]:
    return [BETWEEN.join(ABSENT if v is None else v for v in values), count_of(values)]


def marked(code: str, values: Sequence[int | None], oid: int) -> list[bytes | None]:
    mark = fixed(Column("c", oid, -1, lake_type(oid, -1))).mark
    items = [mark if v is None else struct.pack(f">{code}", v) for v in values]
    return [b"".join(items), count_of(values)]


def count_of(values: Sequence[object]) -> bytes:
    return struct.pack(">i", sum(v is not None for v in values))


def packed(block: int, rows: Sequence[Row], packing: Packing) -> bytes:
    ids, ns, ss, bs, ds, fs = zip(*rows, strict=True)
    texts = [None if s is None else s.encode() for s in ss]
    fields: list[bytes | None] = [struct.pack(">q", block), struct.pack(">i", len(rows))]
    if packing is Packing.MARKED:
        fields += [
            marked("q", ids, 20)[0],  # NOT NULL
            *marked("i", ns, 23),
            *separated(texts),
            *measured(bs),
            *marked("i", ds, 1082),
            *marked("?", fs, 16),
        ]
    else:
        fields += [
            array("q", ids),
            array("i", ns),
            *measured(texts),
            *measured(bs),
            array("i", ds),
            array("?", fs),
        ]
    parts = (b"\xff" * 4 if f is None else struct.pack(">i", len(f)) + f for f in fields)
    return struct.pack(">h", len(fields)) + b"".join(parts)


def decode(
    messages: Sequence[bytes], size: int = 100, packing: Packing = Packing.MARKED
) -> list[TableBatch]:
    decoder = ColumnarDecoder(TABLE, Lsn(77), AT, 64, packing)
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


MARK = int.from_bytes(b"\x9d\x3c\x6b\x1f", signed=True)
"""What stands for a null int4."""
int32 = st.integers(-(2**31), 2**31 - 1) | st.sampled_from([-1, 4, 8, MARK])
texts_with = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=9)
row_lists = st.lists(
    st.tuples(
        st.integers(-(2**63), 2**63 - 1) | st.sampled_from([-1, (4 << 32) - 1]),
        st.none() | int32,
        st.none() | texts_with | st.sampled_from(["\x0e", "\x0f"]),
        st.none() | st.binary(max_size=9),
        st.none() | st.integers(-700_000, 2_900_000),
        st.none() | st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


def expected_of(runs: Sequence[Sequence[Row]]) -> list[Row]:
    day = date(2000, 1, 1)
    return [
        (i, n, s, b, None if d is None else day + timedelta(days=d), f)  # type: ignore[misc]
        for rows in runs
        for i, n, s, b, d, f in rows
    ]


@pytest.mark.thorough
@given(st.lists(row_lists, max_size=5), st.sampled_from([1, 2, 100]), st.sampled_from(Packing))
@examples(300)
def test_lossless_whatever_the_values(runs: list[list[Row]], size: int, packing: Packing) -> None:
    messages = [packed(i * 64, rows, packing) for i, rows in enumerate(runs)]
    whole = [HEADER + messages[0], *messages[1:], TRAILER] if messages else [HEADER + TRAILER]
    try:
        found = values(decode(whole, size, packing))
    except AmbiguousMarkError:
        assert packing is Packing.MARKED
        assert any(
            row[1] == MARK or (row[2] and {"\x0e", "\x0f"} & set(row[2]))
            for rows in runs
            for row in rows
        )
    else:
        assert found == expected_of(runs)


@pytest.mark.parametrize(
    "texts",
    [["a\x0eb", "c"], ["\x0f", None], ["\x0e", None], ["\x0f\x0e", "\x0e\x0f"], ["", "\x0e"]],
)
def test_marks_are_noticed_in_texts(texts: list[str | None]) -> None:
    rows: list[Row] = [(1, 2, text, None, 3, None) for text in texts]
    with pytest.raises(AmbiguousMarkError, match=r"public\.t: a value of 's'"):
        decode([HEADER, packed(0, rows, Packing.MARKED), TRAILER])
    measured = [HEADER, packed(0, rows, Packing.MEASURED), TRAILER]
    assert values(decode(measured, packing=Packing.MEASURED)) == expected_of([rows])


def test_a_mark_of_nulls_is_noticed_in_numbers() -> None:
    rows: list[Row] = [(1, n, "", None, 3, None) for n in (MARK, None, 5)]
    with pytest.raises(AmbiguousMarkError, match=r"public\.t: a value of 'n'"):
        decode([HEADER, packed(0, rows, Packing.MARKED), TRAILER])


def test_a_null_where_none_was_announced_is_noticed() -> None:
    rows: list[Row] = [(i, 1, "", None, 3, None) for i in range(3)]
    message = packed(0, rows, Packing.MARKED)
    of_two = message.replace(struct.pack(">iqqq", 24, 0, 1, 2), struct.pack(">iqq", 16, 0, 2), 1)
    with pytest.raises(AmbiguousMarkError, match=r"public\.t: a value of 'id'"):
        decode([HEADER, of_two, TRAILER])


def test_marks_of_nulls_are_values_where_nothing_is_null() -> None:
    rows: list[Row] = [(1, MARK, "\x0f", None, 3, None), (2, 2, "", None, 3, None)]
    found = values(decode([HEADER, packed(0, rows, Packing.MARKED), TRAILER]))
    assert found == expected_of([rows])


def test_what_a_date_cannot_hold_is_in_cdc_raw() -> None:
    special = {-(2**31): "-infinity", 2**31 - 1: "infinity", -730_485: "0001-01-01 BC"}
    rows: list[Row] = [(i, 1, "", b"", day, None) for i, day in enumerate([0, *special, *special])]
    [batch] = decode([HEADER, packed(0, rows, Packing.MARKED), TRAILER])
    found = batch.rows.to_pylist(maps_as_pydicts="strict")
    assert [r["d"] for r in found] == [date(2000, 1, 1), *[None] * 6]
    assert [(r["_cdc_raw"] or {}).get("d") for r in found] == [
        None,
        *special.values(),
        *special.values(),
    ]


def test_next_block_follows_what_was_given() -> None:
    packing = Packing.MARKED
    decoder = ColumnarDecoder(TABLE, Lsn(77), AT, 64, packing)
    row: Row = (1, None, None, None, None, None)
    assert decoder.next_block == 0
    first = [HEADER + packed(128, [row], packing), packed(192, [row], packing)]
    decoder.feed(*pgoutput.laid_out(first, gap=b""))
    assert decoder.next_block == 256
    bad = packed(256, [(1, None, "\x0e", None, None, None)], packing)
    with pytest.raises(AmbiguousMarkError):
        decoder.feed(*pgoutput.laid_out([bad], gap=b""))
    assert decoder.next_block == 256


ROWS: list[Row] = [(1, 2, "ab", b"\0", 3, True), (4, None, None, None, None, None)]
GOOD = {packing: [HEADER, packed(0, ROWS, packing), TRAILER] for packing in Packing}


@pytest.mark.parametrize("packing", Packing)
def test_a_broken_frame_is_refused(packing: Packing) -> None:
    good = GOOD[packing]
    cut = [HEADER, good[1][:-1], TRAILER]
    for messages in (good[:2], good[1:], [HEADER, TRAILER, good[1]], [HEADER[:9]], cut):
        with pytest.raises(ProtocolError):
            decode(messages, packing=packing)


@pytest.mark.thorough
@given(st.data(), st.sampled_from(Packing), st.sampled_from([ROWS, ROWS[:1], ROWS[1:]]))
@examples(600)
def test_garbage_gives_protocol_error_and_nothing_else(
    data: st.DataObject, packing: Packing, rows: list[Row]
) -> None:
    message = bytearray(packed(0, rows, packing))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(message) - 1))
        message[at] = data.draw(st.sampled_from([0, 1, 2, 0x0E, 0x0F, 0x7F, 0x80, 0xFF]))
    end = data.draw(st.integers(1, len(message)))
    cut = bytes(message[:end]) if data.draw(st.booleans()) else bytes(message)
    with contextlib.suppress(ProtocolError):
        decode([HEADER, cut, TRAILER], packing=packing)


def test_texts_that_are_not_there_at_all_are_garbage() -> None:
    none = packed(0, ROWS[:1], Packing.MARKED).replace(
        struct.pack(">i", 2) + b"ab", struct.pack(">i", -1)
    )
    with pytest.raises(ProtocolError, match="no texts"):
        decode([HEADER, none, TRAILER])


@pytest.mark.parametrize(
    ("count", "nullable", "found"),
    [
        (0, True, []),
        (831, True, [Packing.MARKED, Packing.MEASURED]),
        (832, True, [Packing.MEASURED]),
        (1600, False, [Packing.MARKED, Packing.MEASURED]),
        (1663, False, []),
    ],
)
def test_a_table_is_packed_by_what_a_query_can_give(
    count: int,
    found: list[Packing],
    *,
    nullable: bool,
) -> None:
    kind = lake_type(23, -1)
    columns = tuple(Column(f"c{i}", 23, -1, kind, nullable=nullable) for i in range(count))
    assert packings_of(replace(TABLE, columns=columns, key=(), before=())) == found


def test_bounded_rows_without_any_value_are_not_packed() -> None:
    """Nothing but a number, which may be any, would say how many there are."""
    hidden = Column("h", 25, -1, lake_type(25, -1), mask=Mask("null"))
    alone = replace(TABLE, columns=(hidden,), key=(), before=())
    assert packings_of(alone) == []
    assert packings_of(replace(alone, columns=(*TABLE.columns, hidden))) == [*Packing]


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
