"""The connections of the HTTP server: their limit, and the TLS handshake.

Connections count from the moment they are accepted, before the TLS handshake: each uses a file
descriptor, and any client that reaches the port can open one without sending anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import cast

from ingestd.config.units import Address

MAX_CONNECTIONS = 128
"""Above this the oldest is closed: idle clients must not use up the daemon's file descriptors."""
_HANDSHAKE_S = 5.0


class Connections:
    """Accepts connections, does the TLS handshake if configured, and hands each to a protocol.

    `make_protocol`: returns a new protocol for each connection.
    """

    def __init__(
        self, make_protocol: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None
    ) -> None:
        self._make_protocol = make_protocol
        self._tls = tls
        self._open: list[asyncio.Transport] = []
        self._shaking: set[asyncio.Task[None]] = set()

    async def listen(self, address: Address) -> asyncio.Server:
        """Begin to accept connections. Raises OSError if it can't listen there."""
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: _Entry(self._admit), address.host, address.port)

    def close_all(self) -> None:
        """Close all connections, also during a handshake or a response."""
        for task in self._shaking:
            task.cancel()
        for transport in self._open:
            transport.abort()

    def _admit(self, entry: _Entry, transport: asyncio.Transport) -> None:
        """Register an accepted connection; close the oldest ones above the limit."""
        self._open = [known for known in self._open if _has_file(known)]
        for oldest in self._open[: 1 - MAX_CONNECTIONS]:
            oldest.abort()
        self._open.append(transport)
        if self._tls is None:
            entry.hand_over(transport, self._make_protocol())
            return
        transport.pause_reading()  # the data is for TLS, which starts in the task
        task = asyncio.create_task(self._shake_hands(entry, transport, self._tls))
        self._shaking.add(task)
        task.add_done_callback(self._shaking.discard)

    async def _shake_hands(
        self, entry: _Entry, transport: asyncio.Transport, tls: ssl.SSLContext
    ) -> None:
        loop = asyncio.get_running_loop()
        # Not logged: clients that disconnect or don't speak TLS could fill the log.
        with contextlib.suppress(OSError):
            encrypted = await loop.start_tls(
                transport,
                entry,
                tls,
                server_side=True,
                ssl_handshake_timeout=_HANDSHAKE_S,
            )
            if encrypted is not None:
                entry.hand_over(encrypted, self._make_protocol())


class _Entry(asyncio.Protocol):
    """The first protocol of a connection: buffers data until another protocol takes over."""

    def __init__(self, admit: Callable[[_Entry, asyncio.Transport], None]) -> None:
        self._admit = admit
        self._is_lost = False
        self._received: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._admit(self, cast("asyncio.Transport", transport))

    def data_received(self, data: bytes) -> None:
        self._received.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._is_lost = True

    def hand_over(self, transport: asyncio.Transport, protocol: asyncio.Protocol) -> None:
        """Hand the connection, and the data buffered so far, to `protocol`."""
        if self._is_lost:
            return
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        for data in self._received:
            protocol.data_received(data)


def _has_file(transport: asyncio.Transport) -> bool:
    """Return whether the socket is open; a closing one stays open while it sends its buffer."""
    return bool(transport.get_extra_info("socket").fileno() != -1)
