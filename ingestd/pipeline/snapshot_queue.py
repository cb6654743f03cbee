"""Rows that are read while the stream goes on (design section 8.9).

The readers give pages to the pipeline's one queue, which the stream's chunks go through as well; so
only the pipeline's loop appends to an epoch. Nothing is given before the stream has reached where
it lies: the rows of a snapshot at one point L at (L, 0), those of a chunk at (W, 0).
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
    """Lets through whoever waits for a position, once the stream has reached it."""

    def __init__(self) -> None:
        self.position = ZERO
        self._moved = asyncio.Event()

    def move(self, position: Lsn) -> None:
        """Take how far the stream is."""
        if position > self.position:
            self.position = position
            self._moved.set()

    async def reached(self, position: Lsn) -> None:
        """Return when the stream has given everything below `position`."""
        while self.position < position:
            self._moved.clear()
            await self._moved.wait()


@dataclass(frozen=True, slots=True)
class Page:
    """Rows that the reading `load` took at `at`, or why a table's can't be read.

    `position`, `seen`: as in `ingestd.ports.SnapshotPage`.
    """

    content: TableBatch | TableError
    at: datetime
    load: int
    position: Lsn = ZERO
    seen: PgSnapshot | None = None


@dataclass(frozen=True, slots=True)
class SplitDone:
    """The pages of a split of `table` have all been given before this.

    `left`: writes what is left of the reading when some splits are durable (`Snapshot.left`).
    `oldest`: of the snapshots of pages that come after this, of all tables that are read together
    (`loads`: their readings).
    """

    table: TableId
    load: int
    where: str
    left: Callable[[TableId, Collection[str]], str]
    oldest: PgSnapshot | None = None
    loads: Collection[int] = ()


@dataclass(frozen=True, slots=True)
class SnapshotDone:
    """The pages of a reading have all been given before this."""

    load: int


SnapshotWork = Page | SplitDone | SnapshotDone
