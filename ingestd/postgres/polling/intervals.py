"""When to poll a table: a quiet one less often, and with a full scan as often as it is cheap."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ingestd.model.backoff import Backoff

QUIETEST = 10
"""The longest interval of a table without changes, as a multiple of `interval`."""
GROWTH = 1.5
JITTER = 0.1
WHOLE_SHARE = 200
"""A full scan that takes a second is made every 200 s: it costs the server 0.5 % of its time."""
WHOLE_LIMIT_S = 600.0
"""But it is made so often at least: rows with a cursor of long ago wait for it."""
RETRY_S, RETRY_LIMIT_S = 1.0, 1024.0


@dataclass(slots=True)
class PollSchedule:
    """The schedule of one table. Times are monotonic seconds.

    `pace`: the current multiple of the interval. `whole_s`: how long a full scan took. `failures`:
    consecutive ones. `is_requested`: a poll was requested, and none has begun since.
    """

    interval_s: float
    due_at: float
    pace: float = 1.0
    whole_at: float = 0.0
    whole_s: float = 0.0
    swept_at: float = 0.0
    failures: int = 0
    is_requested: bool = False
    jitter: Callable[[], float] = random.random

    def is_whole_due(self, now: float) -> bool:
        """Return whether the next poll must be a full scan."""
        rest_s = min(self.whole_s * WHOLE_SHARE, WHOLE_LIMIT_S)
        return now - self.whole_at >= rest_s

    def ask(self) -> None:
        """Request a poll at once; repeat one that is running, which may have begun too early."""
        self.is_requested = True
        self.due_at = 0.0

    def record_start(self) -> None:
        """Record that a poll begins, which serves every request so far."""
        self.is_requested = False

    def record_poll(self, now: float, *, found_rows: bool, whole_s: float | None) -> None:
        """Record that it was polled; `whole_s`: the duration of a full scan, None without one."""
        self.failures = 0
        self.pace = 1.0 if found_rows else min(self.pace * GROWTH, QUIETEST)
        if whole_s is not None:
            self.whole_at, self.whole_s = now, whole_s
        if self.is_requested:
            self.due_at = now
        else:
            self._next(now, self.interval_s * self.pace)

    def failed(self, now: float) -> int:
        """Record that a poll failed; return the number of consecutive failures."""
        self.failures += 1
        backoff = Backoff(RETRY_S, min(RETRY_LIMIT_S, self.interval_s * QUIETEST))
        self._next(now, backoff.after(self.failures))
        return self.failures

    def _next(self, now: float, delay_s: float) -> None:
        self.due_at = now + min(delay_s, self.interval_s * QUIETEST) * (1 - JITTER * self.jitter())
