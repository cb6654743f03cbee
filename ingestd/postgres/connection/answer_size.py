"""A limit on what a server may send in answer to one query.

libpq keeps an answer until it is complete, however many rows a server sends, and however long they
are. So the received bytes are counted where psycopg waits for them. They are known for TCP on Linux
only. Source: Linux' struct tcp_info; PostgreSQL documentation, "Asynchronous Command Processing".
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.abc import PQGen
from psycopg.waiting import Ready

ANSWER_LIMIT_BYTES = 512 << 20
"""Of one answer. The catalog of 10,000 tables with 100 columns each takes half of that."""
TOO_LARGE = "the server answered a query with more than"
_RECEIVED = struct.Struct("@128xQ")
"""From struct tcp_info: only tcpi_bytes_received, since Linux 4.1."""
_T = TypeVar("_T")


class LimitedConnection(AsyncConnection[Any]):
    """A connection that is shut down by an answer of more than `answer_limit_bytes`.

    The caller gets psycopg.OperationalError.
    """

    answer_limit_bytes = ANSWER_LIMIT_BYTES

    @classmethod
    async def connect(cls, *args: Any, **kwargs: Any) -> Self:  # noqa: ANN401
        """Connect as psycopg does; a session that was begun ends if this raises.

        psycopg leaves a cancelled attempt to the garbage collector. Until it runs, the session is
        open on the server, and may hold the claim on a slot.
        """
        try:
            return await super().connect(*args, **kwargs)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Commit or roll back as psycopg does, and close the connection even if cancelled."""
        try:
            await super().__aexit__(kind, error, trace)
        finally:
            await self.close()

    async def wait(self, gen: PQGen[_T], *args: Any, **kwargs: Any) -> _T:  # noqa: ANN401
        """Wait as psycopg does, for every query and every row."""
        limited = _limited(gen, self.pgconn.socket, self.answer_limit_bytes)
        return await super().wait(limited, *args, **kwargs)


def _limited(gen: PQGen[_T], descriptor: int, limit_bytes: int) -> PQGen[_T]:
    """Run a generator of psycopg that uses a socket.

    What one read receives is not limited. The first is not counted, as most answers need one only.
    """
    first: int | None = None
    reads = 0
    try:
        state: Any = next(gen)
        while True:
            ready = yield state
            reads += bool(ready and ready & Ready.R)
            if reads > 1:
                received = _received(descriptor)
                first = received if first is None else first
                if received - first > limit_bytes:
                    with contextlib.suppress(OSError), _socket(descriptor) as end:
                        end.shutdown(socket.SHUT_RDWR)
                    raise psycopg.OperationalError(f"{TOO_LARGE} {limit_bytes >> 20} MB")
            state = gen.send(ready)
    except StopIteration as done:
        found: _T = done.value
        return found


def _received(descriptor: int) -> int:
    """Return the bytes that the kernel has received on a connection; 0 if it does not count."""
    if sys.platform != "linux":
        return 0
    with contextlib.suppress(OSError, struct.error), _socket(descriptor) as end:
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
        return int(_RECEIVED.unpack(info)[0])
    return 0


@contextlib.contextmanager
def _socket(descriptor: int) -> Iterator[socket.socket]:
    end = socket.socket(fileno=descriptor)
    try:
        yield end
    finally:
        end.detach()
