"""Rows into the epoch that fills: what of them is taken, and which tables stop (I8)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from ingestd.changes import Chunk, TableBatch
from ingestd.errors import TableChangedError, TableError
from ingestd.ports import Sink
from ingestd.positions import Lsn
from ingestd.recorded import TableEvent, TableState
from ingestd.run.epoch import FillingEpoch
from ingestd.run.joining import Loaded, Page
from ingestd.run.tables import TableBook, stopped
from ingestd.run.watch import Watch
from ingestd.schema import Table


class Intake:
    """Appends to epochs, and records in `_tables` what becomes of the tables.

    `wanted` is set when a table is to be read anew.
    """

    def __init__(
        self, sink: Sink, book: TableBook, watch: Watch, monotonic: Callable[[], float]
    ) -> None:
        self._sink = sink
        self._book = book
        self._watch = watch
        self._monotonic = monotonic
        self.wanted = asyncio.Event()

    async def take(self, epoch: FillingEpoch, work: Chunk | Page | Loaded) -> None:
        """Append what the stream or the reader of a snapshot gave."""
        if isinstance(work, Chunk):
            await self._take_chunk(epoch, work)
        elif isinstance(work, Page):
            await self._take_page(epoch, work)
        else:
            epoch.loads.append(work.load)
            if work.load == epoch.awaits_load:
                epoch.awaits_load = None

    async def _take_page(self, epoch: FillingEpoch, page: Page) -> None:
        """Append a page of a snapshot; a failed table is stopped, an altered one read again."""
        content = page.content
        if isinstance(content, TableError):
            if not self._book.is_read_by(content.table, page.load):
                return
            if isinstance(content, TableChangedError):
                self._book.read_again(content.table)
                self.wanted.set()
            else:
                await self.stop_table(epoch, content)
        elif self._book.is_read_by(content.table.id, page.load):
            self._book.took_rows(content.table.id)
            await self._append(epoch, content)
            epoch.hold(content, page.at, self._monotonic())

    async def _take_chunk(self, epoch: FillingEpoch, chunk: Chunk) -> None:
        """Append what the stream brought."""
        for name in chunk.left_out:
            table = self._book.leave_out(name)
            if table is not None:  # before anything beyond the gap can be confirmed
                await self.enter([table], TableState.SNAPSHOTTING, chunk.position)
            self.wanted.set()
        for batch in chunk.batches:
            if not self._book.is_captured(batch.table.id):
                continue
            lsn = batch.rows.column("_cdc_lsn")
            if self._book.is_new_version(batch.table):
                first = Lsn(lsn[0].as_py())
                if self._book.is_ambiguous(batch.table, first):
                    self.wanted.set()
                await self.enter([batch.table], self._book.state(batch.table.id), first)
            self._book.took(batch.table.id, Lsn(lsn[-1].as_py()))
            await self._append(epoch, batch)
        epoch.cover(chunk, self._monotonic())
        self._watch.received(chunk, epoch)
        await self.record(self._book.changed(_now(), chunk.position))

    async def enter(self, tables: Sequence[Table], state: TableState, at_lsn: Lsn) -> None:
        """Record that tables entered a state."""
        await self.record(self._book.events(tables, state, _now(), at_lsn))

    async def record(self, events: Sequence[TableEvent]) -> None:
        """Append to `_tables` and show it.

        Noted first: who decides meanwhile what is news must know of it.
        """
        if events:
            self._book.note(events)
            await self._sink.record(events)
            self._watch.tables_changed(events)

    async def _append(self, epoch: FillingEpoch, batch: TableBatch) -> None:
        try:
            await epoch.append(batch)
        except TableError as error:
            await self.stop_table(epoch, error)

    async def stop_table(self, epoch: FillingEpoch, error: TableError) -> None:
        """Take nothing more of a table, and record why."""
        table = self._book.stop(error.table)
        await epoch.discard(error.table)
        await self.record([stopped(table, error, _now(), epoch.position)])


def _now() -> datetime:
    return datetime.now(UTC)
