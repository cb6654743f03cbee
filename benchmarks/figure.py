"""A line of the benchmarks' table."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_LIMIT_MB = 600


@dataclass(frozen=True, slots=True)
class Figure:
    """What was measured, and what it is to reach."""

    what: str
    measured: str
    reach: str
    is_reached: bool


def memory_figure(what: str, peak_mb: float, limit_mb: float = MEMORY_LIMIT_MB) -> Figure:
    """Give a line about resident memory."""
    return Figure(what, f"{peak_mb:.0f} MB", f"<= {limit_mb:.0f} MB", peak_mb <= limit_mb)
