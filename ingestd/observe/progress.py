"""The progress of a table's snapshot, and when it will be complete."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

_WINDOW_S = 60.0
"""The estimate uses the speed over this window."""
_SAMPLES = 64
_BEGAN_AGAIN = 0.5
"""If the ratio drops below this part of the last one, the snapshot has started over."""


@dataclass(slots=True)
class SnapshotProgress:
    """A running snapshot. `now` is passed in by the caller (aware).

    `ratio`: the part that is read, 0 to 1, by the source's estimate of the table's size. `nbytes`:
    bytes that the source has sent for it since `started_at`. An earlier daemon may have read a
    part, so the speed and the bytes per ratio count from the first `observe`.
    """

    started_at: datetime
    ratio: float = 0.0
    nbytes: int = 0
    _first: tuple[float, int] | None = None
    samples: deque[tuple[datetime, float]] = field(default_factory=deque)

    def observe(self, ratio: float, nbytes: int, now: datetime) -> None:
        """Record the part that is read; `nbytes`: bytes sent by the source since the last call."""
        ratio = min(max(ratio, 0.0), 1.0)
        if ratio < self.ratio * _BEGAN_AGAIN:
            self.started_at, self.nbytes, self._first = now, 0, None
            self.samples.clear()
        self.ratio = ratio
        self.nbytes += nbytes
        if self._first is None:
            self._first = (ratio, self.nbytes)
        self._sample(now)

    def _sample(self, now: datetime) -> None:
        samples = self.samples
        if len(samples) > 1 and (now - samples[-2][0]).total_seconds() < _WINDOW_S / _SAMPLES:
            samples.pop()  # one a second is enough
        samples.append((now, self.ratio))
        while len(samples) > 2 and (now - samples[1][0]).total_seconds() >= _WINDOW_S:  # noqa: PLR2004 - the two ends of the window
            samples.popleft()

    @property
    def total_bytes(self) -> int | None:
        """Estimate of the bytes that the source sends for all of the table; None if unknown."""
        ratio, nbytes = self._first or (0.0, 0)
        if self.ratio <= ratio or self.nbytes <= nbytes:
            return None
        return round((self.nbytes - nbytes) / (self.ratio - ratio))

    @property
    def eta_s(self) -> float | None:
        """Seconds until the snapshot is complete, as of the last `observe`; None if unknown."""
        if not self.samples:
            return None
        (began, had), (ended, has) = self.samples[0], self.samples[-1]
        elapsed_s = (ended - began).total_seconds()
        if has <= had or elapsed_s <= 0:
            return None
        return (1.0 - has) * elapsed_s / (has - had)
