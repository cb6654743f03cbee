"""Progress bars by name, for tables."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
)
from rich.text import Text

from ingestd.model.printable_text import printable


class TableBars:
    """A progress bar for each name, with the columns `fields` beside it.

    Drawn while the context is entered; `transient`: erased on exit.
    """

    def __init__(self, console: Console, *fields: ProgressColumn, transient: bool = False) -> None:
        self.console = console
        self._bars = Progress(
            TextColumn("  {task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            *fields,
            console=console,
            transient=transient,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        """Start drawing."""
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop drawing."""
        self._bars.stop()

    def update(self, name: str, ratio: float, *, visible: bool = True, **fields: Any) -> None:  # noqa: ANN401 - rich takes any
        """Draw a bar that is filled to `ratio` (0 to 1)."""
        if name not in self._tasks:
            # Escapes names that look like markup.
            self._tasks[name] = self._bars.add_task(
                Text(printable(name)).markup, total=1.0, **fields
            )
        self._bars.update(self._tasks[name], completed=ratio, visible=visible, **fields)

    def keep_only(self, name: str) -> None:
        """Remove all other bars."""
        for other in [n for n in self._tasks if n != name]:
            self._bars.remove_task(self._tasks.pop(other))
