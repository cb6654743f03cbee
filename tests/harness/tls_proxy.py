"""A proxy that speaks TLS for a server, and chooses the sizes of the records that it sends."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from typing import TYPE_CHECKING, Self

from tests.harness.tls_servers import NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.harness.certificates import Authority

_SSL_REQUEST = struct.pack("!ii", 8, 80877103)
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: close sends RST
_LIMIT_S = 30
ENDS = ("close_notify", "end", "half_record", "garbage", "reset")


class TlsProxy:
    """Forwards connections to a server without TLS, as a context manager.

    `sizes`: returns the size of the next record. `end_after`: end a connection after this many
    bytes of rows, in one of the ways of `ENDS`; None to leave it open.
    """

    def __init__(self, port: int, authority: Authority, sizes: Callable[[], int]) -> None:
        own = authority.sign("proxy", NAME)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(own.cert, own.key)
        self._target = port
        self._sizes = sizes
        self.end_after: tuple[int, str] | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._begin(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for end in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(_LIMIT_S)
            assert not thread.is_alive()

    def _begin(self, run: Callable[..., None], *arguments: object) -> None:
        def quiet() -> None:
            with contextlib.suppress(OSError, EOFError, ValueError):
                run(*arguments)

        thread = threading.Thread(target=quiet)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(client)
            self._begin(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        if client.recv(8, socket.MSG_WAITALL) != _SSL_REQUEST:
            client.close()  # a request to cancel
            return
        client.sendall(b"S")
        server = socket.create_connection(("127.0.0.1", self._target))
        self._sockets.append(server)
        session = _Session(client, self._context)
        session.shake_hands()
        self._begin(self._up, session, server)
        self._down(server, session)

    def _up(self, session: _Session, server: socket.socket) -> None:
        try:
            while piece := session.read():
                server.sendall(piece)
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)

    def _down(self, server: socket.socket, session: _Session) -> None:
        sent = 0
        try:
            while piece := server.recv(1 << 16):
                at = 0
                while at < len(piece):
                    part = piece[at : at + self._sizes()]
                    session.write(part)
                    at += len(part)
                sent += len(piece)
                if self.end_after is not None and sent >= self.end_after[0]:
                    session.end(self.end_after[1])
                    return
            session.end("close_notify")
        finally:
            server.close()


class _Session:
    """TLS on a socket, used by one thread per direction."""

    def __init__(self, client: socket.socket, context: ssl.SSLContext) -> None:
        self._client = client
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)
        self._lock = threading.Lock()

    def shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._take()
                continue
            self._flush()
            return

    def read(self) -> bytes:
        while True:
            with self._lock:
                try:
                    return self._tls.read(1 << 16)
                except ssl.SSLWantReadError:
                    self._flush()  # a key update wants an answer
            self._take()

    def write(self, part: bytes) -> None:
        with self._lock:
            self._tls.write(part)
            self._flush()

    def end(self, how: str) -> None:
        with self._lock:
            if how == "close_notify":
                with contextlib.suppress(ssl.SSLError):
                    self._tls.unwrap()
                self._flush()
            elif how == "half_record":
                self._tls.write(bytes(1000))
                self._client.sendall(self._out.read()[:500])
            elif how == "garbage":
                self._client.sendall(b"\x17\x03\x03\x00\x40" + bytes(64))
            elif how == "reset":
                self._client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                self._client.shutdown(socket.SHUT_RD)  # a blocked reader would keep it open
                self._client.close()
                return
            self._client.shutdown(socket.SHUT_RDWR)

    def _take(self) -> None:
        if not (piece := self._client.recv(1 << 16)):
            raise EOFError
        with self._lock:
            self._in.write(piece)

    def _flush(self) -> None:
        if found := self._out.read():
            self._client.sendall(found)
