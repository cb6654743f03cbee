"""`ingestd check`."""

from __future__ import annotations

import json

import typer

from ingestd.cli.errors import EXIT_OPERATOR, redactor_of, reporting
from ingestd.cli.options import AsJson, ConfigFile, Debug
from ingestd.terminal.echo import echo


def check(config: ConfigFile, *, as_json: AsJson = False, debug: Debug = False) -> None:
    """Report what would fail in a run, each problem with its remedy."""
    with reporting(debug=debug, config=config):
        from ingestd.app import check as checking  # noqa: PLC0415

        lines = checking.check(config)
        redactor = redactor_of(config)
    from ingestd.terminal.check import checks_to_json, print_checks  # noqa: PLC0415

    if as_json:
        echo(json.dumps(redactor.tree(checks_to_json(lines)), indent=2))
    else:
        print_checks(lines, redactor)
    if any(line.level == "fail" for line in lines):
        raise typer.Exit(EXIT_OPERATOR)
