"""Which keys are linked, over others."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ingestd.lake.verify.change_digests import reached
from tests.harness.examples import examples

small = st.integers(0, 12)


@examples(50)
@given(st.sets(small, max_size=3), st.lists(st.tuples(small, small), min_size=1, max_size=15))
def test_all_keys_that_are_linked_are_reached(keys: set[int], links: list[tuple[int, int]]) -> None:
    expected = set(keys)
    for _ in links:
        for one, other in links:
            if expected & {one, other}:
                expected |= {one, other}
    found = reached(np.array(list(keys), np.uint64), np.array(links, np.uint64).T)
    assert found.tolist() == sorted(expected)
