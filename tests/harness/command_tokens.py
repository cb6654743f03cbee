"""The token that a server without `[http] token` creates for commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingestd.http.server import HttpServer


def bearer(server: HttpServer) -> dict[str, str]:
    """Return the header for commands, as a client on this machine reads it."""
    path = server.commands.path
    return {} if path is None else {"Authorization": f"Bearer {path.read_text().strip()}"}
