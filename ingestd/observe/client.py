"""Asking a running daemon: for its status, for a snapshot, for the end of one."""

from __future__ import annotations

import http.client
import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from ingestd.errors import ConfigError, OperatorError, TransientError
from ingestd.quantities import Address

if TYPE_CHECKING:
    from collections.abc import Sequence

_LIMIT_S = 2.0
_HTTP_PORT = 80
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not listened on here


def address_of(url: str) -> Address:
    """Read ``http://host:port`` (port 80 if none is given). Raises ValueError."""
    found = urlsplit(url)
    if found.scheme != "http" or not found.hostname or found.path not in {"", "/"}:
        msg = "not a daemon's address; write it like 'http://127.0.0.1:9464'"
        raise ValueError(msg)
    return Address(found.hostname, _HTTP_PORT if found.port is None else found.port)


def fetch_status(listen: Address) -> dict[str, Any] | None:
    """GET /status of the daemon that listens there; None if nothing like one answers."""
    connection = _connection(listen)
    try:
        connection.request("GET", "/status")
        response = connection.getresponse()
        if response.status != http.client.OK:
            return None
        found = json.load(response)
    except (OSError, http.client.HTTPException, ValueError):
        return None  # no daemon there, or something else: the caller looks elsewhere
    finally:
        connection.close()
    is_ours = isinstance(found, dict) and isinstance(found.get("sources"), dict)
    return found if is_ours else None


def request_snapshot(
    listen: Address, source: str, tables: Sequence[str], where: str | None = None
) -> None:
    """Ask the daemon that listens there to read tables of a source anew.

    `where`: an SQL condition, if only the rows are wanted that it holds for.
    Raises ConfigError for an unknown source, OperatorError for an unknown table or where it takes
    no commands, TransientError while the source does not run or nothing answers in time.
    """
    asked: dict[str, object] = {"tables": list(tables)}
    if where is not None:
        asked["where"] = where
    _command(listen, "POST", source, asked, HTTPStatus.ACCEPTED)


def cancel_snapshot(listen: Address, source: str, tables: Sequence[str]) -> None:
    """Ask the daemon that listens there to give up snapshots of tables of a source.

    Raises as `request_snapshot`, and OperatorError for a table that has none.
    """
    _command(listen, "DELETE", source, {"tables": list(tables)}, HTTPStatus.OK)


def _command(
    listen: Address, method: str, source: str, asked: dict[str, object], done: HTTPStatus
) -> None:
    connection = _connection(listen)
    try:
        connection.request(
            method,
            f"/sources/{quote(source, safe='')}/snapshot",
            json.dumps(asked),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        code, body = response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise TransientError(
            f"the daemon on {listen} gave no answer: {error or type(error).__name__}",
            reason="no_answer",
            remedy="see with `ingestd status` whether it runs, and ask again",
        ) from error
    finally:
        connection.close()
    if code != done:
        raise _refusal(listen, code, body)


def _refusal(
    listen: Address, code: int, body: bytes
) -> ConfigError | OperatorError | TransientError:
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if not (isinstance(document, dict) and isinstance(document.get("error"), str)):
        return OperatorError(
            f"what listens on {listen} knows no such command (HTTP status {code})",
            remedy="it may be an older ingestd: start the installed one",
        )
    what, remedy = document["error"], document.get("remedy")
    if code == HTTPStatus.NOT_FOUND:
        return ConfigError(what, remedy=remedy)
    if code == HTTPStatus.CONFLICT:
        return TransientError(what, reason="not_running", remedy=remedy)
    return OperatorError(what, remedy=remedy)


def _connection(listen: Address) -> http.client.HTTPConnection:
    host = _EVERYWHERE.get(listen.host, listen.host)
    return http.client.HTTPConnection(host, listen.port, timeout=_LIMIT_S)
