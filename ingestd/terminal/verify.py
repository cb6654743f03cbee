"""How far a verification is, on a terminal; elsewhere nothing is told until the end."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import TextColumn

from ingestd.model.lsn import Lsn
from ingestd.terminal.progress import TableBars

_WAITING = "the lake"


class Untold:
    """Tells nothing. See `ingestd.ports.verify.VerifyProgress`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def waiting(self, lake: Lsn | None, until: Lsn) -> None:
        """Tell nothing."""

    def table(self, name: str, ratio: float) -> None:
        """Tell nothing."""


class VerifyBars(TableBars):
    """A bar for the table that is read, and what is waited for. See the same."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, TextColumn("{task.fields[told]}"), transient=True)

    def waiting(self, lake: Lsn | None, until: Lsn) -> None:
        """Say where the lake is, and where the source was."""
        self.update(_WAITING, 0.0, told=f"is at {lake}, the source at {until}")

    def table(self, name: str, ratio: float) -> None:
        """Draw how much of a table has been read; of those before nothing is left."""
        self.keep_only(name)
        self.update(name, ratio, told="read" if ratio < 1 else "comparing")


def verify_progress() -> Untold | VerifyBars:
    """Return bars on stderr if that is a terminal."""
    console = Console(stderr=True)
    return VerifyBars(console) if console.is_terminal else Untold()
