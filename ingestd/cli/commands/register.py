"""`ingestd register`."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from ingestd.cli import completion
from ingestd.cli.errors import EXIT_OPERATOR, load, reporting
from ingestd.cli.options import ConfigFile, Debug
from ingestd.model.printable_text import one_line
from ingestd.terminal.echo import echo

SourceNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SOURCE",
        help="Sources (default: all).",
        autocompletion=completion.sources,
    ),
]


def register(sources: SourceNames = None, *, config: ConfigFile, debug: Debug = False) -> None:
    """Name the lake's tables in a catalog, Unity Catalog or AWS Glue.

    Raw tables, `_epochs`, `_tables` and reference tables get names in the catalog of [catalog]; a
    dropped table loses its name. Only names at the lake's own locations are changed. May be
    repeated; a running daemon does the same.
    """
    with reporting(debug=debug, config=config):
        from ingestd.app import register as registering  # noqa: PLC0415
        from ingestd.catalogs.names import NameOutcome  # noqa: PLC0415

        found = load(config)
        counts: Counter[NameOutcome] = Counter()
        for report in registering.register(found, sources or []):
            counts[report.outcome] += 1
            if report.fault is not None:
                remedy = f"\n  remedy: {report.fault.remedy}" if report.fault.remedy else ""
                echo(found.redactor.text(one_line(report.fault.what) + remedy), err=True)
            elif report.outcome is not NameOutcome.UNCHANGED:
                echo(f"{report.name}: {report.outcome}")
        echo(", ".join(f"{n} {what}" for what, n in sorted(counts.items())) or "no tables")
    if counts[NameOutcome.FAILED]:
        raise typer.Exit(EXIT_OPERATOR)
