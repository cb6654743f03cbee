"""`ingestd run`."""

from __future__ import annotations

import os
import signal
from typing import Annotated

import typer

from ingestd.cli import completion
from ingestd.cli.errors import reporting
from ingestd.cli.options import ConfigFile, Debug
from ingestd.process.imports import without_pandas
from ingestd.process.memory import configure_allocators, gc_frozen


def run(
    config: ConfigFile,
    *,
    accept_empty_lake: Annotated[
        list[str] | None,
        typer.Option(
            "--accept-empty-lake",
            metavar="SOURCE",
            help="Start this source in the current lake, although it was written to another one, "
            "and re-snapshot all its tables. For one start only; may be repeated.",
            autocompletion=completion.sources,
        ),
    ] = None,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="End as soon as the lake has all that the sources have committed: exit code 0. "
            "1 if operator action is required, for one table too; 75 if it can be retried.",
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Capture all configured sources until SIGTERM or SIGINT."""
    # Until the daemon installs its own handlers, nothing is open that would need closing. SIGHUP
    # without a closed terminal requests a reload: ignored, as the config is not read yet.
    had_terminal = os.isatty(2)
    signal.signal(
        signal.SIGHUP, lambda *_: os._exit(0) if had_terminal and not os.isatty(2) else None
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    configure_allocators()
    without_pandas()
    with reporting(debug=debug, config=config):
        with gc_frozen():
            from ingestd.app import daemon  # noqa: PLC0415

        raise typer.Exit(daemon.run(config, frozenset(accept_empty_lake or ()), once=once))
