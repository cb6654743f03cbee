"""How long to wait before the next try: twice as long after each failure, up to a limit."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_DOUBLINGS = 30
"""More would not fit a float once the count is large, and pass every limit long before."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """`first_s` after one failure, then twice as long each time, `longest_s` at most."""

    first_s: float
    longest_s: float

    def after(self, failures: int) -> float:
        """Return the delay after so many failures in a row, from 1, in seconds."""
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS))
