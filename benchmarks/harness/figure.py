"""A line of the benchmarks' table."""

from __future__ import annotations

from dataclasses import dataclass

MEMORY_LIMIT_MB = 600


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured figure and its target."""

    what: str
    measured: str
    reach: str
    is_reached: bool


def memory_figure(what: str, peak_mb: float, limit_mb: float = MEMORY_LIMIT_MB) -> Figure:
    """Return a figure of resident memory."""
    return Figure(what, f"{peak_mb:.0f} MB", f"<= {limit_mb:.0f} MB", peak_mb <= limit_mb)
