"""Appends rows to the open epoch: decides which rows are accepted and which tables stop (I8)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from ingestd.model.backoff import Backoff
from ingestd.model.changes import ChangeSet, TableBatch
from ingestd.model.errors import TableChangedError, TableError, TableReplacedError
from ingestd.model.lake_state import TableEvent, TableState
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.row_checks import has_incomplete, incomplete_row
from ingestd.model.schema import Table, TableId
from ingestd.pipeline.dedup_window import DedupWindow, RecentXids
from ingestd.pipeline.filling_epoch import FillingEpoch
from ingestd.pipeline.removed_tables import stopped
from ingestd.pipeline.snapshot_queue import QueuedPage, QueuedSplitEnd, SnapshotWork
from ingestd.pipeline.table_set import TableSet
from ingestd.pipeline.telemetry.source import SourceTelemetry
from ingestd.ports import Sink
from ingestd.process.clock import utc_now

ALTERED_LIMIT = 5
"""How many times in a row an altered table is re-read at once."""
_WAITS = Backoff(2.0, 30.0)
"""After that: how long the next read waits."""


class EpochAppender:
    """Appends to epochs, and records state changes of the tables in `_tables`.

    `resnapshot_wanted` is set when a table must be re-read. `unseen_xids`: transactions that the
    stream has delivered, until a snapshot sees them. `flush_requested_lsn`: a position that a
    caller waits for to become durable.
    """

    def __init__(
        self,
        sink: Sink,
        table_set: TableSet,
        telemetry: SourceTelemetry,
        monotonic: Callable[[], float],
    ) -> None:
        self._sink = sink
        self._table_set = table_set
        self._telemetry = telemetry
        self._monotonic = monotonic
        self.resnapshot_wanted = asyncio.Event()
        self._windows: dict[TableId, dict[int, DedupWindow]] = {}
        self.unseen_xids = RecentXids()
        self.flush_requested_lsn = ZERO
        self.flush_requested = asyncio.Event()
        self._durable_splits: dict[int, set[str]] = {}

    def request_flush(self, position: Lsn) -> None:
        """Request that the lake become durable up to this position soon."""
        self.flush_requested_lsn = max(self.flush_requested_lsn, position)
        self.flush_requested.set()

    async def append_work(self, epoch: FillingEpoch, work: ChangeSet | SnapshotWork) -> None:
        """Append a change set of the stream or a page of a snapshot."""
        if isinstance(work, ChangeSet):
            await self._append_change_set(epoch, work)
        elif isinstance(work, QueuedPage):
            await self._append_page(epoch, work)
        elif isinstance(work, QueuedSplitEnd):
            epoch.splits.append(work)
            self._advance_floors(work)
        else:
            self._close_windows(work.snapshot_id)
            epoch.snapshot_ids.append(work.snapshot_id)
            epoch.awaits.discard(work.snapshot_id)

    async def _append_page(self, epoch: FillingEpoch, page: QueuedPage) -> None:
        """Append a page of a snapshot; stop a failed table, re-read an altered one."""
        content = page.content
        if isinstance(content, TableError):
            if not self._table_set.is_read_by(content.table, page.snapshot_id):
                return
            if self._table_set.end_partial(page.snapshot_id) is not None:
                self._telemetry.snapshot_failed(content.table, content)
            elif isinstance(content, TableChangedError):
                self._reread(content)
            else:
                await self.stop_table(epoch, content)
        elif self._table_set.is_read_by(content.table.id, page.snapshot_id):
            window = self._windows.get(content.table.id, {}).get(page.snapshot_id)
            if page.seen is not None:
                if window is None:  # its end has been queued: nothing can follow
                    return
                content = window.without_superseded(content, page.position, page.seen)
            self._table_set.record_rows(content.table.id)
            await self._append(epoch, content, from_snapshot=True)
            epoch.add_page(content, page.at, self._monotonic())

    def _reread(self, error: TableChangedError) -> None:
        """Re-read a table: at once, or with growing delays if it keeps being altered."""
        is_void = isinstance(error, TableReplacedError)
        failures = self._table_set.record_altered(error.table, from_the_start=is_void)
        if failures <= ALTERED_LIMIT:
            self.resnapshot_wanted.set()
            return
        delay_s = _WAITS.after(failures - ALTERED_LIMIT)
        self._telemetry.reading_failed(error, delay_s)
        asyncio.get_running_loop().call_later(delay_s, self.resnapshot_wanted.set)

    def open_window(self, table: Table, snapshot_id: int, floor: PgSnapshot) -> DedupWindow:
        """Record from now on the stream's changes of a table, until its `QueuedSnapshotEnd`."""
        window = DedupWindow(table, floor, self.unseen_xids.of_table(table.id))
        self._windows.setdefault(table.id, {})[snapshot_id] = window
        return window

    def _advance_floors(self, split: QueuedSplitEnd) -> None:
        if split.oldest is not None:
            for windows in self._windows.values():
                for snapshot_id in windows.keys() & set(split.snapshot_ids):
                    windows[snapshot_id].advance_floor(split.oldest)

    def _close_windows(self, snapshot_id: int) -> None:
        for name, windows in list(self._windows.items()):
            windows.pop(snapshot_id, None)
            if not windows:
                del self._windows[name]

    async def mark_durable(self, epoch: FillingEpoch) -> None:
        """Record what a durable epoch completes; of one without rows, the position is durable."""
        snapshot_ids, epoch.snapshot_ids = epoch.snapshot_ids, []
        splits, epoch.splits = epoch.splits, []
        if not (snapshot_ids or splits):
            return
        for split in splits:
            self._durable_splits.setdefault(split.snapshot_id, set()).add(split.where)
        for snapshot_id in snapshot_ids:
            self._durable_splits.pop(snapshot_id, None)
            partial = self._table_set.end_partial(snapshot_id)
            if partial is not None:
                self._telemetry.snapshot_ended(partial)
        live = self._table_set.end_snapshots(snapshot_ids)
        for name in [table.id for table in live if self._table_set.is_incomplete(table.id)]:
            table = self._table_set.stop(name)
            await self.record([stopped(table, incomplete_row(name), utc_now(), epoch.position)])
        live = [table for table in live if self._table_set.is_captured(table.id)]
        await self.record_state(live, TableState.LIVE, epoch.position)
        last = {
            split.snapshot_id: split for split in splits if split.snapshot_id not in snapshot_ids
        }
        progressed = [
            self._table_set.record_progress(
                split.table,
                snapshot_id,
                split.remainder_of(split.table, self._durable_splits[snapshot_id]),
            )
            for snapshot_id, split in last.items()
        ]
        tables = [table for table in progressed if table is not None]
        await self.record_state(tables, TableState.SNAPSHOTTING, epoch.position)

    async def _append_change_set(self, epoch: FillingEpoch, change_set: ChangeSet) -> None:
        """Append a change set of the stream."""
        for error in change_set.refused:
            if self._table_set.is_captured(error.table):
                await self.stop_table(epoch, error)
        for name in change_set.interrupted:
            table = self._table_set.interrupt(name)
            if table is not None:  # before anything beyond the gap can be confirmed
                await self.record_state([table], TableState.SNAPSHOTTING, change_set.position)
            self.resnapshot_wanted.set()
        await self.record(
            self._table_set.doubt_events(change_set.doubts, utc_now(), change_set.position)
        )
        for batch in change_set.batches:
            if self._table_set.has_successor(batch.table):
                await self._append(epoch, batch)  # void once its successor has been read
                continue
            # Those of a stopped table too: it may be read soon.
            self.unseen_xids.record_changes(batch)
            if self._table_set.accepts_changes(batch.table):
                await self._append_changes(epoch, batch)
        epoch.add_change_set(change_set, self._monotonic())
        self._telemetry.received(change_set, epoch)
        await self.record(self._table_set.discovery_events(utc_now(), change_set.position))

    async def _append_changes(self, epoch: FillingEpoch, batch: TableBatch) -> None:
        """Append changes of a captured table, unless they stop it."""
        lsn = batch.rows.column("_cdc_lsn")
        last = Lsn(lsn[-1].as_py())
        if has_incomplete(batch) and not self._table_set.note_incomplete(batch.table.id, last):
            await self.stop_table(epoch, incomplete_row(batch.table.id))
            return
        for window in self._windows.get(batch.table.id, {}).values():
            window.record_changes(batch)
        if self._table_set.is_dropped(batch.table):
            if self._table_set.is_later_version(batch.table):
                state = self._table_set.state(batch.table.id)
                await self.record_state([batch.table], state, Lsn(lsn[0].as_py()))
        elif self._table_set.is_new_version(batch.table):
            first, xid = Lsn(lsn[0].as_py()), batch.rows.column("_cdc_xid")[0].as_py()
            if self._table_set.is_ambiguous(batch.table, first, xid):
                self.resnapshot_wanted.set()
            await self.record_state([batch.table], self._table_set.state(batch.table.id), first)
        self._table_set.record_change(batch.table.id, last)
        await self._append(epoch, batch)

    async def record_state(self, tables: Sequence[Table], state: TableState, at_lsn: Lsn) -> None:
        """Record that tables entered a state."""
        await self.record(self._table_set.events(tables, state, utc_now(), at_lsn))

    async def record(self, events: Sequence[TableEvent]) -> None:
        """Append to `_tables` and show it.

        The events are noted first, so that concurrent code does not record them again.
        """
        if events:
            self._table_set.record_events(events)
            await self._sink.record(events)
            self._telemetry.tables_changed(events)

    async def _append(
        self, epoch: FillingEpoch, batch: TableBatch, *, from_snapshot: bool = False
    ) -> None:
        try:
            await epoch.append_batch(batch, from_snapshot=from_snapshot)
        except TableError as error:
            await self.stop_table(epoch, error)

    async def stop_damaged(self, errors: Iterable[TableError], position: Lsn) -> None:
        """Stop tables whose raw tables can't be used, and record why.

        In this order: after the stop nothing else can record them as live.
        """
        tables = [(self._table_set.stop(error.table), error) for error in errors]
        await self.record([stopped(table, error, utc_now(), position) for table, error in tables])

    async def stop_table(self, epoch: FillingEpoch, error: TableError) -> None:
        """Stop a table, and record why."""
        table = self._table_set.stop(error.table)
        await epoch.discard(error.table)
        await self.record([stopped(table, error, utc_now(), epoch.position)])
