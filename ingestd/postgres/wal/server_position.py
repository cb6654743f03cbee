"""The end of the server's WAL: positions beyond it that the stream reports are refused.

A delivered position becomes the lake's and the slot's. A position that the server has not reached
would make the slot skip everything up to it. So each position of the stream is compared with what
the server reports on request. A stream sends only flushed WAL, so a later answer is never lower:
neither on a standby, which decodes what it has replayed, nor after a promotion. If another server
answers, its lineage shows that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from psycopg import AsyncConnection

from ingestd.model.errors import ProtocolError
from ingestd.model.lsn import ZERO, Lsn
from ingestd.postgres.connection.wal_position import current_position
from ingestd.postgres.wal.server import refuse_other

AskPosition = Callable[[str], Awaitable[Lsn]]
"""Asks the server of a lineage for the end of its WAL."""


class ServerPosition:
    """The end of the server's WAL, as far as it is known."""

    def __init__(self, ask: AskPosition, where: str) -> None:
        self._ask = ask
        self._where = where
        self._known = ZERO

    def mark_uncertain(self) -> None:
        """Forget the known end: from here on it may be another server."""
        self._known = ZERO

    async def ensure_reached(self, position: Lsn, lineage: str) -> None:
        """Raise ProtocolError if the server has not reached this position of its stream."""
        if position <= self._known:
            return
        self._known = max(self._known, await self._ask(lineage))
        if position > self._known:
            msg = f"the server sent position {position}, beyond the end of its WAL ({self._known})"
            raise ProtocolError(msg, where=self._where)


async def position_of(connection: AsyncConnection[Any], lineage: str) -> Lsn:
    """Return the end of the WAL of the server with that lineage.

    Raises psycopg.Error; TransientError if the connection leads to another server.
    """
    found = await current_position(connection)
    await refuse_other(connection, lineage)
    return found
