"""How far a snapshot of a table is, and when it will be done."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

_WINDOW_S = 60.0
"""The speed of this last while tells when it will be done."""
_SAMPLES = 64
_BEGAN_AGAIN = 0.5
"""A ratio below this part of the last one: it is read from the beginning."""


@dataclass(slots=True)
class SnapshotProgress:
    """A snapshot under way. `now` is passed in by the caller (aware).

    `ratio`: how much is read, 0 to 1, by the source's estimate of the table's size. `nbytes`: what
    the source has sent for it since `started_at`. `resumed_at`: the ratio it went on from, where
    an earlier daemon had begun it.
    """

    started_at: datetime
    ratio: float = 0.0
    nbytes: int = 0
    resumed_at: float = 0.0
    _samples: deque[tuple[datetime, float]] = field(default_factory=deque)

    def observe(self, ratio: float, nbytes: int, now: datetime) -> None:
        """Take how much is read; `nbytes`: what the source has sent since the last call."""
        ratio = min(max(ratio, 0.0), 1.0)
        if ratio < self.ratio * _BEGAN_AGAIN:
            self.started_at, self.nbytes, self.resumed_at = now, 0, 0.0
            self._samples.clear()
        if not self._samples:
            # Told with nothing sent, a ratio is what was read before; else this is the first page.
            self.resumed_at = ratio if nbytes == 0 else 0.0
            self._samples.append((self.started_at, self.resumed_at))
        self.ratio = ratio
        self.nbytes += nbytes
        self._sample(now)

    def _sample(self, now: datetime) -> None:
        samples = self._samples
        if len(samples) > 1 and (now - samples[-2][0]).total_seconds() < _WINDOW_S / _SAMPLES:
            samples.pop()  # one a second is enough
        samples.append((now, self.ratio))
        while len(samples) > 2 and (now - samples[1][0]).total_seconds() >= _WINDOW_S:  # noqa: PLR2004 - the two ends of the window
            samples.popleft()

    @property
    def total_bytes(self) -> int | None:
        """What the source will have sent for the whole table; None before anything is read."""
        read = self.ratio - self.resumed_at
        return round(self.nbytes / read) if read > 0 and self.nbytes else None

    @property
    def eta_s(self) -> float | None:
        """Seconds until it is read, as of the last `observe`; None while that can't be told."""
        if not self._samples:
            return None
        (began, had), (ended, has) = self._samples[0], self._samples[-1]
        elapsed_s = (ended - began).total_seconds()
        if has <= had or elapsed_s <= 0:
            return None
        return (1.0 - has) * elapsed_s / (has - had)
