"""Findings of a preflight check, and its description of a table's columns."""

from __future__ import annotations

from collections.abc import Sequence

from ingestd.model.check import CheckLine, Level
from ingestd.model.errors import IngestdError
from ingestd.model.lake_state import Notice
from ingestd.model.schema import Table, lake_type_name


class CheckFindings:
    """Collects the check lines of one source."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.lines: list[CheckLine] = []

    def note(self, subject: str, level: Level, detail: str, remedy: str | None = None) -> None:
        """Add a line."""
        self.lines.append(CheckLine(self._source, subject, level, detail, remedy))

    def notice(self, notice: Notice) -> None:
        """Add a warning for a condition that a run would only log."""
        self.note(notice.event.partition(".")[0], "warn", notice.what, notice.remedy)

    def add_line(self, line: CheckLine | None) -> None:
        """Add a line, unless it is None."""
        if line is not None:
            self.lines.append(line)

    def fault(self, subject: str, error: IngestdError) -> None:
        """Add a failure line for an error."""
        self.note(subject, "fail", error.what, error.remedy)


def left_out(plain: Table, table: Table) -> list[str]:
    """Return the names of the catalog table's columns that are not captured."""
    kept = {c.name for c in table.columns}
    return [c.name for c in plain.columns if c.name not in kept]


def column_notes(plain: Table, table: Table) -> Sequence[str]:
    """Describe how the captured columns differ from the catalog's: one part per kind."""
    unkept = left_out(plain, table)
    masked = [f"{c.name} ({c.mask.kind})" for c in table.columns if c.mask is not None]
    typed = [f"{c.name} ({lake_type_name(c.type)})" for c in table.columns if c.is_override]
    return [
        *([f"left out: {', '.join(unkept)}"] if unkept else []),
        *([f"masked: {', '.join(masked)}"] if masked else []),
        *([f"types: {', '.join(typed)}"] if typed else []),
    ]


def lasting(seconds: float) -> str:
    """Format a duration for display, with up to three digits: ``12 ms``, ``1.5 s``, ``10 min``."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{max(1, round(seconds * 1000))} ms"


def sized(count: int) -> str:
    """Format a number of bytes for display: ``12 kB``, ``1.5 GB`` (powers of 1000)."""
    for unit, length in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= length:
            return f"{count / length:.3g} {unit}"
    return f"{count} B"
