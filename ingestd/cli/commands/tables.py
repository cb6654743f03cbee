"""`ingestd tables`."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated

import typer

from ingestd.cli import completion
from ingestd.cli.daemon import daemon_status
from ingestd.cli.errors import SEVERITY, exit_code, reporting
from ingestd.cli.options import ConfigFile, Debug, duration_in
from ingestd.terminal.echo import echo


def tables(
    config: ConfigFile,
    *,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="SOURCE",
            help="One source; default: all.",
            autocompletion=completion.sources,
        ),
    ] = None,
    schema: Annotated[
        str | None, typer.Option("--schema", metavar="NAME", help="Only tables of this schema.")
    ] = None,
    columns: Annotated[bool, typer.Option("--columns", help="Show the columns too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with columns.")] = False,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="DURATION", help="How long to wait for a database.")
    ] = "10s",
    debug: Debug = False,
) -> None:
    """Show tables and columns, and which are captured or why not."""
    timeout_s = duration_in(timeout, "--timeout")
    with reporting(debug=debug, config=config):
        from ingestd.app import tables as listing  # noqa: PLC0415

        running, _ = daemon_status(config)
        found, faults = listing.tables(
            config,
            [] if source is None else [source],
            schema=schema,
            timeout_s=timeout_s,
            running=running,
        )
    if as_json:
        echo(json.dumps(found, indent=2))
    else:
        from ingestd.terminal.tables import print_tables  # noqa: PLC0415

        print_tables(found, columns=columns)
    for fault in faults:
        with reporting(debug=debug, config=config), suppress(typer.Exit):
            raise fault
    if faults:
        raise typer.Exit(max(map(exit_code, faults), key=SEVERITY.index))
