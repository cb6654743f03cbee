"""What a soak did and found."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Resources:
    """Of the daemon's process: resident megabytes, open file descriptors, its age in seconds."""

    resident_mb: float
    descriptors: int
    age_s: float

    def __str__(self) -> str:
        return f"{self.resident_mb:.0f} MB, {self.descriptors} open files ({self.age_s:.0f} s old)"


@dataclass(slots=True)
class Report:
    """`kills` by kind; `rows`: of the source, compared, and `changes` in the lake, at the end.

    `recoveries_s`: from the start of the process until it delivered; `first` and `last`: resources
    when the first life delivered, and of the last at the end; `longest`: of the longest life, when
    it delivered and last seen.
    """

    seed: int
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    failpoints: Counter[str] = field(default_factory=Counter)
    comparisons: int = 0
    rows_checked: int = 0
    changes: int = 0
    lost: int = 0
    doubled: int = 0
    epochs: int = 0
    transactions: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    first: Resources | None = None
    last: Resources | None = None
    longest: tuple[Resources, Resources] | None = None

    @property
    def survived(self) -> int:
        """Kills of all kinds."""
        return self.kills.total()

    def lines(self) -> list[str]:
        """Return it for people."""
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kills.items()))
        found = [
            f"seed {self.seed}, {self.seconds / 60:.1f} minutes",
            f"kills survived: {self.survived} ({kinds})",
            f"failpoints that acted: {self.failpoints.total()} at {len(self.failpoints)} points",
            f"transactions written: {self.transactions}; epochs: {self.epochs}",
            f"compared {self.comparisons} times, {self.rows_checked} rows of the source",
            f"changes in the lake at last: {self.changes}",
            f"lost {self.lost}, doubled {self.doubled}",
        ]
        if self.recoveries_s:
            middle, most = statistics.median(self.recoveries_s), max(self.recoveries_s)
            found.append(
                f"start to delivering: p50 {middle:.2f} s, max {most:.2f} s"
                f" ({len(self.recoveries_s)} starts)"
            )
        found.append(f"daemon at the start: {self.first}; at the end: {self.last}")
        if self.longest is not None:
            found.append(f"longest life: from {self.longest[0]} to {self.longest[1]}")
        return found
