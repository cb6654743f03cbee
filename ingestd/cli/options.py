"""Options that commands share, and parsers of their values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingestd.cli import completion
from ingestd.cli.config_path import DEFAULT_CONFIG
from ingestd.model.errors import ConfigError

if TYPE_CHECKING:
    from ingestd.config import Config

ConfigFile = Annotated[
    Path,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The config file (TOML).",
        default_factory=lambda: DEFAULT_CONFIG,
        show_default=str(DEFAULT_CONFIG),
    ),
]
DaemonConfig = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        help="The daemon's config.",
        show_default=str(DEFAULT_CONFIG),
    ),
]
DaemonUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="The daemon's address instead, like http://127.0.0.1:9464. The token is read from "
        "INGESTD_HTTP_TOKEN, and sent to other machines by https only.",
    ),
]
"""Names the daemon, as an alternative to --config; both together are an error."""
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SourceName = Annotated[
    str,
    typer.Argument(metavar="SOURCE", help="The source's name.", autocompletion=completion.sources),
]
TableName = Annotated[
    str,
    typer.Argument(metavar="TABLE", help="As schema.table.", autocompletion=completion.tables),
]
TableNames = Annotated[
    list[str],
    typer.Argument(metavar="TABLE", help="As schema.table.", autocompletion=completion.tables),
]


def size_in(text: str, option: str) -> int:
    """Return a size in bytes. Raises BadParameter."""
    from ingestd.config.units import size_bytes  # noqa: PLC0415

    try:
        return size_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def duration_in(text: str, option: str) -> float:
    """Return a duration in seconds. Raises BadParameter."""
    from ingestd.config.units import seconds  # noqa: PLC0415

    try:
        return seconds(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def known_source(config: Config, source: str) -> None:
    """Raise ConfigError if the config has no such source."""
    if source not in config.sources:
        there = ", ".join(sorted(config.sources))
        raise ConfigError(f"sources.{source}: no such source; there is {there}")
