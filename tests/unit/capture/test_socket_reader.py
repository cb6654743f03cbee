from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
from ingestd.capture.socket_reader import _read_on

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 1.0
Pair = tuple[socket.socket, socket.socket]


def tcp_pair() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


@pytest.fixture(params=[tcp_pair, socket.socketpair], ids=["tcp", "unix"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    ours, theirs = request.param()
    ours.settimeout(None)
    with ours, theirs:
        yield ours, theirs


def test_what_little_came_is_given_when_the_time_is_over(pair: Pair) -> None:
    ours, theirs = pair
    theirs.sendall(b"little")
    assert _read_on(ours, 0.05) == b"little"
    assert _read_on(ours, 0.05) == b""
    # The event loop is told of the next byte.
    theirs.sendall(b"!")
    assert ours.recv(1) == b"!"


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
def test_what_came_before_the_end_is_given(pair: Pair, *, is_reset: bool) -> None:
    """The server may have said why."""
    ours, theirs = pair
    if is_reset:
        ours.sendall(b"never read")
    theirs.sendall(b"last words")
    theirs.close()
    assert _read_on(ours, LIMIT_S) == b"last words"
    with pytest.raises((EOFError, ConnectionResetError)):
        _read_on(ours, LIMIT_S)
