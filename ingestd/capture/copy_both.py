"""What reads and writes a running replication connection, and what it gives.

Source: PostgreSQL documentation, "Streaming Replication Protocol".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import psycopg
from numpy.typing import NDArray

TURN_BYTES = 4 << 20
"""How much is read before others have a look at it: to decode a piece of any size costs a
millisecond or two, and then by its rows."""


@dataclass(frozen=True, slots=True)
class Block:
    """CopyData messages in one buffer, cut by `starts` and `ends` (int64).

    `ended`: what the server ended the stream with, after them.
    """

    buffer: bytes
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    ended: psycopg.Error | None = None


class Collected(Protocol):
    """What has been read, to be made a block of: in another thread, in the order of reading."""

    def block(self) -> Block:
        """Cut it. Raises ProtocolError."""
        ...


class Reader(Protocol):
    """A connection on which nothing else is done. Raises psycopg.Error, OSError, EOFError.

    `heard_s`: when something last came, by the monotonic clock.
    """

    heard_s: float

    async def start(self, command: bytes) -> None:
        """Send START_REPLICATION; return when data may come."""
        ...

    async def collect(self, linger_s: float) -> int:
        """Wait for data, read on for about `linger_s` or a turn; give how many bytes it takes."""
        ...

    def take(self) -> Collected | None:
        """Give what has been read since the last time, None for nothing."""
        ...

    async def send(self, message: bytes) -> None:
        """Send a CopyData message. Cancelled, the connection is of no use any more."""
        ...

    async def close(self) -> None:
        """Let go of the connection, which is closed by who made it. At any time, twice."""
        ...
