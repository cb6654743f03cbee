"""Reads the splits of several tables in parallel."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial

from ingestd.failpoints import reach_async
from ingestd.model.errors import TableError
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import Table, TableId
from ingestd.ports import SnapshotItem, SnapshotPage, Split, SplitRead, TableRead
from ingestd.postgres.snapshot.read_view import ReadPoint, ReadView
from ingestd.postgres.snapshot.table_pages import TablePages
from ingestd.process.tasks import cancel_all

ITEMS_PER_WORKER = 1

Items = asyncio.Queue[SnapshotItem]
PlanSplits = Callable[[Table], Awaitable[tuple[Sequence[Split], int]]]
"""Returns a table's splits, and the bytes (by the source's estimate) that were read before."""


class SplitReaders:
    """Each of `workers` takes the next split of all tables, in their order.

    `plan` splits a table, `view` is the view in which its splits are read; `floor`: a snapshot
    older than any of theirs, where each split has its own. Memory: for each worker the pages in
    flight, ITEMS_PER_WORKER queued, and up to `hold_bytes` of a split, which are queued once it has
    been read: that shortens its transaction.
    """

    def __init__(
        self,
        dsn: str,
        tables: Sequence[Table],
        plan: PlanSplits,
        view: ReadView,
        *,
        workers: int,
        row_limit_bytes: int,
        hold_bytes: int = 0,
        floor: PgSnapshot | None = None,
    ) -> None:
        self._dsn = dsn
        self._tables = tables
        self._plan = plan
        self._view = view
        self._workers = range(workers)
        self._hold_bytes = hold_bytes
        self._row_limit_bytes = row_limit_bytes
        self._abandoned: set[TableId] = set()
        self._splits: dict[TableId, list[str]] = {}
        self._unread: Counter[TableId] = Counter()
        self._bytes: Counter[TableId] = Counter()
        self._read_bytes: Counter[TableId] = Counter()
        self._newest = floor
        self._entered_once: set[tuple[TableId, str]] = set()
        self._open: dict[tuple[TableId, str], PgSnapshot] = {}

    async def items(self) -> AsyncGenerator[SnapshotItem, None]:
        """See `ingestd.ports.Snapshot.items`."""
        items: Items = asyncio.Queue(len(self._workers) * ITEMS_PER_WORKER)
        work = asyncio.create_task(self._read_all(items))
        try:
            while (item := await _next(items, work)) is not None:
                if isinstance(item, SplitRead):
                    self._open.pop((item.table, item.where), None)
                yield item
        finally:
            await cancel_all(work)

    def ratio_read(self, table: TableId) -> float:
        """Return the fraction read, by the sizes of the completed splits."""
        total = self._bytes[table]
        return self._read_bytes[table] / total if total else 0.0

    def nbytes(self, table: TableId) -> int:
        """Return the size of a table that has been split, by the source's estimate."""
        return self._bytes[table]

    def splits(self, table: TableId) -> Sequence[str]:
        """Return `Split.where` of a table's splits; none before it is split."""
        return self._splits.get(table, ())

    def oldest(self) -> PgSnapshot | None:
        """See `ingestd.ports.Snapshot.oldest`."""
        return min(self._open.values(), key=lambda snapshot: snapshot.age, default=self._newest)

    def abandon(self, table: TableId) -> None:
        """Stop reading further splits of a table."""
        self._abandoned.add(table)

    async def _read_all(self, items: Items) -> None:
        splits: asyncio.Queue[Split | None] = asyncio.Queue(len(self._workers))
        works = [
            self._plan_all(splits, items),
            *(self._read_splits(splits, items) for _ in self._workers),
        ]
        running = [asyncio.create_task(work) for work in works]
        try:
            await asyncio.gather(*running)
        finally:
            await cancel_all(*running)

    async def _plan_all(self, splits: asyncio.Queue[Split | None], items: Items) -> None:
        for table in self._tables:
            if table.id in self._abandoned:
                continue
            try:
                found, before = await self._plan(table)
            except TableError as error:
                await self._fail(error, items)
                continue
            self._splits[table.id] = [split.where for split in found]
            self._read_bytes[table.id] = before
            self._bytes[table.id] = before + sum(split.estimated_bytes for split in found)
            self._unread[table.id] = len(found)
            if not found:
                await items.put(TableRead(table.id))
            for split in found:
                await splits.put(split)
        for _ in self._workers:
            await splits.put(None)

    async def _read_splits(self, splits: asyncio.Queue[Split | None], items: Items) -> None:
        while (split := await splits.get()) is not None:
            table = split.table.id
            if table in self._abandoned:
                continue
            try:
                await self._read_split(split, items)
            except TableError as error:
                self._open.pop((table, split.where), None)
                await self._fail(error, items)
                continue
            self._read_bytes[table] += split.estimated_bytes
            await items.put(SplitRead(table, split.where))
            self._unread[table] -= 1
            if not self._unread[table] and table not in self._abandoned:
                await items.put(TableRead(table))

    async def _read_split(self, split: Split, items: Items) -> None:
        if self._newest is not None:  # older than the Postgres snapshot that it will take
            self._open[split.table.id, split.where] = self._newest
        held: list[SnapshotPage] = []
        held_bytes = 0
        await reach_async("capture.split.before")
        source = TablePages(
            self._dsn,
            split,
            self._view,
            entered=partial(self._entered, split),
            row_limit_bytes=self._row_limit_bytes,
        )
        async with contextlib.aclosing(source.pages()) as pages:
            async for page in pages:
                held.append(page)
                held_bytes += page.batch.rows.nbytes
                if held_bytes > self._hold_bytes:
                    for one in held:
                        await items.put(one)
                    held, held_bytes = [], 0
        for page in held:
            await items.put(page)
        await reach_async("capture.split.after")

    def _entered(self, split: Split, read_point: ReadPoint) -> None:
        if read_point.pg_snapshot is None or self._newest is None:
            return
        self._newest = max(self._newest, read_point.pg_snapshot, key=lambda snapshot: snapshot.age)
        key = split.table.id, split.where
        if key not in self._entered_once:  # a second transaction of the split is younger
            self._entered_once.add(key)
            self._open[key] = read_point.pg_snapshot

    async def _fail(self, error: TableError, items: Items) -> None:
        if error.table not in self._abandoned:
            self._abandoned.add(error.table)
            await items.put(error)


async def _next(items: Items, work: asyncio.Task[None]) -> SnapshotItem | None:
    """Return the next item, None after the last; raise the error that the work ended with."""
    getter = asyncio.create_task(items.get())
    try:
        await asyncio.wait([getter, work], return_when=asyncio.FIRST_COMPLETED)
        if getter.done():
            return getter.result()
    finally:
        getter.cancel()
    work.result()
    return None if items.empty() else items.get_nowait()
