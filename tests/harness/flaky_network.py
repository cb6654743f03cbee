"""A network between a client and a server on loopback that can fail in many ways.

It acknowledges the data that it accepts, as a proxy, a tunnel or a load balancer does, so neither
side's TCP notices data that it does not pass on.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any, Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

_PIECE_BYTES = 1 << 16
_LIMIT_S = 30
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: close sends RST
STREAM = b"START_REPLICATION"
"""Sent by the client of every stream."""


class FlakyNetwork:
    """Forwards connections to `port` from its own port, as a context manager.

    Faults apply to existing connections and, except for `reset`, to later ones, until `heal`.
    `saw`: limits a fault to existing connections whose client has sent these bytes.
    """

    def __init__(self, port: int) -> None:
        self.port = 0
        self.accepted = 0
        self._target = port
        self._links: list[_Link] = []
        self._state = _State()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network")

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def dsn(self, dsn: str, **more: str) -> str:
        """Return a DSN of the server through this network."""
        return make_conninfo("", **{**conninfo_to_dict(dsn), **more, "port": str(self.port)})

    # --- faults ------------------------------------------------------------------------------

    def reset(self, saw: bytes = b"") -> int:
        """End connections by RST on both sides; return their number."""
        return self._do(saw, _Link.reset)

    def stall(self, saw: bytes = b"") -> int:
        """Accept data but forward none until `heal`; nothing is lost then."""
        return self._change(saw, stalls=True)

    def blackhole(self, saw: bytes = b"") -> int:
        """Swallow all data, and a connection's end, too: both sides think that it is alive.

        What was swallowed is lost, so such connections are useless even after `heal`.
        """
        return self._change(saw, swallows=True)

    def slow_down(self, bytes_per_s: float) -> None:
        """Forward at most this many bytes per second, in each direction of each connection."""
        self._change(b"", bytes_per_s=bytes_per_s)

    def split(self, seed: int, most: int) -> None:
        """Forward data in pieces of 1 to `most` bytes."""
        self._change(b"", cuts=random.Random(seed), most=most)

    def heal(self) -> None:
        """End all faults. Connections that swallowed data end by RST."""
        self._call(self._heal())

    @property
    def connections(self) -> int:
        """The number of connections."""
        return len(self._links)

    def count(self, saw: bytes) -> int:
        """Return the number of connections whose client has sent these bytes."""
        return self._do(saw, lambda _: None)

    # --- inside ------------------------------------------------------------------------------

    def _do(self, saw: bytes, what: Callable[[_Link], None]) -> int:
        async def do() -> int:
            chosen = [link for link in self._links if saw in link.sent]
            for link in chosen:
                what(link)
            return len(chosen)

        return int(self._call(do()))

    def _change(self, saw: bytes, **changes: Any) -> int:
        if not saw:
            self._state = self._state.with_more(**changes)
        return self._do(saw, lambda link: link.change(**changes))

    async def _heal(self) -> None:
        self._state = _State()
        for link in self._links:
            if link.state.swallows:
                link.reset()  # still swallowing: TCP has no bytes after a gap
            else:
                link.state = _State()
            link.changed.set()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_LIMIT_S)

    async def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0)
        self.port = self._listener.getsockname()[1]
        self._accepting = self._loop.create_task(self._accept())
        self._running: set[asyncio.Task[None]] = set()

    async def _accept(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._listener)
            self.accepted += 1
            task = self._loop.create_task(self._pass_on(client))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _pass_on(self, client: socket.socket) -> None:
        server = socket.socket()
        for end in (client, server):
            end.settimeout(0)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(client, server, self._state)
        self._links.append(link)
        try:
            with contextlib.suppress(OSError):
                await self._loop.sock_connect(server, ("127.0.0.1", self._target))
                await link.run()
        finally:
            self._links.remove(link)
            link.close()

    async def _end(self) -> None:
        tasks = [self._accepting, *self._running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()


class _State:
    """The faults of a connection."""

    def __init__(self, **faults: Any) -> None:
        self._faults = faults
        self.stalls: bool = faults.get("stalls", False)
        self.swallows: bool = faults.get("swallows", False)
        self.bytes_per_s: float | None = faults.get("bytes_per_s")
        self.cuts: random.Random | None = faults.get("cuts")
        self.most: int = faults.get("most", _PIECE_BYTES)

    def with_more(self, **faults: Any) -> _State:
        return _State(**{**self._faults, **faults})


class _Link:
    """One connection from a client to the server. `sent`: the client's first bytes."""

    def __init__(self, client: socket.socket, server: socket.socket, state: _State) -> None:
        self.sent = b""
        self.state = state
        self.changed = asyncio.Event()
        self._client = client
        self._server = server
        self._ending = asyncio.Event()

    async def run(self) -> None:
        """Return when both directions have ended, or the connection was reset."""
        pumps = [
            asyncio.create_task(self._pump(self._client, self._server)),
            asyncio.create_task(self._pump(self._server, self._client)),
        ]
        both: asyncio.Future[Any] = asyncio.gather(*pumps)
        ending: asyncio.Future[Any] = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait([both, ending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*pumps, ending):
                task.cancel()
            await asyncio.gather(*pumps, both, ending, return_exceptions=True)

    def change(self, **faults: Any) -> None:
        self.state = self.state.with_more(**faults)
        self.changed.set()

    def reset(self) -> None:
        for end in (self._client, self._server):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._ending.set()

    def close(self) -> None:
        self._client.close()
        self._server.close()

    async def _pump(self, source: socket.socket, target: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                data = await loop.sock_recv(source, _PIECE_BYTES)
            except OSError:  # that side was reset
                await self._unless_swallowed()
                self.reset()
                return
            if source is self._client and len(self.sent) < _PIECE_BYTES:
                self.sent += data
            await self._pass(target, data)
            if not data:
                return

    async def _unless_swallowed(self) -> None:
        """Return at once, unless the connection swallows data: its end is then hidden, too."""
        if self.state.swallows:
            await self._ending.wait()

    async def _pass(self, target: socket.socket, data: bytes) -> None:
        """Send data, or its end, in the current piece sizes and at the current pace."""
        loop = asyncio.get_running_loop()
        while True:
            while self.state.stalls and not self.state.swallows:
                self.changed.clear()
                await self.changed.wait()
            if self.state.swallows and data:
                return
            if not data:
                await self._unless_swallowed()
                with contextlib.suppress(OSError):
                    target.shutdown(socket.SHUT_WR)
                return
            cuts, most = self.state.cuts, self.state.most
            size = len(data) if cuts is None else cuts.randint(1, most)
            if self.state.bytes_per_s is not None:
                size = min(size, max(1, int(self.state.bytes_per_s / 20)))
            piece, data = data[:size], data[size:]
            try:
                await loop.sock_sendall(target, piece)
            except OSError:
                self.reset()
                return
            if self.state.bytes_per_s is not None:
                await asyncio.sleep(len(piece) / self.state.bytes_per_s)
            if not data:
                return
