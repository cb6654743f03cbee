"""Asking a running daemon for its status."""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingestd.quantities import Address

_LIMIT_S = 2.0
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not listened on here


def fetch_status(listen: Address) -> dict[str, Any] | None:
    """GET /status of the daemon that listens there; None if nothing like one answers."""
    host = _EVERYWHERE.get(listen.host, listen.host)
    connection = http.client.HTTPConnection(host, listen.port, timeout=_LIMIT_S)
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
