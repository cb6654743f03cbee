"""Freshness: seconds from the commit at the source to durable in the lake, in bulk.

An epoch holds thousands of transactions: their ages are counted as one array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

BOUNDS = np.array(
    (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.3, 2, 3, 5, 7.5, 10, 15, 30, 60, 120, 300), np.float64
)
"""Upper bounds of the histogram's buckets, in seconds; +Inf follows."""

_RECENT = 8192


class FreshnessHistogram(Collector):
    """The histogram `ingestd_freshness_seconds{source}`."""

    def __init__(self) -> None:
        self._counts: dict[str, NDArray[np.int64]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, source: str, ages_s: NDArray[np.float64]) -> None:
        """Count ages in seconds; negative ones, from clocks that disagree, count as 0."""
        ages = np.maximum(ages_s, 0.0)
        buckets = np.searchsorted(BOUNDS, ages, side="left")  # an age equal to a bound is in it
        counts = np.bincount(buckets, minlength=len(BOUNDS) + 1)
        self._counts[source] = self._counts.get(source, 0) + counts
        self._sums[source] = self._sums.get(source, 0.0) + float(ages.sum())

    def drop_source(self, source: str) -> None:
        """Remove a source from the metric."""
        self._counts.pop(source, None)
        self._sums.pop(source, None)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the metric for a scrape (cumulative counts)."""
        family = HistogramMetricFamily(
            "ingestd_freshness_seconds",
            "Commit at the source to durable, per transaction without replication origin.",
            labels=["source"],
        )
        labels = [*(f"{bound:g}" for bound in BOUNDS), "+Inf"]
        for source, counts in self._counts.items():
            running = [float(n) for n in np.cumsum(counts)]
            buckets = list(zip(labels, running, strict=True))
            family.add_metric([source], buckets, self._sums[source])
        yield family


class RecentFreshness:
    """Quantiles over the last few thousand transactions."""

    def __init__(self) -> None:
        self._ages = np.empty(_RECENT, np.float64)
        self._seen = 0

    def observe(self, ages_s: NDArray[np.float64]) -> None:
        """Record ages in seconds, the newest last."""
        newest = np.maximum(ages_s[-_RECENT:], 0.0)
        at = (self._seen + np.arange(len(newest))) % _RECENT
        self._ages[at] = newest
        self._seen += len(newest)

    @property
    def seen(self) -> int:
        """Count of transactions recorded so far."""
        return self._seen

    def quantile(self, q: float) -> float | None:
        """Return the quantile (0..1) in seconds, None before the first transaction."""
        held = self._ages[: min(self._seen, _RECENT)]
        return float(np.quantile(held, q)) if len(held) else None

    def quantile_since(self, seen: int, q: float) -> float | None:
        """Return the quantile over the transactions after the first `seen`, None without any."""
        count = min(self._seen - seen, _RECENT)
        if count <= 0:
            return None
        newest = (self._seen - 1 - np.arange(count)) % _RECENT
        return float(np.quantile(self._ages[newest], q))
