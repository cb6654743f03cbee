"""Arrays of numbers: every one comes out, whatever nulls and values look like each other."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.decode.copy.columnar import fixed_array
from tests.harness.examples import examples

KINDS = {"b": "|i1", "h": ">i2", "i": ">i4", "q": ">i8"}


def array(code: str, values: list[int | None]) -> bytes:
    size = struct.calcsize(f">{code}")
    parts = [
        struct.pack(">i", -1) if v is None else struct.pack(f">i{code}", size, v) for v in values
    ]
    return struct.pack(">iiiii", 1, None in values, 23, len(values), 1) + b"".join(parts)


@st.composite
def arrays(draw: st.DrawFn) -> tuple[str, list[int | None]]:
    code = draw(st.sampled_from(list(KINDS)))
    bits = 8 * struct.calcsize(f">{code}")
    bound = 1 << (bits - 1)
    like_lengths = [
        v for v in (-1, 1, 2, 4, 8, -256, -(1 << 32), (1 << 32) - 1) if -bound <= v < bound
    ]
    values = st.sampled_from(like_lengths) | st.integers(-bound, bound - 1)
    return code, draw(st.lists(st.none() | values, min_size=1, max_size=40))


@pytest.mark.thorough
@given(arrays(), st.binary(max_size=3))
@examples(500)
def test_lossless(case: tuple[str, list[int | None]], before: bytes) -> None:
    code, values = case
    content = array(code, values)
    buffer = before + content + b"\xff\xff\xff\xff"
    found = fixed_array(buffer, len(before), len(content), len(values), np.dtype(KINDS[code]))
    assert found.numbers.dtype.isnative
    absent = [False] * len(values) if found.absent is None else found.absent.tolist()
    assert absent == [v is None for v in values]
    assert found.numbers.tolist() == [v or 0 for v in values]


@pytest.mark.slow
@given(arrays(), st.data())
@examples(300)
def test_damage_gives_value_error_and_nothing_else(
    case: tuple[str, list[int | None]], data: st.DataObject
) -> None:
    code, values = case
    content = bytearray(array(code, values))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.sampled_from([0, 1, 4, 0x7F, 0xFF]))
    length = data.draw(st.integers(0, len(content)))
    rows = data.draw(st.sampled_from([len(values), len(values) + 1, 1 << 30]))
    try:
        found = fixed_array(bytes(content), 0, length, rows, np.dtype(KINDS[code]))
    except ValueError:
        return
    assert len(found.numbers) == rows


def test_refused_by_what_is_wrong() -> None:
    good = array("i", [1, 2])
    with pytest.raises(ValueError, match="cut short"):
        fixed_array(good, 0, 19, 2, np.dtype(">i4"))
    with pytest.raises(ValueError, match="another length"):
        fixed_array(good, 0, len(good), 3, np.dtype(">i4"))
