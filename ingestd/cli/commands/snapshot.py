"""`ingestd snapshot`."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from ingestd.cli.config_path import daemon_config
from ingestd.cli.daemon import daemon_address, expected_daemon
from ingestd.cli.errors import load, reporting
from ingestd.cli.options import (
    DaemonConfig,
    DaemonUrl,
    Debug,
    SourceName,
    TableNames,
    duration_in,
    known_source,
)


def snapshot(
    source: SourceName,
    tables: TableNames,
    *,
    config: DaemonConfig = None,
    url: DaemonUrl = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="SQL",
            help="Read only the rows that match this condition; write the schema of names that "
            "are not in pg_catalog.",
        ),
    ] = None,
    cancel: Annotated[
        bool,
        typer.Option("--cancel", help="Cancel snapshots of these tables; existing rows are kept."),
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Show progress until the rows are in the lake.")
    ] = True,
    limit: Annotated[
        str, typer.Option("--limit", metavar="DURATION", help="How long to wait at most.")
    ] = "1d",
    debug: Debug = False,
) -> None:
    """Ask the running daemon for a new snapshot of tables.

    The old rows stay valid until the new ones are in the lake.
    """
    limit_s = duration_in(limit, "--limit")
    if cancel and where is not None:
        msg = "a snapshot can't be cancelled in part: omit --where"
        raise typer.BadParameter(msg, param_hint="--cancel")
    config = daemon_config(config, url)
    with reporting(debug=debug, config=config):
        loaded = None if config is None else load(config)
        if loaded is not None:
            known_source(loaded, source)  # an error whether or not the daemon runs
        address = daemon_address(config, url)
        from ingestd.cli.requests.snapshot import SnapshotCommand  # noqa: PLC0415

        expected = None if loaded is None else expected_daemon(loaded)
        daemon = shlex.join(["--url", str(url)] if config is None else ["-c", str(config)])
        command = SnapshotCommand(address, source, tables, expected, daemon)
        if cancel:
            command.cancel()
        else:
            raise typer.Exit(command.ask(where, limit_s if wait else None))
