"""COPY in binary format, cut anywhere between its messages."""

from __future__ import annotations

import contextlib
import struct
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.decode.copy.rows import CopyDecoder
from ingestd.decode.pgoutput.relation import parse_relation, table_of
from ingestd.model.changes import TableBatch
from ingestd.model.errors import ProtocolError
from ingestd.model.lsn import Lsn
from tests.harness.examples import examples
from tests.unit.decode import pgoutput

TABLE = table_of(
    parse_relation(
        pgoutput.relation(
            1, "t", [("id", 23, -1, True), ("ünï", 25, -1, False), ("d", 1082, -1, False)]
        )
    )
)
HEADER = b"PGCOPY\n\xff\r\n\0" + struct.pack(">ii", 0, 3) + b"ext"
TRAILER = b"\xff\xff"
AT = datetime(2024, 5, 6, 7, 8, 9, 123, tzinfo=UTC)


def row(*values: bytes | None) -> bytes:
    fields = (b"\xff" * 4 if v is None else struct.pack(">i", len(v)) + v for v in values)
    return struct.pack(">h", len(values)) + b"".join(fields)


def decode(messages: list[bytes], size: int = 100) -> list[TableBatch]:
    decoder = CopyDecoder(TABLE, Lsn(77), AT)
    found = []
    for start in range(0, len(messages), size):
        batch = decoder.feed(*pgoutput.laid_out(messages[start : start + size], gap=b"ab"))
        if batch is not None:
            batch.rows.validate(full=True)
            found.append(batch)
    decoder.finish()
    return found


ROWS = [row(b"1", b"", None), row(b"2", "é".encode(), b"2024-02-29"), row(b"3", None, b"infinity")]


@pytest.mark.parametrize("size", [1, 2, 3, 9])
@pytest.mark.parametrize("apart", [True, False])
def test_rows_at_the_point(size: int, *, apart: bool) -> None:
    rows = [HEADER, *ROWS, TRAILER] if apart else [HEADER + ROWS[0], *ROWS[1:], TRAILER]
    batches = decode(rows, size)
    found = [r for b in batches for r in b.rows.to_pylist(maps_as_pydicts="strict")]
    assert [r["id"] for r in found] == [1, 2, 3]
    assert [r["ünï"] for r in found] == ["", "é", None]
    assert [str(r["d"]) for r in found] == ["None", "2024-02-29", "None"]
    assert [r["_cdc_raw"] for r in found] == [None, None, {"d": "infinity"}]
    assert {r["_cdc_op"] for r in found} == {"r"}
    assert {(r["_cdc_lsn"], r["_cdc_seq"], r["_cdc_xid"]) for r in found} == {(77, 0, None)}
    assert {r["_cdc_ts"] for r in found} == {AT}
    assert {(r["_cdc_before"], r["_cdc_unchanged"]) for r in found} == {(None, None)}
    assert sum(b.nbytes for b in batches) == sum(map(len, ROWS))


def test_empty_table_sends_header_and_trailer_in_one() -> None:
    assert decode([HEADER + TRAILER]) == []


@pytest.mark.parametrize(
    "messages",
    [
        [HEADER, *ROWS],
        [*ROWS, TRAILER],
        [HEADER, TRAILER, *ROWS],
        [HEADER[:12], TRAILER],
        [HEADER.replace(b"\0\0\0\0", b"\0\1\0\0", 1), TRAILER],
        [HEADER, ROWS[0] + b"x", TRAILER],
        [HEADER, ROWS[0][:-1], TRAILER],
        [HEADER, row(b"1"), TRAILER],
        [HEADER, struct.pack(">hi", 3, -2), TRAILER],
        [HEADER, struct.pack(">hi", 3, 2**31 - 1), TRAILER],
    ],
)
def test_what_is_not_a_whole_copy_is_refused(messages: list[bytes]) -> None:
    for size in (1, 9):
        with pytest.raises(ProtocolError):
            decode(messages, size)


@examples(150)
@given(st.data())
def test_damaged_bytes_give_protocol_error_and_nothing_else(data: st.DataObject) -> None:
    messages = [bytearray(m) for m in (HEADER, *ROWS, TRAILER)]
    for _ in range(data.draw(st.integers(1, 3))):
        message = data.draw(st.sampled_from(messages))
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    size = data.draw(st.integers(1, 5))
    with contextlib.suppress(ProtocolError):
        decode([bytes(m) for m in messages], size)
