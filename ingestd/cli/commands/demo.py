"""`ingestd demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ingestd.cli.errors import reporting
from ingestd.cli.options import Debug


def demo(
    *,
    seconds: Annotated[int, typer.Option(min=5, help="How long to watch the daemon.")] = 30,
    path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The lake's folder; default: ./demo-lake.")
    ] = None,
    spark: Annotated[bool, typer.Option(help="Read the lake with PySpark at the end.")] = True,
    keep: Annotated[bool, typer.Option("--keep", help="Keep running until Ctrl-C.")] = False,
    debug: Debug = False,
) -> None:
    """Watch changes arrive in Delta tables, with a temporary Postgres."""
    with reporting(debug=debug):
        from ingestd import demo as shop_demo  # noqa: PLC0415

        raise typer.Exit(shop_demo.main(seconds=seconds, path=path, spark=spark, keep=keep))
