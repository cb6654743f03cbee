"""`ingestd drop`."""

from __future__ import annotations

from typing import Annotated

import typer

from ingestd.cli.errors import load, reporting
from ingestd.cli.options import ConfigFile, Debug, SourceName, known_source


def drop(
    source: SourceName,
    *,
    config: ConfigFile,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")] = False,
    debug: Debug = False,
) -> None:
    """Drop a source's slot and publication; ask first. The lake stays.

    An unused slot retains WAL until the server's disk is full. A slot or publication that ingestd
    does not manage is kept; the SQL to drop it is printed.
    """
    with reporting(debug=debug, config=config):
        from ingestd.cli.requests.drop import DropCommand  # noqa: PLC0415

        found = load(config)
        known_source(found, source)
        raise typer.Exit(DropCommand(found, source).do(is_agreed=yes))
