"""The network that the tests put between the daemon and others is one that could be."""

from __future__ import annotations

import contextlib
import socket
import threading
from functools import partial

from tests.harness.flaky_network import FlakyNetwork
from tests.harness.waiting import await_until

LIMIT_S = 30
ROUNDS = 40
BYTES = 8


class Counting:
    """A server that sends each client 0, 1, 2 and so on, in BYTES bytes each."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sent = 0
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def is_beyond(self, number: int) -> bool:
        return self.sent > number

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client, contextlib.suppress(OSError):
                    self.sent = 0
                    while True:
                        client.sendall(self.sent.to_bytes(BYTES, "big"))
                        self.sent += 1


def test_bytes_that_were_swallowed_are_never_followed_by_others() -> None:
    server = Counting()
    with contextlib.closing(server), FlakyNetwork(server.port) as network:
        for _ in range(ROUNDS):
            received = bytearray()
            with socket.create_connection(("127.0.0.1", network.port)) as client:
                client.settimeout(LIMIT_S)
                reading = threading.Thread(target=_read, args=(client, received))
                reading.start()
                await_until(partial(_has, received, 100 * BYTES), LIMIT_S, poll_s=0.001)
                network.blackhole()
                await_until(partial(server.is_beyond, server.sent + 1000), LIMIT_S, poll_s=0.001)
                network.heal()
                reading.join(LIMIT_S)
            numbers = [received[at : at + BYTES] for at in range(0, len(received), BYTES)]
            whole = [int.from_bytes(n, "big") for n in numbers if len(n) == BYTES]
            assert whole == list(range(len(whole)))


def _has(received: bytearray, nbytes: int) -> bool:
    return len(received) > nbytes


def _read(client: socket.socket, received: bytearray) -> None:
    """Take what comes until the connection ends."""
    with contextlib.suppress(OSError):
        while data := client.recv(1 << 16):
            received.extend(data)
