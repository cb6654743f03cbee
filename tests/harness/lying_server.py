"""A server that lies: a proxy that changes a real server's messages, or answers for it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import TYPE_CHECKING, Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo

if TYPE_CHECKING:
    from collections.abc import Callable

    Lie = Callable[[bytes], bytes | None]
    Answer = Callable[[bytes], bytes | None]

STREAM, COPY = b"START_REPLICATION", b"COPY ("
_HEADER_BYTES = 5
_PIECE_BYTES = 1 << 16


def message(kind: bytes, content: bytes, length: int | None = None) -> bytes:
    """Return a message of the backend. `length`: the length of its content that it claims."""
    told = len(content) if length is None else length
    return struct.pack(">ci", kind, told + 4) + content


def keepalive(position: int, *, asks: bool = False) -> bytes:
    """Return a keepalive that claims that there is no WAL before a position."""
    return message(b"d", struct.pack(">cQqB", b"k", position, 0, asks))


class LyingServer:
    """Forwards connections to `port`, as a context manager.

    `lie`: receives each message of a stream, with its header, and returns the bytes to send
    instead. Once it returns None, all later messages are forwarded unchanged. It is called for one
    stream at a time. `about`: the beginning of such a stream. `answer`: receives each query of the
    simple protocol, and returns the bytes to send instead of forwarding it, or None to forward it.
    `then_ends`: the connection ends after an answer.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.lie: Lie = bytes
        self.about = STREAM
        self.answer: Answer = lambda _: None
        self.then_ends = True
        self.streams = 0
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def dsn(self, dsn: str) -> str:
        """Return a DSN of the server through this proxy."""
        fields = {**conninfo_to_dict(dsn), "host": "127.0.0.1", "port": str(self.port)}
        return make_conninfo("", **fields, sslmode="disable", gssencmode="disable")

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                streams = threading.Event()
                for work in (
                    lambda c=client, s=server, e=streams: self._up(c, s, e),
                    lambda c=client, s=server, e=streams: self._down(s, c, e),
                ):
                    threading.Thread(target=work, daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket, streams: threading.Event) -> None:
        with _ending(client, server):
            while piece := client.recv(_PIECE_BYTES):
                piece = _whole_query(client, piece)
                if piece[:1] == b"Q" and (sent := self.answer(piece[_HEADER_BYTES:])) is not None:
                    client.sendall(sent)
                    if self.then_ends:
                        return
                    continue
                if self.about in piece:
                    self.streams += 1
                    streams.set()
                server.sendall(piece)

    def _down(self, server: socket.socket, client: socket.socket, streams: threading.Event) -> None:
        with _ending(client, server):
            held = b""
            lie: Lie | None = self.lie
            while piece := server.recv(_PIECE_BYTES):
                if not streams.is_set() or lie is None:
                    client.sendall(piece)
                    continue
                held += piece
                while len(held) >= _HEADER_BYTES:
                    end = 1 + struct.unpack_from(">i", held, 1)[0]
                    if len(held) < end:
                        break
                    told = self.lie(held[:end])
                    if told is None:
                        lie = None
                        client.sendall(held)
                        held = b""
                        break
                    client.sendall(told)
                    held = held[end:]


def _whole_query(client: socket.socket, piece: bytes) -> bytes:
    if piece[:1] == b"Q" and len(piece) >= _HEADER_BYTES:
        end = 1 + struct.unpack_from(">i", piece, 1)[0]
        while len(piece) < end and (more := client.recv(_PIECE_BYTES)):
            piece += more
    return piece


@contextlib.contextmanager
def _ending(*ends: socket.socket):  # type: ignore[no-untyped-def]  # noqa: ANN202
    try:
        with contextlib.suppress(OSError):
            yield
    finally:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
