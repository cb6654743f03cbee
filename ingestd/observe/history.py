"""The last hour of each source, one point every ten seconds, for the status page's charts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ingestd.observe.status import SourceState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from ingestd.observe.status import SourceStatus

INTERVAL_S = 10.0
POINTS_KEPT = 360
_MEASURED = {SourceState.SNAPSHOTTING, SourceState.STREAMING}
"""The lag is measured only in these states; an earlier value would be stale."""


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """A source at one time. None if not measured, or if there was nothing to measure.

    `rows_per_s` and the quantiles of freshness, in seconds, cover the time since the previous
    point.
    """

    at: datetime
    lag_bytes: int | None
    lag_seconds: float | None
    rows_per_s: float | None
    freshness_p50: float | None
    freshness_p99: float | None


@dataclass(slots=True)
class SourceHistory:
    """The points of one source, oldest first; `added`: how many were ever added."""

    points: deque[HistoryPoint] = field(default_factory=lambda: deque(maxlen=POINTS_KEPT))
    added: int = 0
    _before: tuple[datetime, int, int] | None = None

    def observe(self, source: SourceStatus, now: datetime) -> None:
        """Add a point."""
        is_measured = source.state in _MEASURED
        rate, p50, p99 = None, None, None
        if self._before is not None:
            then, rows, seen = self._before
            elapsed_s = (now - then).total_seconds()
            if elapsed_s > 0:  # the clock may have been set back
                rate = (source.rows - rows) / elapsed_s
            p50 = source.freshness.quantile_since(seen, 0.5)
            p99 = source.freshness.quantile_since(seen, 0.99)
        self._before = (now, source.rows, source.freshness.seen)
        self.points.append(
            HistoryPoint(
                now,
                source.lag_bytes if is_measured else None,
                source.lag_seconds if is_measured else None,
                rate,
                p50,
                p99,
            )
        )
        self.added += 1

    def since(self, added: int) -> list[HistoryPoint]:
        """Return the points after the first `added`, as far as they are kept."""
        new = min(self.added - added, len(self.points))
        return list(self.points)[len(self.points) - new :]


class SourceHistories:
    """The histories of all sources, by name. Called from one event loop."""

    def __init__(self) -> None:
        self.sources: dict[str, SourceHistory] = {}

    def observe(self, sources: Mapping[str, SourceStatus], now: datetime) -> None:
        """Add a point for each source."""
        for name, source in sources.items():
            self.of_source(name).observe(source, now)

    def of_source(self, source: str) -> SourceHistory:
        """Return the history of one source; empty before its first point."""
        return self.sources.setdefault(source, SourceHistory())


def columns(points: Iterable[HistoryPoint]) -> dict[str, list[float | None]]:
    """Return points for JSON, one list per figure; `at`: milliseconds since 1970 UTC."""
    held = list(points)
    return {
        "at": [round(p.at.timestamp() * 1000) for p in held],
        "lag_bytes": [p.lag_bytes for p in held],
        "lag_seconds": [_rounded(p.lag_seconds) for p in held],
        "rows_per_s": [_rounded(p.rows_per_s) for p in held],
        "freshness_p50": [_rounded(p.freshness_p50) for p in held],
        "freshness_p99": [_rounded(p.freshness_p99) for p in held],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
