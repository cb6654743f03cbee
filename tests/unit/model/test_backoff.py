"""The one rule by which delays between tries grow."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from ingestd.model.backoff import Backoff

SECONDS = st.floats(0.001, 1e6)


def test_it_doubles_up_to_its_limit() -> None:
    assert [Backoff(0.5, 3.0).after(n) for n in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]


@given(SECONDS, SECONDS, st.integers(1, sys.maxsize))
def test_it_never_shrinks_and_never_passes_the_limit(
    first: float, longest: float, failures: int
) -> None:
    backoff = Backoff(first, longest)
    assert min(first, longest) <= backoff.after(failures) <= backoff.after(failures + 1) <= longest
