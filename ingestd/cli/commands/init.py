"""`ingestd init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ingestd.cli.config_path import DEFAULT_CONFIG
from ingestd.cli.errors import reporting
from ingestd.cli.options import Debug

_KINDS = ("wal", "polling")


def init(
    source: Annotated[
        str | None,
        typer.Argument(metavar="SOURCE", help="What it is called; like the database if not set."),
    ] = None,
    *,
    dsn: Annotated[
        str | None,
        typer.Option(
            "--dsn",
            metavar="DSN",
            help="A connection string, or env:NAME or file:PATH of one. Its password goes to a "
            "file of its own, SOURCE.dsn, never into the config.",
        ),
    ] = None,
    lake: Annotated[
        str | None,
        typer.Option("--lake", metavar="URI", help="Where the Delta tables go; ./lake if not set."),
    ] = None,
    tables: Annotated[
        list[str] | None,
        typer.Option(
            "--tables",
            metavar="PATTERN",
            help="What to capture, like 'public.*' or '!public.audit_*'; may be repeated. "
            "Everything if not set.",
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option("--kind", metavar="KIND", help="wal or polling; the best if not set."),
    ] = None,
    role: Annotated[
        str, typer.Option("--role", metavar="NAME", help="The role of the SQL that is printed.")
    ] = "ingestd",
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The config to write.")
    ] = DEFAULT_CONFIG,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; take defaults.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    debug: Debug = False,
) -> None:
    """Look at a database and write a first config for it.

    Asks for what is not given. Tells which tables can be captured, and the SQL for a role that may
    do that and nothing else. Changes nothing in the database.
    """
    if kind not in {None, *_KINDS}:
        msg = f"must be {' or '.join(_KINDS)}"
        raise typer.BadParameter(msg, param_hint="--kind")
    with reporting(debug=debug, unasked="--dsn, and --yes for defaults of the rest"):
        from ingestd.cli.init.wizard import InitCommand  # noqa: PLC0415

        InitCommand(source, dsn, lake, tables or [], kind, role, output, yes, force).do()
