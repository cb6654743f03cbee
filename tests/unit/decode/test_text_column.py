"""Numbers and letters are read correctly at any offset of a buffer."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ingestd.decode.values.text_column import ByteBuffer, TextColumn

Bytes = st.binary(min_size=1, max_size=40)


def _number(buffer: bytes, at: int, size: int) -> int:
    return int.from_bytes(buffer[at : at + size].ljust(size, b"\0"), "big", signed=True)


@given(Bytes)
def test_numbers_are_read_up_to_the_last_byte(buffer: bytes) -> None:
    source, offsets = ByteBuffer(buffer), np.arange(len(buffer))
    for size, read in ((2, source.int16_at), (4, source.int32_at), (8, source.int64_at)):
        assert read(offsets).tolist() == [_number(buffer, at, size) for at in offsets.tolist()]
        # a complete one is the same whatever else is read with it
        whole = offsets[: max(0, len(buffer) - size + 1)]
        assert read(whole).tolist() == [_number(buffer, at, size) for at in whole.tolist()]


@given(Bytes, st.integers(0, 1 << 40))
def test_reading_beyond_the_buffer_is_no_error(buffer: bytes, beyond: int) -> None:
    source = ByteBuffer(buffer)
    offsets = np.array([0, len(buffer) + beyond])
    assert len(source.int64_at(offsets)) == len(source.bytes_at(offsets)) == 2
    assert source.int64_at(offsets)[0] == _number(buffer, 0, 8)


@given(st.lists(Bytes, min_size=1, max_size=8))
def test_first_letters_are_the_same_whether_read_before_or_not(values: list[bytes]) -> None:
    lengths = np.array([len(value) for value in values])
    ends = np.cumsum(lengths + 5)
    source = ByteBuffer(b"".join(b"t" + len(v).to_bytes(4, "big") + v for v in values))
    plain = TextColumn(source, ends - lengths, lengths)
    read = TextColumn(source, ends - lengths, lengths, heads=source.int64_at(ends - lengths - 5))
    for texts in (plain, read, plain.headed(), read.headed()):
        assert texts.first().tobytes() == bytes(v[0] for v in values)
        longer = texts[np.flatnonzero(lengths > 1)]
        assert longer.second().tobytes() == bytes(v[1] for v in values if len(v) > 1)
        longest = texts[np.flatnonzero(lengths > 2)]
        assert longest.third().tobytes() == bytes(v[2] for v in values if len(v) > 2)
