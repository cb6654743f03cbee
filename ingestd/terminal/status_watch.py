"""`ingestd status --watch`: the status repeatedly, redrawn in place on a terminal."""

from __future__ import annotations

import io
import json
import time
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ingestd.terminal.status import print_status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def watch_status(
    ask: Callable[[], Mapping[str, Any]], interval_s: float, console: Console | None = None
) -> None:
    """Show the status that `ask` returns every `interval_s`, until Ctrl-C.

    On a terminal it is redrawn in place, elsewhere the blocks follow each other.
    """
    out = console or Console(highlight=False, emoji=False)
    with suppress(KeyboardInterrupt):
        if out.is_terminal:
            _redraw(ask, interval_s, out)
        while True:
            print_status(ask(), out)
            out.print()
            time.sleep(interval_s)


def _redraw(ask: Callable[[], Mapping[str, Any]], interval_s: float, out: Console) -> None:
    drawn = _drawn(ask(), out, interval_s)
    with Live(drawn, console=out, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(_drawn(ask(), out, interval_s), refresh=True)


def _drawn(status: Mapping[str, Any], out: Console, interval_s: float) -> Text:
    """Return the printed status as a text that can be redrawn."""
    buffer = io.StringIO()
    inner = Console(
        file=buffer,
        force_terminal=True,
        width=out.width,
        color_system=out.color_system,  # type: ignore[arg-type] # rich gives it as a plain str
        highlight=False,
        emoji=False,
    )
    print_status(status, inner)
    now = datetime.now().astimezone()
    inner.print(f"every {interval_s:g} s, last at {now:%H:%M:%S}; Ctrl-C to stop")
    return Text.from_ansi(buffer.getvalue())


def watch_lines(ask: Callable[[], Mapping[str, Any]], interval_s: float) -> None:
    """Print the status that `ask` returns as a line of JSON every `interval_s`, until Ctrl-C."""
    with suppress(KeyboardInterrupt):
        while True:
            typer.echo(json.dumps(ask()))
            time.sleep(interval_s)
