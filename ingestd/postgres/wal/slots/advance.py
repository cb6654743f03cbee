"""Moving the slot itself while no stream does: a backlog of any size may be under way.

It is moved to confirmed positions only, in the background: the server reads the WAL up to there,
and the next epoch need not wait for that. It begins at restart_lsn, which may lie far behind the
slot's position; then the next step is larger, so that not much more is read again than moved by.
Source: PostgreSQL documentation, "Replication Management Functions", pg_replication_slot_advance.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psycopg
import structlog
from psycopg import AsyncConnection

from ingestd.failpoints import reach_async
from ingestd.model.errors import TransientError
from ingestd.model.lsn import ZERO, Lsn
from ingestd.postgres.connection.errors import FULL, classify
from ingestd.postgres.connection.session import connect, end_without_client
from ingestd.postgres.wal.errors import cut_off
from ingestd.postgres.wal.server import refuse_other
from ingestd.postgres.wal.slots.slot import advance_slot

ADVANCE_BYTES = 256 << 20
"""How much is confirmed at a time, at least: each costs the server a scan, and a connection."""
FREE_WITHIN_S = 15.0
"""The slot may be a walsender's for so long, whose stream was closed in the middle of its work."""
_LOOK_S = 0.2
_MOST_STEPS = 4
"""A step is at most so many times that: until it is made the server keeps the WAL."""
_AGAIN = (
    "SELECT coalesce((confirmed_flush_lsn - restart_lsn)::bigint, 0)"
    " FROM pg_catalog.pg_replication_slots WHERE slot_name = %s"
)


class SlotAdvance:
    """Moves one slot, `step_bytes` or more at a time. `close` it always.

    Where the server has no connection free the slot stays behind until a later step, or a stream.
    """

    def __init__(
        self, dsn: str, slot: str, source: str, *, step_bytes: int = ADVANCE_BYTES
    ) -> None:
        self._dsn = dsn
        self._least_bytes = self._next_bytes = step_bytes
        self._slot = slot
        self._source = source
        self._reached = ZERO
        self._is_held_up = False
        self._moving: asyncio.Task[None] | None = None
        self.lineage = ""
        """The server that it is on (`refuse_other`)."""

    def begin(self, position: Lsn) -> None:
        """Record that the slot is at `position`."""
        self._reached = position
        self._next_bytes = self._least_bytes
        self._is_held_up = False

    async def confirm(self, position: Lsn) -> None:
        """Begin to move it there, if that is far enough and no step is under way.

        Raises what the step before ended with: TransientError, OperatorError.
        """
        if self._moving is not None and self._moving.done():
            await self.settle()
        if self._moving is None and position - self._reached >= self._next_bytes:
            self._moving = asyncio.create_task(self._move(position))

    async def settle(self) -> None:
        """Return when the slot is not being moved. Raises what that ended with."""
        if self._moving is not None:
            moving = self._moving
            await asyncio.wait([moving])
            self._moving = None
            moving.result()

    async def close(self) -> None:
        """Stop. At any time, twice."""
        moving, self._moving = self._moving, None
        if moving is not None:
            moving.cancel()
            await asyncio.gather(moving, return_exceptions=True)

    async def _move(self, position: Lsn) -> None:
        try:
            async with await connect(self._dsn, claim=self._slot) as connection:
                await end_without_client(connection)
                await refuse_other(connection, self.lineage)
                await reach_async("capture.slot_advance.before", cut_off)
                await self._advance(connection, position)
                await reach_async("capture.slot_advance.after", cut_off)
                cursor = await connection.execute(_AGAIN, (self._slot,))
                [again_bytes] = await cursor.fetchone() or [0]
                self._next_bytes = step_after(again_bytes, self._least_bytes)
                self._reached = position
                self._is_held_up = False
        except psycopg.Error as error:
            fault = classify(error, f"source {self._source}, confirm", self._dsn)
            if not isinstance(fault, TransientError) or fault.reason != FULL:
                raise fault from error
            # `_reached` is as it was: the next `confirm` tries again, or the stream moves it.
            self._tell(fault)

    def _tell(self, fault: TransientError) -> None:
        """Say, once for a time, that the server keeps WAL that nobody needs."""
        if not self._is_held_up:
            self._is_held_up = True
            log = structlog.get_logger("ingestd")
            source, reason, remedy = self._source, fault.what, fault.remedy
            log.warning("slot.not_moved", source=source, reason=reason, remedy=remedy)

    async def _advance(self, connection: AsyncConnection[Any], position: Lsn) -> None:
        patience_until_s = time.monotonic() + FREE_WITHIN_S
        while True:
            try:
                await advance_slot(connection, self._slot, position)
            except psycopg.errors.ObjectInUse:
                if time.monotonic() > patience_until_s:
                    raise
                await asyncio.sleep(_LOOK_S)
            else:
                return


def step_after(again_bytes: int, least_bytes: int) -> int:
    """Return by how much to move a slot that lies `again_bytes` above where reading begins."""
    return min(max(least_bytes, again_bytes), _MOST_STEPS * least_bytes)
