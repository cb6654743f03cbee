"""How many examples Hypothesis tries."""

from __future__ import annotations

from hypothesis import settings

ALL, FEW = 100, 25
"""Of a test that chooses no number, by the profiles `suite` and `fast`."""
_FEWEST = 10


def examples(count: int) -> settings:
    """Return settings with `count` examples, or with a quarter of them in the profile `fast`."""
    share = count * settings().max_examples // ALL
    return settings(max_examples=max(share, min(count, _FEWEST)))
