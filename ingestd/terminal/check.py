"""The results of a preflight, as text or JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from ingestd.model.printable_text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ingestd.config.redaction import Redactor
    from ingestd.model.check import CheckLine

_STYLES = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}


def print_checks(lines: Sequence[CheckLine], redactor: Redactor) -> None:
    """Print each line, with its remedy below, unwrapped, so that it can be pasted."""
    columns = [line.source for line in lines], [printable(line.subject) for line in lines]
    widths = [max((len(text) for text in column), default=0) for column in columns]
    for line, subject in zip(lines, columns[1], strict=True):
        level = typer.style(f"{line.level:<4}", fg=_STYLES[line.level])
        place = f"{line.source:<{widths[0]}}  {subject:<{widths[1]}}".strip()
        typer.echo(f"{level}  {place}  {printable(redactor.text(line.detail))}")
        for remedy in redactor.text(line.remedy or "").splitlines():
            typer.echo(f"        {printable(remedy)}")
    failed = sum(line.level == "fail" for line in lines)
    warned = sum(line.level == "warn" for line in lines)
    typer.echo(f"{len(lines)} checks: {failed} failed, {warned} with a warning")


def checks_to_json(lines: Sequence[CheckLine]) -> dict[str, Any]:
    """Return the document of `ingestd check --json`.

    ``{"checks": [{"source", "subject", "level", "detail", "remedy"}], "failed", "warned"}``.
    """
    levels = [line.level for line in lines]
    return {
        "checks": [asdict(line) for line in lines],
        "failed": levels.count("fail"),
        "warned": levels.count("warn"),
    }
