"""Tables read at one point, by several readers at once (design section 8.9, way a)."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from datetime import datetime

import psycopg

from ingestd.capture.pages import TablePages
from ingestd.capture.session import classify, connect
from ingestd.capture.splits import CtidSplits
from ingestd.capture.wal.slot import ExportedPoint
from ingestd.changes import TableBatch
from ingestd.errors import TableError
from ingestd.ports import Split
from ingestd.positions import Lsn
from ingestd.schema import Table, TableId

SPLIT_BYTES = 64 << 20
"""Size of a split in the source: a fraction of a second's reading."""
PAGES_PER_WORKER = 1


Pages = asyncio.Queue[TableBatch | TableError]


class TableSnapshot:
    """See `ingestd.ports.Snapshot`.

    Each worker takes the next split of all tables. Memory: `workers` splits' pages being read, and
    PAGES_PER_WORKER a worker waiting to be taken.
    """

    def __init__(
        self, dsn: str, exported: ExportedPoint, tables: Sequence[Table], *, workers: int
    ) -> None:
        self._dsn = dsn
        self._exported = exported
        self._tables = tables
        self._readers = range(workers)
        self._failed: set[TableId] = set()
        self._bytes: dict[TableId, int] = {}
        self._read_bytes: Counter[TableId] = Counter()

    @property
    def point(self) -> Lsn:
        """The exported consistent point."""
        return self._exported.point

    @property
    def at(self) -> datetime:
        """The server's time just before it."""
        return self._exported.at

    async def pages(self) -> AsyncGenerator[TableBatch | TableError, None]:
        """Give the tables' rows; see the port."""
        pages: Pages = asyncio.Queue(len(self._readers) * PAGES_PER_WORKER)
        work = asyncio.create_task(self._read_all(pages))
        try:
            while (page := await _next(pages, work)) is not None:
                yield page
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    def progress(self, table: TableId) -> float:
        """By the sizes of the splits that were read to their ends."""
        total = self._bytes.get(table, 0)
        return self._read_bytes[table] / total if total else 0.0

    async def move_on(self) -> None:
        """Write a message to the WAL; pgoutput leaves it out, the position passes it."""
        try:
            async with await connect(self._dsn) as connection:
                await connection.execute(
                    "SELECT pg_catalog.pg_logical_emit_message(false, 'ingestd', '')"
                )
        except psycopg.Error as error:
            raise classify(error, "snapshot", self._dsn) from error

    @property
    def is_closed(self) -> bool:
        """Whether it can't be read any more."""
        return self._exported.connection.closed

    async def close(self) -> None:
        """Let the snapshot, and a temporary slot, go."""
        await self._exported.close()

    async def _read_all(self, pages: Pages) -> None:
        splits: asyncio.Queue[Split | None] = asyncio.Queue(len(self._readers))
        tasks = [self._cut(splits, pages), *(self._read(splits, pages) for _ in self._readers)]
        running = [asyncio.create_task(t) for t in tasks]
        try:
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _cut(
        self,
        splits: asyncio.Queue[Split | None],
        pages: Pages,
    ) -> None:
        cutter = CtidSplits(self._dsn)
        for table in self._tables:
            try:
                found = await cutter.splits(table, self._exported.snapshot, SPLIT_BYTES)
            except TableError as error:
                await self._fail(error, pages)
                continue
            self._bytes[table.id] = sum(split.estimated_bytes for split in found)
            for split in found:
                await splits.put(split)
        for _ in self._readers:
            await splits.put(None)

    async def _read(
        self,
        splits: asyncio.Queue[Split | None],
        pages: Pages,
    ) -> None:
        while (split := await splits.get()) is not None:
            if split.table.id in self._failed:
                continue
            source = TablePages(self._dsn, split, self.point, self.at)
            try:
                async with contextlib.aclosing(source.batches()) as batches:
                    async for batch in batches:
                        await pages.put(batch)
                self._read_bytes[split.table.id] += split.estimated_bytes
            except TableError as error:
                await self._fail(error, pages)

    async def _fail(self, error: TableError, pages: Pages) -> None:
        if error.table not in self._failed:
            self._failed.add(error.table)
            await pages.put(error)


async def _next(pages: Pages, work: asyncio.Task[None]) -> TableBatch | TableError | None:
    """Give the next page, None after the last; raise what the work ended with."""
    getter = asyncio.create_task(pages.get())
    try:
        await asyncio.wait([getter, work], return_when=asyncio.FIRST_COMPLETED)
        if getter.done():
            return getter.result()
    finally:
        getter.cancel()
    work.result()
    return None if pages.empty() else pages.get_nowait()
