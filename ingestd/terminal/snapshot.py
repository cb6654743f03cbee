"""The progress of snapshots: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import TextColumn
from rich.text import Text

from ingestd.model.printable_text import printable
from ingestd.terminal.progress import TableBars
from ingestd.terminal.status import duration, size

if TYPE_CHECKING:
    from collections.abc import Callable

    from ingestd.http.snapshot_client import TableProgress

_MANY = 12
"""With more tables than this, finished bars are removed."""
_SPEED_WINDOW = 12
_STEPS = 10


class SnapshotLines:
    """Prints a line for each change of state and tenth of a table (a `SnapshotDisplay`)."""

    def __init__(self, source: str, write: Callable[[str], None]) -> None:
        self._source = source
        self._write = write
        self._written: dict[str, object] = {}

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: nothing is open."""

    def source(self, line: str) -> None:
        """Print why the source does not progress, and when it continues."""
        if self._written.get("", "") != line:
            self._written[""] = line
            self._write(f"source {self._source}: {line or 'continues'}")

    def table(self, progress: TableProgress) -> None:
        """Print a table's state and progress."""
        news = (progress.state, int(progress.ratio * _STEPS), progress.is_over)
        if self._written.get(progress.table) != news:
            self._written[progress.table] = news
            self._write(f"{progress.table}: {_line(progress)}")


def _line(progress: TableProgress) -> str:
    if progress.state == "waiting":
        return "waiting for its snapshot"
    if progress.is_over or not progress.ratio:
        return progress.state
    parts = [progress.state, f"{progress.ratio:.0%} read"]
    if progress.total_bytes is not None:
        parts.append(f"{size(progress.nbytes)} of about {size(progress.total_bytes)}")
    if left := _time_left(progress):
        parts.append(left)
    return ", ".join(parts)


def _time_left(progress: TableProgress) -> str:
    if progress.ratio >= 1:
        return "being committed"
    return "" if progress.eta_s is None else f"{duration(progress.eta_s)} left"


class SnapshotBars(TableBars):
    """Draws a bar for each of `count` tables: progress, speed, time left (a `SnapshotDisplay`)."""

    def __init__(
        self,
        source: str,
        count: int,
        console: Console,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            console,
            TextColumn("{task.fields[speed]}", justify="right"),
            TextColumn("{task.fields[left]}"),
        )
        self._source = source
        self._monotonic = monotonic
        self._keeps = count <= _MANY
        self._speeds: dict[str, deque[tuple[float, int]]] = {}
        self._written = ""

    def source(self, line: str) -> None:
        """Print above the bars why the source does not progress."""
        if self._written != line:
            self._written = line
            self.console.print(Text(f"  source {self._source}: {line or 'continues'}"))

    def table(self, progress: TableProgress) -> None:
        """Draw a table's bar."""
        self.update(
            progress.table,
            progress.ratio,
            speed=self._speed(progress),
            left=_left(progress),
            visible=self._keeps or not progress.is_over,
        )
        if progress.is_over and not self._keeps:
            self.console.print(Text(printable(f"  {progress.table}: {progress.state}")))

    def _speed(self, progress: TableProgress) -> str:
        """Return the bytes per second over the last few polls."""
        seen = self._speeds.setdefault(progress.table, deque(maxlen=_SPEED_WINDOW))
        if seen and progress.nbytes < seen[-1][1]:
            seen.clear()  # the snapshot restarted
        seen.append((self._monotonic(), progress.nbytes))
        (began, had), (ended, has) = seen[0], seen[-1]
        if progress.is_over or has == had or ended <= began:
            return ""
        return f"{size((has - had) / (ended - began))}/s"


def _left(progress: TableProgress) -> str:
    if progress.is_over:
        return progress.state
    return "waiting" if progress.state == "waiting" else _time_left(progress)
