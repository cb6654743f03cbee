"""What a process holds, again and again; and whether it grows."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass(frozen=True, slots=True)
class Sample:
    """`at_s`: since the load began. `rows`: taken so far. `blocks`: of Python's own allocator."""

    at_s: float
    rows: int
    rss_mb: float
    pss_mb: float
    private_mb: float
    descriptors: int
    threads: int
    tasks: int
    blocks: int
    arrow_mb: float

    def __str__(self) -> str:
        return (
            f"{self.at_s / 60:5.1f} min {self.rows:9} rows: RSS {self.rss_mb:.1f} MB,"
            f" PSS {self.pss_mb:.1f} MB, private {self.private_mb:.1f} MB,"
            f" Arrow {self.arrow_mb:.1f} MB, {self.descriptors} fds, {self.threads} threads,"
            f" {self.tasks} tasks, {self.blocks} blocks"
        )


COUNTED = ("descriptors", "threads", "tasks")


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be added: MB of RSS an hour, and of descriptors, threads and tasks each."""

    rss_mb_per_hour: float = 20.0
    counted: int = 5


@dataclass(frozen=True, slots=True)
class Trend:
    """Samples of one life; the first quarter, in which caches fill, is left out of what is judged.

    Raises ValueError for fewer than four samples in the rest: nothing can be said of them.
    """

    samples: Sequence[Sample]

    def __post_init__(self) -> None:
        if len(self.settled) < 4:
            msg = f"{len(self.samples)} samples are too few to tell growth"
            raise ValueError(msg)

    @property
    def settled(self) -> Sequence[Sample]:
        """The last three quarters."""
        return self.samples[len(self.samples) // 4 :]

    def per_hour(self, name: str) -> float:
        """Slope by least squares of one of the figures."""
        hours = [one.at_s / 3600 for one in self.settled]
        return statistics.linear_regression(hours, self._values(self.settled, name)).slope

    def added(self, name: str) -> float:
        """Median of the last third of what is settled, less that of its first."""
        third = len(self.settled) // 3 or 1
        first, last = self.settled[:third], self.settled[-third:]
        return statistics.median(self._values(last, name)) - statistics.median(
            self._values(first, name)
        )

    def faults(self, limits: Limits) -> list[str]:
        """Say what grew by more than is allowed, and when nothing came."""
        found = []
        if (slope := self.per_hour("rss_mb")) > limits.rss_mb_per_hour:
            found.append(f"RSS grows by {slope:.1f} MB/h; {limits.rss_mb_per_hour:g} are allowed")
        for name in COUNTED:
            more = self.added(name)
            if more > limits.counted:
                found += [f"{more:g} {name} were added; {limits.counted} are allowed"]
        found += [
            f"no rows came from {before.at_s / 60:.1f} to {after.at_s / 60:.1f} min"
            for before, after in pairwise(self.samples)
            if after.rows <= before.rows
        ]
        return found

    def lines(self) -> list[str]:
        """Return it for people."""
        first, last = self.samples[0], self.samples[-1]
        rate = (last.rows - first.rows) / max(last.at_s - first.at_s, 1e-9)
        minutes = (last.at_s - first.at_s) / 60
        found = [
            f"{len(self.samples)} samples, {minutes:.1f} minutes, {last.rows} rows ({rate:.0f}/s)",
            "of the last three quarters:",
        ]
        for field in fields(Sample)[2:]:
            values = self._values(self.settled, field.name)
            found.append(
                f"  {field.name}: {min(values):g} to {max(values):g}, median"
                f" {statistics.median(values):g}, slope {self.per_hour(field.name):+.2f}/h"
            )
        return found

    @staticmethod
    def _values(samples: Sequence[Sample], name: str) -> list[float]:
        get: Callable[[Sample], float] = lambda one: round(getattr(one, name), 1)  # noqa: E731
        return [get(one) for one in samples]
