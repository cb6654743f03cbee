"""Where the daemon is, and what it says of itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ingestd.cli.errors import load
from ingestd.model.errors import OperatorError

if TYPE_CHECKING:
    from ingestd.config import Config
    from ingestd.http.client import Endpoint
    from ingestd.http.daemon_identity import DaemonIdentity


def daemon_address(config: Path | None, url: str | None) -> Endpoint:
    """Say where the daemon listens. Raises ConfigError, OperatorError."""
    from ingestd.http.client import endpoint_in, endpoint_of  # noqa: PLC0415

    if (config is None) == (url is None):
        msg = "give either --config FILE or --url URL"
        raise typer.BadParameter(msg)
    if url is not None:
        try:
            return endpoint_of(url, os.environ.get("INGESTD_HTTP_TOKEN"))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--url") from error
    assert config is not None
    listen = endpoint_in(load(config).http)
    if listen is None:
        raise OperatorError(
            f'http.listen is "off" in {config}: the daemon can\'t be asked for anything',
            remedy='set listen = "127.0.0.1:9464" in [http] and start it anew',
        )
    return listen


def meant_daemon(config: Config) -> DaemonIdentity:
    """Say how the daemon of a config is known among others."""
    from ingestd.http.daemon_identity import DaemonIdentity  # noqa: PLC0415
    from ingestd.postgres.connection.advisory_locks import claim_of  # noqa: PLC0415

    told = config.redactor.text
    claims = {name: told(claim_of(settings)) for name, settings in config.sources.items()}
    return DaemonIdentity(told(config.lake.uri), claims)


def daemon_status(config: Path) -> tuple[dict[str, Any] | None, str]:
    """Ask the daemon that listens where the config says; else None, and why not.

    Raises ConfigError, OperatorError.
    """
    from ingestd.http.client import UnprovenError, endpoint_in, fetch_status  # noqa: PLC0415

    loaded = load(config)
    listen = endpoint_in(loaded.http)
    if listen is None:
        return None, 'http.listen is "off": a daemon that runs can\'t be asked'
    try:
        found = fetch_status(listen)
    except UnprovenError as error:
        return None, f"{error.what} ({error.remedy})"
    if found is None:
        return None, f"no daemon answers on {listen}"
    why = meant_daemon(loaded).difference(found)
    return (found, "") if why is None else (None, f"another daemon listens on {listen}: {why}")
