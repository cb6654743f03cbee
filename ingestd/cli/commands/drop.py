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
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    debug: Debug = False,
) -> None:
    """Drop a source's slot and publication; ask first. The lake stays.

    A slot that nobody reads keeps WAL until the server's disk is full. What ingestd does not
    manage is left, and the SQL for it printed.
    """
    with reporting(debug=debug, config=config):
        from ingestd.cli.requests.drop import DropCommand  # noqa: PLC0415

        found = load(config)
        known_source(found, source)
        raise typer.Exit(DropCommand(found, source).do(is_agreed=yes))
