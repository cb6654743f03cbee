"""How far a verification is, on a terminal; elsewhere nothing is told until the end."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.text import Text

from ingestd.positions import Lsn

_WAITING = "the lake"


class Untold:
    """Tells nothing. See `ingestd.verification.Progress`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def waiting(self, lake: Lsn | None, until: Lsn) -> None:
        """Tell nothing."""

    def table(self, name: str, ratio: float) -> None:
        """Tell nothing."""


class VerifyBars:
    """A bar for the table that is read, and what is waited for. See the same."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("  {task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[told]}"),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def waiting(self, lake: Lsn | None, until: Lsn) -> None:
        """Say where the lake is, and where the source was."""
        self._update(_WAITING, 0.0, f"is at {lake}, the source at {until}")

    def table(self, name: str, ratio: float) -> None:
        """Draw how much of a table has been read; of those before nothing is left."""
        for other in [n for n in self._tasks if n != name]:
            self._bars.remove_task(self._tasks.pop(other))
        self._update(name, ratio, "read" if ratio < 1 else "comparing")

    def _update(self, name: str, ratio: float, told: str) -> None:
        if name not in self._tasks:
            # A name may look like markup.
            self._tasks[name] = self._bars.add_task(Text(name).markup, total=1.0, told="")
        self._bars.update(self._tasks[name], completed=ratio, told=told)


def verify_progress() -> Untold | VerifyBars:
    """Give bars on stderr if that is a terminal."""
    console = Console(stderr=True)
    return VerifyBars(console) if console.is_terminal else Untold()
