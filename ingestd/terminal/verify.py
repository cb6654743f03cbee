"""The progress of a verification, shown only on a terminal."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import TextColumn

from ingestd.model.lsn import Lsn
from ingestd.terminal.progress import TableBars

_WAITING = "the lake"


class Untold:
    """Shows nothing (an `ingestd.ports.verify.VerifyProgress`)."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def waiting(self, lake: Lsn | None, until: Lsn) -> None:
        """Do nothing."""

    def table(self, name: str, ratio: float) -> None:
        """Do nothing."""


class VerifyBars(TableBars):
    """Draws a bar for the current table, or the wait for the lake (a `VerifyProgress`)."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, TextColumn("{task.fields[note]}"), transient=True)

    def waiting(self, lake: Lsn | None, until: Lsn) -> None:
        """Show the positions of lake and source."""
        self.update(_WAITING, 0.0, note=f"is at {lake}, the source at {until}")

    def table(self, name: str, ratio: float) -> None:
        """Draw the progress of a table, and remove earlier bars."""
        self.keep_only(name)
        self.update(name, ratio, note="reading" if ratio < 1 else "comparing")


def verify_progress() -> Untold | VerifyBars:
    """Return bars on stderr if that is a terminal."""
    console = Console(stderr=True)
    return VerifyBars(console) if console.is_terminal else Untold()
