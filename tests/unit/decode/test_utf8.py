"""Which values are UTF-8: as Python says of each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ingestd.decode.values.utf8 import not_utf8
from tests.harness.examples import examples

SEQUENCES = [
    *(b"a", b"\xc2\x80", b"\xdf\xbf", b"\xe0\xa0\x80", b"\xef\xbf\xbf", b"\xf0\x90\x80\x80"),
    *(b"\xf4\x8f\xbf\xbf", b"\xed\x9f\xbf", b"\xee\x80\x80", b"\xc0\x80", b"\xc1\xbf"),
    *(b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf5\x80"),
    *(b"\xff", b"\x80", b"\xbf", b"\xc2", b"\xe0", b"\xe0\xa0", b"\xf0", b"\xf0\x90", b"\xe2\x28"),
    *(b"\xf0\x90\x80", b"\xc2\xc2", b"\xed", b"\xf4", b"\x7f", b"\x00"),
]


def is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.slow
@examples(1000)
@given(
    st.lists(
        st.lists(st.sampled_from(SEQUENCES), max_size=4).map(b"".join) | st.binary(max_size=6),
        min_size=1,
        max_size=8,
    )
)
@example([b"\xf0", b"\x90", b"", b"\x80\x80", b"a"])
@example([b"\xe2\x82", b"\xac", b"\xac"])
@example([b"\xf0\x90\x80", b"ab", b"\xf0\x90", b"", b"\x80"])
def test_every_value_as_python_says(values: list[bytes]) -> None:
    offsets = np.cumsum([0, *map(len, values)])
    found = not_utf8(np.frombuffer(b"".join(values), np.uint8), offsets)
    assert found.tolist() == [not is_utf8(v) for v in values]
