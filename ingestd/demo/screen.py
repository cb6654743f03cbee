"""The demo's output: a live table on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ingestd.demo.lake_view import LakeView
from ingestd.terminal.status import size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from ingestd.testing.oracle.comparison import LakeComparison

_LINE_EVERY_S = 5.0


class Screen:
    """Shows frames while entered; `say` prints a line above them at any time."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = Live(console=console, refresh_per_second=4, transient=False)
        self._last_line_s = 0.0

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        """Print a line."""
        self.console.print(Text(text, style=style), soft_wrap=True)

    def show(self, lake: LakeView, status: Mapping[str, Any] | None, source: str) -> None:
        """Show the lake's content and the daemon's status; None: the daemon does not respond."""
        found = {} if status is None else status["sources"].get(source, {})
        if self.console.is_terminal:
            self._live.update(Group(_tables(lake, found), _daemon(lake, found)))
        elif time.monotonic() - self._last_line_s >= _LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            rows = ", ".join(f"{name} {count:,}" for name, count in sorted(lake.rows.items()))
            self.console.print(_daemon(lake, found), soft_wrap=True)
            self.say(f"  rows in the lake: {rows or 'none yet'}")


def print_comparisons(console: Console, comparisons: Sequence[LakeComparison]) -> None:
    """Print the compared tables, and the faults that were found."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("table")
    for name in ("rows in source", "changes in lake", "lost", "doubled"):
        table.add_column(name, justify="right")
    table.add_column("")
    for c in comparisons:
        verdict = Text("equal", style="green") if c.is_equal else Text("DIFFERENT", style="red")
        table.add_row(
            Text(str(c.table)),
            f"{c.rows:,}",
            f"{c.changes:,}",
            f"{c.lost}",
            f"{c.doubled}",
            verdict,
        )
    console.print(table)
    for c in comparisons:
        for fault in c.faults:
            console.print(Text(f"{c.table}: {fault}", style="red"), soft_wrap=True)


def _tables(lake: LakeView, source: Mapping[str, Any]) -> Table:
    states = {table["table"]: table["state"] for table in source.get("tables", ())}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("table", min_width=22)
    table.add_column("rows captured", justify="right")
    table.add_column("state")
    for name in sorted(states.keys() | lake.rows.keys()):
        table.add_row(Text(name), f"{lake.rows[name]:,}", states.get(name, "-"))
    return table


def _daemon(lake: LakeView, source: Mapping[str, Any]) -> Text:
    if not source:
        return Text(f"daemon: no response; epoch {lake.epochs} in the lake", style="yellow")
    parts = [
        f"daemon: {source.get('state', '?')}",
        f"epoch {lake.epochs}",
        f"{sum(lake.rows.values()):,} rows",
        f"lag {size(source.get('lag_bytes'))}",
        f"freshness {_seconds(source.get('freshness_p50_seconds'))} (p50)",
        f"{_seconds(source.get('freshness_p99_seconds'))} (p99)",
    ]
    return Text(", ".join(parts))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
