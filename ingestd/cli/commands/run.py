"""`ingestd run`."""

from __future__ import annotations

import os
import signal
from typing import Annotated

import typer

from ingestd.cli import completion
from ingestd.cli.errors import reporting
from ingestd.cli.options import ConfigFile, Debug
from ingestd.process.fast_imports import sparing
from ingestd.process.memory import configure_allocators, gc_frozen


def run(
    config: ConfigFile,
    *,
    accept_empty_lake: Annotated[
        list[str] | None,
        typer.Option(
            "--accept-empty-lake",
            metavar="SOURCE",
            help="Begin this source in the lake that is there, though it was written to another "
            "one, and read all its tables again; may be repeated. For one start only.",
            autocompletion=completion.sources,
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Capture all configured sources until SIGTERM or SIGINT."""
    # Until the daemon's own handlers are there, nothing is open that would need closing. SIGHUP
    # asks for a config to be read that has not been read yet, if no terminal was closed.
    had_terminal = os.isatty(2)
    signal.signal(
        signal.SIGHUP, lambda *_: os._exit(0) if had_terminal and not os.isatty(2) else None
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(0))
    configure_allocators()
    with reporting(debug=debug, config=config):
        with gc_frozen(), sparing():
            from ingestd.app import daemon  # noqa: PLC0415

        raise typer.Exit(daemon.run(config, frozenset(accept_empty_lake or ())))
