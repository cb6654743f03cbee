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
        typer.Argument(metavar="SOURCE", help="The source's name; default: the database's."),
    ] = None,
    *,
    dsn: Annotated[
        str | None,
        typer.Option(
            "--dsn",
            metavar="DSN",
            help="A connection string, or env:NAME or file:PATH of one. A password is written to "
            "a separate file, SOURCE.dsn, never into the config.",
        ),
    ] = None,
    lake: Annotated[
        str | None,
        typer.Option("--lake", metavar="URI", help="Where the Delta tables go; default: ./lake."),
    ] = None,
    tables: Annotated[
        list[str] | None,
        typer.Option(
            "--tables",
            metavar="PATTERN",
            help="Tables to capture, like 'public.*' or '!public.audit_*'; may be repeated. "
            "Default: all.",
        ),
    ] = None,
    kind: Annotated[
        str | None,
        typer.Option("--kind", metavar="KIND", help="wal or polling; default: the best possible."),
    ] = None,
    role: Annotated[
        str, typer.Option("--role", metavar="NAME", help="The role in the SQL that is printed.")
    ] = "ingestd",
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The config to write.")
    ] = DEFAULT_CONFIG,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't prompt; use defaults.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    debug: Debug = False,
) -> None:
    """Inspect a database and write a first config for it.

    Prompts for missing options. Shows which tables can be captured, and the SQL for a role with
    the least privileges for that. Changes nothing in the database.
    """
    if kind not in {None, *_KINDS}:
        msg = f"must be {' or '.join(_KINDS)}"
        raise typer.BadParameter(msg, param_hint="--kind")
    with reporting(debug=debug, unasked="--dsn, and --yes to use defaults for the rest"):
        from ingestd.cli.init.wizard import InitCommand  # noqa: PLC0415

        InitCommand(source, dsn, lake, tables or [], kind, role, output, yes, force).do()
