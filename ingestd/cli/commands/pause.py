"""`ingestd pause` and `ingestd resume`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from ingestd.cli.config_path import daemon_config
from ingestd.cli.daemon import daemon_address, expected_daemon
from ingestd.cli.errors import load, reporting
from ingestd.cli.options import DaemonConfig, DaemonUrl, Debug, SourceName, duration_in

if TYPE_CHECKING:
    from pathlib import Path

    from ingestd.cli.requests.pause import PauseCommand
    from ingestd.ports import PauseMark

PauseLimit = Annotated[
    str, typer.Option("--limit", metavar="DURATION", help="How long to wait for the daemon.")
]


def pause(
    source: SourceName,
    *,
    config: DaemonConfig = None,
    url: DaemonUrl = None,
    limit: PauseLimit = "30s",
    debug: Debug = False,
) -> None:
    """Pause a source until it is resumed. Its slot retains the WAL."""
    limit_s = duration_in(limit, "--limit")
    config = daemon_config(config, url)
    with reporting(debug=debug, config=config):
        _command(source, config, url).pause(limit_s)


def resume(
    source: SourceName,
    *,
    config: DaemonConfig = None,
    url: DaemonUrl = None,
    limit: PauseLimit = "30s",
    debug: Debug = False,
) -> None:
    """Resume a paused source where it stopped."""
    limit_s = duration_in(limit, "--limit")
    config = daemon_config(config, url)
    with reporting(debug=debug, config=config):
        _command(source, config, url).resume(limit_s)


def _command(source: str, config: Path | None, url: str | None) -> PauseCommand:
    """Return the command for the named daemon. Raises ConfigError, OperatorError."""
    from ingestd.cli.requests.pause import PauseCommand  # noqa: PLC0415

    if config is None or url is not None:
        daemon = shlex.join(["--url", str(url)])
        return PauseCommand(daemon_address(config, url), source, None, None, daemon)
    loaded = load(config)

    def open_mark() -> PauseMark:
        from ingestd.app.factories import pause_mark  # noqa: PLC0415 - slow; unused with a daemon

        return pause_mark(config, source)

    address = None if loaded.http.listen is None else daemon_address(config, None)
    daemon = shlex.join(["-c", str(config)])
    return PauseCommand(address, source, expected_daemon(loaded), open_mark, daemon)
