"""The confirmed position of a slot, and which connection reports it to the server.

::

                 streaming: the stream is open
      ADVANCE ---------------------------------> STREAM
         ^                                          |
         |  it is closed                            |  it is being closed
         +------------------ NEITHER <--------------+

Neither reports while a stream is being closed, because the slot is still its walsender's. The next
stream, or the next step of the advance, starts at what was confirmed meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from enum import Enum, auto

from ingestd.failpoints import reach_async
from ingestd.model.lsn import ZERO, Lsn
from ingestd.postgres.wal.replication_stream import ReplicationStream
from ingestd.postgres.wal.slots.advance import SlotAdvance


class Reporter(Enum):
    """What reports a confirmed position."""

    ADVANCE = auto()
    """`pg_replication_slot_advance`, in the background: no stream has the slot."""
    STREAM = auto()
    """Status updates of the stream."""
    NEITHER = auto()
    """Nothing: the stream that has the slot is being closed."""


class SlotConfirmation:
    """Reports what the pipeline made durable (I1). `close` it always.

    `commit_requested`: an epoch should be committed now, because the server waits for a reply
    or keeps the WAL of a backlog that has been delivered.
    """

    def __init__(self, advance: SlotAdvance) -> None:
        self._advance = advance
        self._lock = asyncio.Lock()
        self._reporter = Reporter.ADVANCE
        self._stream: ReplicationStream | None = None
        self._slot_at = self._received = self._wanted = ZERO
        self.confirmed = ZERO
        self.commit_requested = False

    @property
    def stream(self) -> ReplicationStream | None:
        """The stream that is open, if one is."""
        return self._stream

    def begin(self, slot_at: Lsn, queried_id: str) -> None:
        """Record where the slot is, and on which server (`WalServer.queried_id`)."""
        self._slot_at = slot_at
        self._advance.queried_id = queried_id
        self._advance.start_at(self._floor)

    def reset(self) -> None:
        """Record that the slot is a new one."""
        self.confirmed = ZERO

    @property
    def _floor(self) -> Lsn:
        """The lowest position that the slot can be at."""
        return max(self._slot_at, self.confirmed)

    def record_received(self, position: Lsn) -> None:
        """Record that everything that precedes `position` is delivered (`ChangeSet.position`)."""
        self._received = max(self._received, position)

    def request(self, position: Lsn) -> None:
        """Request a commit that reaches `position`: the server keeps its WAL until then."""
        self._wanted = position
        self.request_reply(position)

    def request_reply(self, position: Lsn) -> None:
        """Request a commit if `position` is not confirmed: the server waits for a reply.

        The reply is the status update of `confirm`, so it may wait for an epoch. Meanwhile the
        stream's regular updates keep the server from closing the connection.
        """
        self.commit_requested |= position > self.confirmed

    async def confirm(self, position: Lsn) -> None:
        """Record a durable position, and report it to the server, or leave that to what follows.

        Raises ValueError for a position that was not delivered.
        """
        if position > self._received:
            msg = f"confirm {position} is beyond what was delivered, {self._received}"
            raise ValueError(msg)
        if position <= self.confirmed:
            return
        self.confirmed = position
        self.commit_requested = position < self._wanted
        await reach_async("capture.confirm.before")
        async with self._lock:  # not while a stream takes the slot over
            if self._stream is not None:
                await self._stream.report_durable(position)
            elif self._reporter is Reporter.ADVANCE:
                await self._advance.advance_to(position)
        await reach_async("capture.confirm.after")

    @contextlib.asynccontextmanager
    async def streaming(
        self, open_stream: Callable[[Lsn], Awaitable[ReplicationStream]]
    ) -> AsyncGenerator[ReplicationStream, None]:
        """Open a stream, which reports until the block ends; then it is closed.

        `open_stream`: given the position that the slot has at least.
        """
        async with self._lock:
            await self._advance.settle()
            stream = await open_stream(self._floor)
            stream.begin_reporting()
            self._stream, self._reporter = stream, Reporter.STREAM
        try:
            yield stream
        finally:
            self._stream, self._reporter = None, Reporter.NEITHER
            try:
                await stream.close()
            finally:
                self._reporter = Reporter.ADVANCE
                self._advance.start_at(self._floor)

    async def close(self) -> None:
        """Close the connections. At any time, twice."""
        if self._stream is not None:
            await self._stream.close()
        await self._advance.close()
