"""What every channel does.

A channel is read first and waited for after that: what TLS has decrypted already does not make the
socket readable.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import psycopg

TURN_BYTES = 4 << 20
"""A reader returns after so much, so that it can be decoded: to decode a piece of any size costs a
millisecond or two, and then by its rows."""
PIECE_BYTES = 1 << 16
LOW_WATER_BYTES = 1 << 16
"""On TCP the thread sleeps until so much has come: to be woken for each message takes it, and the
server that wakes it, longer than all else."""
_READY = b"Z\0\0\0\5"
"""ReadyForQuery, but for its last byte: nothing follows."""


class Channel(Protocol):
    """Belongs to one reader. Raises OSError, psycopg.Error; EOFError where the stream ended.

    `read` is called by one thread at a time, `write` and `release` by any. `wants_write`: nothing
    can be read before the socket is writable.
    """

    wants_write: bool

    def fileno(self) -> int:
        """Return the descriptor to wait on after `read` returned nothing."""
        ...

    def read(self) -> bytes:
        """Return what has come, empty for nothing; never wait.

        Less than `PIECE_BYTES` is all that has come.
        """
        ...

    def read_turn(self, limit_s: float) -> list[bytes]:
        """Return what comes until `TURN_BYTES`, the limit, or a fault, which the next call raises.

        Waits, so it is called by a thread.
        """
        ...

    def write(self, data: bytes) -> int:
        """Return how much of it was taken; never wait. The rest must be written next."""
        ...

    def release(self) -> None:
        """Leave the connection to libpq at once; whatever reads then ends with EOFError or soon."""
        ...

    def close(self) -> None:
        """Close what belongs to the channel alone, after `release` and the last `read_turn`."""
        ...


def read_turn(
    read: Callable[[], bytes], wait: Callable[[float], object], limit_s: float
) -> list[bytes]:
    """Return a turn of what `read` returns, as `Channel.read_turn`. `wait`: at most so long."""
    until = time.monotonic() + limit_s
    pieces: list[bytes] = []
    nbytes = 0
    while nbytes < TURN_BYTES:
        try:
            piece = read()
        except (EOFError, OSError, psycopg.Error):
            if pieces:  # the server may have said why
                break
            raise
        if piece:
            pieces.append(piece)
            nbytes += len(piece)
        left_s = until - time.monotonic()
        if left_s <= 0 or is_last(piece):
            break
        if len(piece) < PIECE_BYTES:
            wait(left_s)
    return pieces


def is_last(piece: bytes) -> bool:
    """Return whether nothing more is expected, judging by the end of a piece."""
    return piece[-6:-1] == _READY
