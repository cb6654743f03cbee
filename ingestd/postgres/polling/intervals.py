"""When a table is polled, and how: a quiet one less often, a whole look as often as it is cheap."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ingestd.model.backoff import Backoff

QUIETEST = 10
"""A table without changes is polled every `interval` times this at most."""
GROWTH = 1.5
JITTER = 0.1
WHOLE_SHARE = 200
"""A whole look that takes a second is made every 200 s: it costs the server 0.5 % of its time."""
WHOLE_LIMIT_S = 600.0
"""But it is made so often at least: rows with a cursor of long ago wait for it."""
RETRY_S, RETRY_LIMIT_S = 1.0, 1024.0


@dataclass(slots=True)
class PollSchedule:
    """When one table's next look is. Times are monotonic seconds.

    `pace`: the interval's present multiple. `whole_s`: how long a whole look took. `failures`: in a
    row. `is_asked`: someone asked for a look, and none has begun since.
    """

    interval_s: float
    due_at: float
    pace: float = 1.0
    whole_at: float = 0.0
    whole_s: float = 0.0
    swept_at: float = 0.0
    failures: int = 0
    is_asked: bool = False
    jitter: Callable[[], float] = random.random

    def is_whole_due(self, now: float) -> bool:
        """Return whether the next look must be at the whole table."""
        rest_s = min(self.whole_s * WHOLE_SHARE, WHOLE_LIMIT_S)
        return now - self.whole_at >= rest_s

    def ask(self) -> None:
        """Have it looked at at once; once more if it is just being looked at: that may be early."""
        self.is_asked = True
        self.due_at = 0.0

    def begun(self) -> None:
        """Record that a look begins, which sees all that whoever asked wants to be seen."""
        self.is_asked = False

    def looked(self, now: float, *, found: bool, whole_s: float | None) -> None:
        """Record that it was looked at; `whole_s`: for so long, at all of it."""
        self.failures = 0
        self.pace = 1.0 if found else min(self.pace * GROWTH, QUIETEST)
        if whole_s is not None:
            self.whole_at, self.whole_s = now, whole_s
        if self.is_asked:
            self.due_at = now
        else:
            self._next(now, self.interval_s * self.pace)

    def failed(self, now: float) -> int:
        """Record that it could not be looked at; give how often in a row."""
        self.failures += 1
        backoff = Backoff(RETRY_S, min(RETRY_LIMIT_S, self.interval_s * QUIETEST))
        self._next(now, backoff.after(self.failures))
        return self.failures

    def _next(self, now: float, delay_s: float) -> None:
        self.due_at = now + min(delay_s, self.interval_s * QUIETEST) * (1 - JITTER * self.jitter())
