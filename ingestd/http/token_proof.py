"""Proof that a server knows the token, before the token is sent to it.

While the daemon is down, any account of the machine can listen on its port. So over plain HTTP a
client first sends a random challenge, and the server responds with an HMAC of it. The HMAC covers
the address at which the server accepted the connection. A server that relays to the daemon on
another port or machine thus returns the daemon's address, which differs from the one to which the
client connected. (A relay to the same address and port of another machine, whose daemon has the
same token, is not detected.)

The server is no oracle: the HMAC covers a distinct purpose string. Its key is derived from the
token by PBKDF2, which slows down guessing of weak tokens. Source: RFC 2104, RFC 8018.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import ipaddress
import json
import re
import secrets
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PATH = "/proof"
PARAMETER = "challenge"
_CHALLENGE = re.compile(r"[0-9a-f]{64}")
_PURPOSE = b"ingestd: a server proves that it knows the token, version 1\n"
_ROUNDS = 100_000
"""Iterations of PBKDF2: about 40 ms."""


class ProofKey:
    """Computes and checks proofs of one token."""

    def __init__(self, token: str) -> None:
        self._key = hashlib.pbkdf2_hmac("sha256", token.encode(), _PURPOSE, _ROUNDS)

    def proof(self, challenge: str, address: str) -> str:
        """Return the HMAC of a challenge and an address in the form of `written_address`."""
        message = _PURPOSE + f"{challenge}\n{address}".encode(errors="replace")
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()

    def is_proven(self, challenge: str, address: str, proof: str) -> bool:
        """Return whether `proof` matches this challenge and address; in constant time."""
        expected = self.proof(challenge, address).encode()
        return hmac.compare_digest(expected, proof.encode(errors="replace"))


@functools.lru_cache(maxsize=4)
def key_of(token: str) -> ProofKey:
    """Return the key of a token; it is derived once and cached."""
    return ProofKey(token)


def new_challenge() -> str:
    """Return a new random challenge."""
    return secrets.token_hex(32)


def written_address(socket_name: Sequence[object]) -> str:
    """Return an address from getsockname or getpeername in canonical form: IP, space, port."""
    found = ipaddress.ip_address(str(socket_name[0]).partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return f"{mapped or found} {socket_name[1]}"


class Proofs:
    """Answers GET /proof from any client.

    `token`: returns the token; None until there is one, and the same one from then on.
    """

    def __init__(self, token: Callable[[], str | None]) -> None:
        self._token = token
        self._key: ProofKey | None = None
        self._deriving = asyncio.Lock()

    async def answer(self, request: web.Request) -> web.Response:
        """Respond to a challenge; 400 if it is malformed, 404 if there is no token to prove."""
        challenge = request.query.get(PARAMETER, "")
        if _CHALLENGE.fullmatch(challenge) is None:
            return _answer({"error": "a challenge has 64 hexadecimal digits"}, 400)
        transport, token = request.transport, self._token()
        if transport is None or token is None:
            return _answer({"error": "there is no token"}, HTTPStatus.NOT_FOUND)
        address = written_address(transport.get_extra_info("sockname"))
        async with self._deriving:
            if self._key is None:
                self._key = await asyncio.to_thread(ProofKey, token)
        return _answer({"address": address, "proof": self._key.proof(challenge, address)}, 200)


def _answer(document: dict[str, str], code: int) -> web.Response:
    text = json.dumps(document) + "\n"
    return web.Response(status=code, text=text, content_type="application/json")
