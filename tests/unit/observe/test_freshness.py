"""Quantiles of recent values."""

from __future__ import annotations

import numpy as np

from ingestd.observe.freshness import RecentFreshness


def test_quantiles_since_then_know_nothing_of_what_came_before() -> None:
    recent = RecentFreshness()
    assert recent.quantile_since(0, 0.5) is None
    recent.observe(np.array([100.0, 200.0]))
    then = recent.seen
    assert recent.quantile_since(then, 0.5) is None
    recent.observe(np.array([1.0, 2.0, 3.0]))
    assert recent.quantile_since(then, 0.5) == 2.0
    assert recent.quantile_since(0, 1.0) == 200.0


def test_quantiles_of_more_than_is_held_are_those_of_what_is() -> None:
    recent = RecentFreshness()
    recent.observe(np.full(5000, 9.0))
    recent.observe(np.full(5000, 1.0))
    recent.observe(np.full(5000, 1.0))
    assert recent.quantile_since(0, 1.0) == 1.0
