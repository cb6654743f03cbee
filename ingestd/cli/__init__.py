"""The command line. Commands import slow modules themselves, so that help is fast.

Exit codes (docs/internals/design.md): 0 success, 1 an error that an operator must fix, 2 wrong
usage or config, 75 a transient error that persisted. (130: Ctrl-C ended `snapshot` or `verify`.)
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from typer.main import get_command

from ingestd import __version__
from ingestd.cli.commands.check import check
from ingestd.cli.commands.demo import demo
from ingestd.cli.commands.drop import drop
from ingestd.cli.commands.epochs import epochs
from ingestd.cli.commands.export import export, query
from ingestd.cli.commands.init import init
from ingestd.cli.commands.pause import pause, resume
from ingestd.cli.commands.peek import peek
from ingestd.cli.commands.register import register
from ingestd.cli.commands.run import run
from ingestd.cli.commands.snapshot import snapshot
from ingestd.cli.commands.status import StatusCommand, status
from ingestd.cli.commands.tables import tables
from ingestd.cli.commands.verify import verify
from ingestd.cli.errors import (
    USAGE_ERROR,
    exit_code,
    report_unexpected,
    report_usage,
    reporting,
)
from ingestd.cli.examples import epilog
from ingestd.terminal.echo import echo

__all__ = ["app", "exit_code", "main", "report_unexpected", "reporting"]

app = typer.Typer(
    name="ingestd",
    help="Postgres changes into a Delta lake, exactly once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line: the console script `ingestd`."""
    sys.excepthook = report_unexpected
    # Silences deltalake's long warnings; it raises what matters.
    os.environ.setdefault("RUST_LOG", "error")
    # Bypasses Typer.__call__, which installs its own excepthook.
    try:
        sys.exit(get_command(app).main(prog_name="ingestd", standalone_mode=False))
    except USAGE_ERROR as error:
        sys.exit(report_usage(error))
    except typer.Abort:
        sys.exit("Aborted!")


def _version(*, wanted: bool) -> None:
    if wanted:
        echo(f"ingestd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=lambda wanted: _version(wanted=wanted), is_eager=True),
    ] = False,
) -> None:
    del version


for _command in (
    *(init, run, check, status, snapshot, pause, resume),
    *(tables, verify, epochs, peek, export, query, register, drop, demo),
):
    app.command(
        cls=StatusCommand if _command is status else None, epilog=epilog(_command.__name__)
    )(_command)
