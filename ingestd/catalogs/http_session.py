"""The HTTP session of a catalog's client library, in place of the library's own.

The process that answers at the catalog's address decides what it says: on loopback that may be one
of another account, while the catalog does not run.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from ingestd.config.units import is_loopback
from ingestd.process.daemon_thread import in_daemon_thread

MOST_ANSWER_BYTES = 4 << 20
"""Of an answer, decompressed; parsed, it takes up to 25 times that. 1,600 columns take 2 MB."""
_PIECE_BYTES = 64 << 10


def uses_proxies(uri: str) -> bool:
    """Return whether the proxies of the environment are used: not for this machine."""
    return not is_loopback(urlsplit(uri).hostname or "")


def new_session(uri: str) -> aiohttp.ClientSession:
    """Return a session for a catalog's address. Call it in the loop that uses it.

    Names are resolved in a thread that delays no stop. An answer of more than MOST_ANSWER_BYTES
    raises aiohttp.ClientPayloadError.
    """
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(), resolver=_Resolver())
    return aiohttp.ClientSession(
        connector=connector, trust_env=uses_proxies(uri), response_class=_BoundedResponse
    )


class _BoundedResponse(aiohttp.ClientResponse):
    async def read(self) -> bytes:
        """Return the body. It can be read once."""
        body = bytearray()
        async for piece in self.content.iter_chunked(_PIECE_BYTES):
            body += piece
            if len(body) > MOST_ANSWER_BYTES:
                self.close()
                msg = f"an answer of more than {MOST_ANSWER_BYTES} bytes"
                raise aiohttp.ClientPayloadError(msg)
        return bytes(body)


class _Resolver(AbstractResolver):
    """aiohttp's own asks in a thread of an executor, whose end the process waits for."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host. Raises OSError."""

        def ask() -> list[Any]:
            return socket.getaddrinfo(
                host, port, family=family, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
            )

        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=int(address[1]),
                family=found,
                proto=proto,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for found, _, proto, _, address in await in_daemon_thread(ask, f"resolve {host}")
        ]

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""
