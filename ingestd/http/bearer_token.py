"""The token of a request (RFC 6750), compared in constant time."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

_SCHEME = "bearer "


def has_token(request: web.Request, token: str) -> bool:
    """Return whether the Authorization header carries the token."""
    header = request.headers.get("Authorization", "")
    given = header[len(_SCHEME) :].strip() if header.lower().startswith(_SCHEME) else ""
    # aiohttp keeps bytes that are not UTF-8 as lone surrogates
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())
