"""`ingestd verify`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ingestd.cli import completion
from ingestd.cli.errors import EXIT_INTERRUPTED, redactor_of, reporting
from ingestd.cli.options import AsJson, ConfigFile, Debug, SourceName, duration_in, size_in
from ingestd.process.memory import configure_allocators
from ingestd.terminal.echo import echo


def verify(
    source: SourceName,
    tables: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TABLE",
            help="As schema.table, or patterns; default: all.",
            autocompletion=completion.tables,
        ),
    ] = None,
    *,
    config: ConfigFile,
    wait: Annotated[
        str, typer.Option("--wait", metavar="DURATION", help="How long to wait for the lake.")
    ] = "5m",
    limit_rate: Annotated[
        str | None,
        typer.Option("--limit-rate", metavar="SIZE/s", help="Maximum rate of reads of the source."),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE", help="Memory for comparing; default: limits.memory."
        ),
    ] = None,
    show: Annotated[
        int, typer.Option("--show", min=0, help="Differences to print for each table, at most.")
    ] = 20,
    values: Annotated[
        bool, typer.Option("--values", help="Also print the values that differ.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare a source with the lake, row by row. Changes nothing."""
    wait_s = duration_in(wait, "--wait")
    rate = None if limit_rate is None else size_in(limit_rate.removesuffix("/s"), "--limit-rate")
    memory_bytes = None if memory is None else size_in(memory, "--memory")
    configure_allocators()
    with reporting(debug=debug, config=config):
        from ingestd.app import verify as verifying  # noqa: PLC0415
        from ingestd.terminal.verify import verify_progress  # noqa: PLC0415

        try:
            with verify_progress() as progress:
                found = verifying.verify(
                    config,
                    source,
                    tables or [],
                    wait_s=wait_s,
                    memory_bytes=memory_bytes,
                    rate_bytes_per_s=rate,
                    shown=show,
                    with_values=values,
                    progress=progress,
                )
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None
        redactor = redactor_of(config)
    if as_json:
        echo(json.dumps(redactor.tree(found.to_json()), indent=2))
    else:
        echo(redactor.text("\n".join(found.lines())))
    raise typer.Exit(found.exit_code)
