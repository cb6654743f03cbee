"""What a snapshot puts into the pipeline's queue, and where it waits (design section 8.9).

The readers put pages into the pipeline's one queue, along with the stream's change sets; so only
the pipeline's loop appends to an epoch. A page enters the queue only once the stream has reached
its position: the rows of a snapshot at a consistent point L are at (L, 0), those of a chunk at (W,
0).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime

from ingestd.model.changes import TableBatch
from ingestd.model.errors import TableError
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import TableId


class StreamBarrier:
    """Blocks callers that wait for a position until the stream has reached it."""

    def __init__(self) -> None:
        self.position = ZERO
        self._moved = asyncio.Event()

    def advance(self, position: Lsn) -> None:
        """Record the stream's position."""
        if position > self.position:
            self.position = position
            self._moved.set()

    async def reached(self, position: Lsn) -> None:
        """Return when the stream has delivered everything below `position`."""
        while self.position < position:
            self._moved.clear()
            await self._moved.wait()


@dataclass(frozen=True, slots=True)
class QueuedPage:
    """Rows of the snapshot `snapshot_id`, read at `at`, or the error of a table that can't be read.

    `position`, `seen`: as in `ingestd.ports.SnapshotPage`.
    """

    content: TableBatch | TableError
    at: datetime
    snapshot_id: int
    position: Lsn = ZERO
    seen: PgSnapshot | None = None


@dataclass(frozen=True, slots=True)
class QueuedSplitEnd:
    """All pages of a split of `table` precede this in the queue.

    `remainder_of`: returns what must still be read once some splits are durable
    (`Snapshot.remainder`).
    `oldest`: the oldest snapshot of any later page, of all tables that are read together
    (`snapshot_ids`: their snapshots).
    """

    table: TableId
    snapshot_id: int
    where: str
    remainder_of: Callable[[TableId, Collection[str]], str]
    oldest: PgSnapshot | None = None
    snapshot_ids: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class QueuedSnapshotEnd:
    """All pages of a snapshot precede this in the queue."""

    snapshot_id: int


SnapshotWork = QueuedPage | QueuedSplitEnd | QueuedSnapshotEnd
