"""Advancing the slot while no stream does, as during a long backlog.

The slot moves to confirmed positions only, in the background: the server reads the WAL up to there,
and the next epoch need not wait for that. The server begins at restart_lsn, which may be far behind
the slot's position; the next step is then larger, so that re-reading stays in proportion.
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
from ingestd.postgres.connection.errors import FULL, classify, cut_off
from ingestd.postgres.connection.session import connect, end_without_client
from ingestd.postgres.wal.server import refuse_other
from ingestd.postgres.wal.slots.slot import advance_slot
from ingestd.process.tasks import cancel_all

ADVANCE_BYTES = 256 << 20
"""The least to confirm at a time: each step costs the server a scan, and a connection."""
FREE_WITHIN_S = 15.0
"""How long a walsender may still hold the slot after its stream was closed while it worked."""
_LOOK_S = 0.2
_MOST_STEPS = 4
"""The largest step, as a multiple of the least one: until it is made the server keeps the WAL."""
_AGAIN = (
    "SELECT coalesce((confirmed_flush_lsn - restart_lsn)::bigint, 0)"
    " FROM pg_catalog.pg_replication_slots WHERE slot_name = %s"
)


class SlotAdvance:
    """Moves one slot, `step_bytes` or more at a time. Always `close` it.

    If the server has no free connection, the slot stays behind until a later step or a stream.
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
        self.queried_id = ""
        """The server that the slot is on (`refuse_other`)."""

    def start_at(self, position: Lsn) -> None:
        """Record that the slot is at `position`."""
        self._reached = position
        self._next_bytes = self._least_bytes
        self._is_held_up = False

    async def advance_to(self, position: Lsn) -> None:
        """Start to move the slot there, if that is far enough and no step is under way.

        Raises the error of the previous step: TransientError, OperatorError.
        """
        if self._moving is not None and self._moving.done():
            await self.settle()
        if self._moving is None and position - self._reached >= self._next_bytes:
            self._moving = asyncio.create_task(self._move(position))

    async def settle(self) -> None:
        """Wait until the slot is not being moved. Raises the error of the step."""
        if self._moving is not None:
            moving = self._moving
            await asyncio.wait([moving])
            self._moving = None
            moving.result()

    async def close(self) -> None:
        """Stop. May be called at any time, and twice."""
        moving, self._moving = self._moving, None
        if moving is not None:
            await cancel_all(moving)

    async def _move(self, position: Lsn) -> None:
        try:
            async with await connect(self._dsn, claim=self._slot) as connection:
                await end_without_client(connection)
                await refuse_other(connection, self.queried_id)
                await reach_async("capture.slot_advance.before", cut_off)
                await self._advance(connection, position)
                await reach_async("capture.slot_advance.after", cut_off)
                cursor = await connection.execute(_AGAIN, (self._slot,))
                [reread_bytes] = await cursor.fetchone() or [0]
                self._next_bytes = step_after(reread_bytes, self._least_bytes)
                self._reached = position
                self._is_held_up = False
        except psycopg.Error as error:
            fault = classify(error, f"source {self._source}, confirm", self._dsn)
            if not isinstance(fault, TransientError) or fault.reason != FULL:
                raise fault from error
            # `_reached` is unchanged: the next `advance_to` retries, or the stream moves the slot.
            self._report_once(fault)

    def _report_once(self, fault: TransientError) -> None:
        """Log, once per episode, that the server keeps WAL that is no longer needed."""
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


def step_after(reread_bytes: int, least_bytes: int) -> int:
    """Return the next step, in bytes, for a slot `reread_bytes` beyond where reading begins."""
    return min(max(least_bytes, reread_bytes), _MOST_STEPS * least_bytes)
