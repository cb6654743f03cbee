"""How far the server says its WAL goes: what its stream says beyond that is not believed.

A position that is delivered becomes the lake's and the slot's; one that the server has not reached
would have the slot skip all up to there. So whatever comes from the stream is held against what the
server answers when it is asked. A stream gives what is flushed, so an answer that is asked for
afterwards is never below it: neither on a standby, which decodes what it has replayed, nor after a
promotion. Another server that answers instead shows by its lineage.
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
"""Asks the server of a lineage how far its WAL goes."""


class ServerPosition:
    """How far the server's WAL goes, as far as is known."""

    def __init__(self, ask: AskPosition, where: str) -> None:
        self._ask = ask
        self._where = where
        self._known = ZERO

    def begin(self) -> None:
        """Record that it may be another server from here on."""
        self._known = ZERO

    async def ensure_reached(self, position: Lsn, lineage: str) -> None:
        """Raise ProtocolError if the server has not reached a position that its stream told."""
        if position <= self._known:
            return
        self._known = max(self._known, await self._ask(lineage))
        if position > self._known:
            msg = f"the server sent position {position}, beyond the end of its WAL ({self._known})"
            raise ProtocolError(msg, where=self._where)


async def position_of(connection: AsyncConnection[Any], lineage: str) -> Lsn:
    """Return how far the WAL of the server of that lineage goes.

    Raises psycopg.Error; TransientError where the connection leads to another.
    """
    found = await current_position(connection)
    await refuse_other(connection, lineage)
    return found
