"""Rows into the epoch that fills: what of them is taken, and which tables stop (I8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from ingestd.changes import Chunk, TableBatch, marker_batch
from ingestd.errors import TableError
from ingestd.ports import Sink, Snapshot, TableEvent, TableState
from ingestd.positions import Lsn
from ingestd.run.epoch import FillingEpoch
from ingestd.run.tables import TableBook, stopped
from ingestd.run.watch import Watch
from ingestd.schema import Table


class Intake:
    """Appends to epochs, and records in `_tables` what becomes of the tables."""

    def __init__(
        self, sink: Sink, book: TableBook, watch: Watch, monotonic: Callable[[], float]
    ) -> None:
        self._sink = sink
        self._book = book
        self._watch = watch
        self._monotonic = monotonic

    async def begin_snapshot(
        self, epoch: FillingEpoch, tables: Sequence[Table], snapshot: Snapshot
    ) -> None:
        """Append the `t` of each table; all its rows at lower positions are void then."""
        self._book.read_at(tables, snapshot.point)
        for table in tables:
            await self._append(epoch, marker_batch(table, snapshot.point, snapshot.at))
        epoch.hold_snapshot(snapshot.point, snapshot.at, self._monotonic())

    async def take_page(self, epoch: FillingEpoch, page: TableBatch | TableError) -> None:
        """Append a page of a snapshot; a failed table is stopped."""
        if isinstance(page, TableError):
            await self.stop_table(epoch, page)
        elif self._book.is_captured(page.table.id):
            epoch.nbytes += page.nbytes
            await self._append(epoch, page)

    async def take_chunk(self, epoch: FillingEpoch, chunk: Chunk) -> None:
        """Append what the stream brought."""
        for batch in chunk.batches:
            admitted = self._book.admit(batch)
            if admitted is None:
                continue
            if self._book.is_new_version(admitted.table):
                state = self._book.state(admitted.table.id)
                await self.enter([admitted.table], state, chunk.position)
            await self._append(epoch, admitted)
        epoch.cover(chunk, self._monotonic())
        self._watch.received(chunk, epoch)

    async def enter(self, tables: Sequence[Table], state: TableState, at_lsn: Lsn) -> None:
        """Record that tables entered a state."""
        await self.record(self._book.events(tables, state, _now(), at_lsn))

    async def record(self, events: Sequence[TableEvent]) -> None:
        """Append to `_tables` and show it."""
        if events:
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
