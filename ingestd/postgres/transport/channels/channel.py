"""The contract of every channel.

A channel must be read before it is waited for: bytes that TLS has already decrypted do not make the
socket readable.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import psycopg

TURN_BYTES = 4 << 20
"""A read returns after this many bytes, so that they can be decoded. Decoding costs one or two
milliseconds per piece of any size, plus its rows."""
PIECE_BYTES = 1 << 16
LOW_WATER_BYTES = 1 << 16
"""On TCP the thread sleeps until this many bytes have arrived. A wake-up for each message would
cost it, and the server that wakes it, more than everything else."""
_READY = b"Z\0\0\0\5"
"""ReadyForQuery without its last byte: nothing follows."""


class Channel(Protocol):
    """Belongs to one reader. Raises OSError, psycopg.Error; EOFError if the stream has ended.

    `read` is called by one thread at a time, `write` and `release` by any. `wants_write`: nothing
    can be read before the socket is writable.
    """

    wants_write: bool

    def fileno(self) -> int:
        """Return the descriptor to wait on after `read` returned nothing."""
        ...

    def read(self) -> bytes:
        """Return the bytes that have arrived, empty for none; never wait.

        Fewer than `PIECE_BYTES` means that all were returned.
        """
        ...

    def read_turn(self, limit_s: float) -> list[bytes]:
        """Return bytes until `TURN_BYTES`, the time limit, or a fault, which the next call raises.

        It blocks, so call it in a thread.
        """
        ...

    def write(self, data: bytes) -> int:
        """Return how many bytes were accepted; never wait. The rest must be written next."""
        ...

    def release(self) -> None:
        """Return the connection to libpq at once. A running read soon ends or raises EOFError."""
        ...

    def close(self) -> None:
        """Close what the channel itself owns, after `release` and the last `read_turn`."""
        ...


def read_turn(
    read: Callable[[], bytes], wait: Callable[[float], object], limit_s: float
) -> list[bytes]:
    """Collect a turn of pieces, as `Channel.read_turn`. `wait`: waits at most its argument."""
    until = time.monotonic() + limit_s
    pieces: list[bytes] = []
    nbytes = 0
    while nbytes < TURN_BYTES:
        try:
            piece = read()
        except (EOFError, OSError, psycopg.Error):
            if pieces:  # the server may have reported why
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
