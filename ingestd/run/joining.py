"""Tables whose rows are read while the stream goes on (design section 8.9, way a).

The reader gives pages to the pipeline's one queue, which the stream's chunks go through as well; so
only the pipeline's loop appends to an epoch. Nothing is given before the stream has reached the
snapshot's point L: the rows lie at (L, 0), and an epoch ends above all of its rows.

A table that the lake has rows of gets its `t` at (L, -1) last: until then the old rows serve. A new
one gets it first. The table's changes flow meanwhile; the `t` voids those below L, which are in the
rows that are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime

from ingestd.changes import TableBatch, marker_batch
from ingestd.errors import TableError
from ingestd.ports import Snapshot
from ingestd.positions import ZERO, Lsn
from ingestd.schema import Table, TableId


class Gate:
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
    """Rows that the reading `load` took at `at`, or why a table's can't be read."""

    content: TableBatch | TableError
    at: datetime
    load: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The pages of a reading have all been given before this."""

    load: int


async def read_tables(
    snapshot: Snapshot, tables: Sequence[Table], replaces: Callable[[TableId], bool], load: int
) -> AsyncGenerator[Page | Loaded, None]:
    """Give what the tables' rows are, with their markers, and the end."""
    failed: set[TableId] = set()
    replaced = [t for t in tables if replaces(t.id)]
    for table in tables:
        if table not in replaced:
            yield Page(marker_batch(table, snapshot.point, snapshot.at), snapshot.at, load)
    async with aclosing(snapshot.pages()) as pages:
        async for page in pages:
            if isinstance(page, TableError):
                failed.add(page.table)
            yield Page(page, snapshot.at, load)
    for table in replaced:
        if table.id not in failed:
            yield Page(marker_batch(table, snapshot.point, snapshot.at), snapshot.at, load)
    yield Loaded(load)
