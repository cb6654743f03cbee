"""Snapshots as a user watches them."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from ingestd.http.snapshot_client import TableProgress
from ingestd.terminal.snapshot import SnapshotBars, SnapshotLines
from ingestd.terminal.status import duration

A = "public.[b]a[/b]"


def progress(
    ratio: float = 0.0,
    state: str = "snapshotting",
    *,
    nbytes: int = 0,
    eta_s: float | None = None,
    is_over: bool = False,
    table: str = A,
) -> TableProgress:
    total_bytes = round(nbytes / ratio) if nbytes else None
    return TableProgress(table, state, ratio, nbytes, total_bytes, eta_s, is_over)


def test_a_line_for_each_state_and_each_tenth() -> None:
    told: list[str] = []
    with SnapshotLines("shop", told.append) as lines:
        lines.source("")
        for step in (progress(state="waiting"), progress(state="waiting"), progress()):
            lines.table(step)
        for hundredth in range(1, 35):
            lines.table(progress(hundredth / 100, nbytes=hundredth * 10**6, eta_s=100 - hundredth))
        lines.source("backing_off: lost")
        lines.source("backing_off: lost")
        lines.source("")
        lines.table(progress(1.0, nbytes=10**8, eta_s=0.0))
        lines.table(progress(1.0, "live", is_over=True))
    assert told == [
        f"{A}: waiting for its snapshot",
        f"{A}: snapshotting",
        f"{A}: snapshotting, 10% read, 10.0 MB of about 100.0 MB, 1 m 30 s left",
        f"{A}: snapshotting, 20% read, 20.0 MB of about 100.0 MB, 1 m 20 s left",
        f"{A}: snapshotting, 30% read, 30.0 MB of about 100.0 MB, 1 m 10 s left",
        "source shop: backing_off: lost",
        "source shop: continues",
        f"{A}: snapshotting, 100% read, 100.0 MB of about 100.0 MB, being committed",
        f"{A}: live",
    ]


def test_a_partial_snapshot_of_a_live_table_is_reported_too() -> None:
    told: list[str] = []
    with SnapshotLines("shop", told.append) as lines:
        lines.table(progress(0.5, "live", nbytes=1000))
        lines.table(progress(1.0, "live", is_over=True))
    assert told == [f"{A}: live, 50% read, 1.0 kB of about 2.0 kB", f"{A}: live"]


class Terminal:
    """Bars on a terminal that writes to memory."""

    def __init__(self, count: int) -> None:
        self.now = 0.0
        self._file = io.StringIO()
        console = Console(file=self._file, force_terminal=True, width=100, color_system=None)
        self.bars = SnapshotBars("shop", count, console, monotonic=lambda: self.now)

    def drawn(self) -> list[str]:
        """What stands there at the end, top down: control sequences taken out."""
        text = self._file.getvalue().rpartition("\x1b[2K")[2]
        return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip() for line in text.splitlines()]

    def told(self) -> str:
        return self._file.getvalue()


def test_a_bar_has_ratio_speed_and_the_time_left() -> None:
    terminal = Terminal(1)
    with terminal.bars as bars:
        bars.table(progress(0.1, nbytes=10_000_000, eta_s=90.0))
        terminal.now = 2.0
        bars.table(progress(0.42, nbytes=30_000_000, eta_s=75.0))
    [line] = [line for line in terminal.drawn() if "public" in line]
    assert line.split()[0] == A
    assert line.endswith(" 42% 10.0 MB/s 1 m 15 s left")


def test_a_bar_that_is_over_says_so() -> None:
    terminal = Terminal(2)
    with terminal.bars as bars:
        bars.table(progress(0.5, nbytes=100, eta_s=1.0))
        bars.table(progress(state="waiting", table="public.b"))
        bars.source("backing_off: lost")
        bars.table(progress(1.0, "live", is_over=True))
    lines = terminal.drawn()
    assert any(A in line and line.endswith("100%  live") for line in lines)
    assert any("public.b" in line and line.endswith("waiting") for line in lines)
    assert "source shop: backing_off: lost" in terminal.told()


def test_of_many_tables_only_those_under_way_keep_a_bar() -> None:
    terminal = Terminal(50)
    with terminal.bars as bars:
        bars.table(progress(0.5, table="public.b"))
        bars.table(progress(0.5))
        bars.table(progress(1.0, "live", is_over=True))
    assert [line.split()[0] for line in terminal.drawn() if "public" in line] == ["public.b"]
    assert f"  {A}: live" in terminal.told()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.4, "59 s"), (59.9, "1 m 00 s"), (3599, "59 m 59 s"), (93_784, "26 h 03 m")],
)
def test_a_duration_has_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text
