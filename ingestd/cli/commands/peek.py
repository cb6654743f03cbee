"""`ingestd peek`."""

from __future__ import annotations

from typing import Annotated

import typer

from ingestd.cli.errors import load, reporting
from ingestd.cli.options import AsJson, ConfigFile, Debug, SourceName, TableName, known_source
from ingestd.terminal.echo import echo_json

Limit = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Maximum number to show.")]


def peek(
    source: SourceName,
    table: TableName,
    *,
    config: ConfigFile,
    limit: Limit = 20,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show a table's last changes in the lake, newest first.

    Masked columns stay masked. Long values are shortened, except with --json.
    """
    with reporting(debug=debug, config=config):
        from ingestd.app.peek import last_changes  # noqa: PLC0415

        found = load(config)
        known_source(found, source)
        document = last_changes(found, source, table, limit)
    if as_json:
        echo_json(document)
    else:
        from ingestd.terminal.epochs import print_changes  # noqa: PLC0415

        print_changes(document)
