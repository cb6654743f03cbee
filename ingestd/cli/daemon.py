"""The daemon's address, identity and status, for commands."""

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
    """Return the daemon's endpoint. Raises ConfigError, OperatorError."""
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
            f'http.listen is "off" in {config}: the daemon accepts no requests',
            remedy='set listen = "127.0.0.1:9464" in [http] and restart the daemon',
        )
    return listen


def expected_daemon(config: Config) -> DaemonIdentity:
    """Return the identity of a config's daemon."""
    from ingestd.http.daemon_identity import DaemonIdentity  # noqa: PLC0415
    from ingestd.postgres.connection.claim_names import claim_of  # noqa: PLC0415

    redacted = config.redactor.text
    claims = {name: redacted(claim_of(settings)) for name, settings in config.sources.items()}
    return DaemonIdentity(redacted(config.lake.uri), claims)


def daemon_status(config: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the status of the config's daemon; or None, and why there is none.

    Raises ConfigError, OperatorError.
    """
    from ingestd.http.client import UnprovenError, endpoint_in, fetch_status  # noqa: PLC0415

    loaded = load(config)
    listen = endpoint_in(loaded.http)
    if listen is None:
        return None, 'http.listen is "off": a running daemon can\'t be asked'
    try:
        found = fetch_status(listen)
    except UnprovenError as error:
        return None, f"{error.what} ({error.remedy})"
    if found is None:
        return None, f"no daemon answers on {listen}"
    why = expected_daemon(loaded).difference(found)
    return (found, "") if why is None else (None, f"another daemon listens on {listen}: {why}")
