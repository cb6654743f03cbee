from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.postgres.transport.channels.plain import PlainChannel
from ingestd.postgres.transport.copy_reader import CopyReader

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_S = 1.0
Pair = tuple[PlainChannel, socket.socket, socket.socket]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


@pytest.fixture(params=[tcp_pair, socket.socketpair], ids=["tcp", "unix"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    ours, theirs = request.param()
    connection: Any = SimpleNamespace(pgconn=SimpleNamespace(socket=ours.fileno()))
    channel = PlainChannel(connection)
    with ours, theirs:
        yield channel, ours, theirs
    channel.release()
    channel.close()


def test_what_little_came_is_returned_when_the_time_is_over(pair: Pair) -> None:
    channel, ours, theirs = pair
    theirs.sendall(b"little")
    assert channel.read_turn(0.05) == [b"little"]
    assert channel.read_turn(0.05) == []
    assert channel.read() == b""
    # The event loop is notified of the next byte.
    theirs.sendall(b"!")
    assert select.select([channel.fileno()], [], [], LIMIT_S)[0]
    assert ours.recv(1) == b"!"


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
def test_what_came_before_the_end_is_returned(pair: Pair, *, is_reset: bool) -> None:
    """The server may have said why."""
    channel, ours, theirs = pair
    if is_reset:
        ours.sendall(b"never read")
    theirs.sendall(b"last words")
    theirs.close()
    assert channel.read_turn(LIMIT_S) == [b"last words"]
    with pytest.raises((EOFError, ConnectionResetError)):
        channel.read_turn(LIMIT_S)


def test_nothing_is_written_while_the_other_side_does_not_read(pair: Pair) -> None:
    channel, _, theirs = pair
    sent = 0
    while taken := channel.write(bytes(1 << 16)):
        sent += taken
    theirs.settimeout(LIMIT_S)
    while sent:
        sent -= len(theirs.recv(1 << 16))
    assert channel.write(b"then") == 4


async def test_bounded_a_flood_before_the_answer_keeps_the_loop_free(pair: Pair) -> None:
    channel, _, theirs = pair
    notification = b"A" + struct.pack(">i", 4)
    is_over = threading.Event()

    def flood() -> None:
        with contextlib.suppress(OSError):
            for _ in range(1000):  # 50 MB
                theirs.sendall(notification * 10_000)
                if is_over.is_set():
                    break

    flooding = threading.Thread(target=flood)
    reader = CopyReader(channel)
    began_s = time.monotonic()
    flooding.start()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.start(b"COPY t TO STDOUT"), 0.2)
    assert time.monotonic() - began_s < LIMIT_S * 5
    is_over.set()
    theirs.shutdown(socket.SHUT_RDWR)
    flooding.join()
    await reader.close()
