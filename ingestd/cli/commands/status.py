"""`ingestd status`."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ingestd.cli.daemon import daemon_status
from ingestd.cli.errors import reporting
from ingestd.cli.options import AsJson, ConfigFile, Debug, duration_in

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_DEFAULT_INTERVAL = "2s"


class StatusCommand(TyperCommand):
    """A command whose `--watch` has an optional value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - click's or typer's
        """Parse `args`, with the default value for a `--watch` without one."""
        return super().parse_args(ctx, with_value(args, "--watch", _DEFAULT_INTERVAL))


def with_value(words: Sequence[str], option: str, value: str) -> list[str]:
    """Return the words with `value` added to the option where it has none."""
    return [
        f"{word}={value}" if word == option and after.startswith("-") else word
        for word, after in pairwise([*words, "-"])
    ]


def status(
    config: ConfigFile,
    *,
    watch: Annotated[
        str | None,
        typer.Option(
            "--watch",
            metavar="[SECONDS]",
            help="Repeat until Ctrl-C, every 2 seconds by default.",
        ),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the daemon's status or, offline, that of slot and lake.

    With --watch and --json, each status is printed on one line.
    """
    interval_s = None if watch is None else _interval(watch)
    with reporting(debug=debug, config=config):
        if interval_s is not None:
            from ingestd.terminal.status_watch import watch_lines, watch_status  # noqa: PLC0415

            (watch_lines if as_json else watch_status)(lambda: _status_of(config), interval_s)
            return
        found = _status_of(config)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        from ingestd.terminal.status import print_status  # noqa: PLC0415

        print_status(found)


def _interval(text: str) -> float:
    return duration_in(f"{text}s" if text.replace(".", "", 1).isdigit() else text, "--watch")


def _status_of(config: Path) -> dict[str, Any]:
    found, why = daemon_status(config)
    if found is None:
        from ingestd.app import offline_status as offline  # noqa: PLC0415

        found = offline.status(config, why)
    return found
