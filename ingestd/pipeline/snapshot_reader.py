"""Reads tables at one point or incrementally, and puts their rows into the pipeline's queue.

At one point L: the tables' `t` at (L, -1), their rows at (L, 0). Incrementally, a table passes the
states of docs/snapshots.md while its phase is READING (`ingestd.pipeline.table_state`)::

    recording  since its window opened, the appender records the stream's changes (`DedupWindow`)
    settled    the stream has passed L0, and every snapshot sees what it delivered below L0
    read       chunk by chunk, each put into the queue once the stream has passed its W
    closed     all chunks are in the queue; rows that lack unsent values are read by their keys
    marked     the `t` at (L0, -1) is in the queue, if the lake had rows; otherwise it came first

The rest of an earlier run (`TableSet.remainder`) is read incrementally, whichever way that run
read.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ingestd.model.changes import marker_batch
from ingestd.model.errors import OperatorError, TableError, TableReplacedError
from ingestd.model.lake_state import TableEvent, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table, TableId
from ingestd.pipeline.appender import EpochAppender
from ingestd.pipeline.dedup_window import DedupWindow
from ingestd.pipeline.policy import SnapshotPolicy
from ingestd.pipeline.removed_tables import stopped
from ingestd.pipeline.snapshot_queue import (
    QueuedPage,
    QueuedSnapshotEnd,
    QueuedSplitEnd,
    SnapshotWork,
    StreamBarrier,
)
from ingestd.pipeline.table_set import TableSet
from ingestd.pipeline.telemetry.slow_waits import warn_if_slow
from ingestd.pipeline.telemetry.source import SourceTelemetry
from ingestd.ports import (
    ChangeCapture,
    Sink,
    Snapshot,
    SnapshotItem,
    SnapshotPage,
    SplitRead,
    TableRead,
)
from ingestd.process.clock import utc_now

Enqueue = Callable[[SnapshotWork], Awaitable[None]]
"""Puts work into the pipeline's queue, once that has room."""


class LakeFault(Exception):  # noqa: N818 - it wraps an error
    """`error` came from the lake: it is not a fault of the tables being read."""

    def __init__(self, error: OperatorError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def _writing() -> Iterator[None]:
    """Wrap the errors of the lake."""
    try:
        yield
    except OperatorError as error:
        raise LakeFault(error) from error


@dataclass(slots=True)
class SnapshotRun:
    """Tables that are read together, by the numbers of their snapshots in the TableSet.

    `enqueue` puts what is read into the queue, in order. `is_partial`: only some rows are read, and
    the table's state does not change. `marked`: tables whose closing `t` an earlier run wrote
    before it was killed.
    """

    enqueue: Enqueue
    snapshot_ids: Mapping[TableId, int]
    is_partial: bool = False
    tables: dict[TableId, Table] = field(default_factory=dict)
    windows: dict[TableId, DedupWindow] = field(default_factory=dict)
    ended: set[TableId] = field(default_factory=set)
    marked: set[TableId] = field(default_factory=set)

    @property
    def unended(self) -> Mapping[TableId, int]:
        """The tables whose end is not in the queue yet."""
        return {
            name: snapshot_id
            for name, snapshot_id in self.snapshot_ids.items()
            if name not in self.ended
        }

    async def end_table(self, table: TableId) -> None:
        """Put the end of a table into the queue."""
        self.ended.add(table)
        await self.enqueue(QueuedSnapshotEnd(self.snapshot_ids[table]))

    async def fail(self, error: TableError) -> None:
        """Put a table's error, and its end, into the queue."""
        await self.enqueue(QueuedPage(error, utc_now(), self.snapshot_ids[error.table]))
        await self.end_table(error.table)


ReadStrategy = Callable[[SnapshotRun], Coroutine[Any, Any, None]]
"""How a run reads its tables: at a consistent point, incrementally, or what an earlier run left."""


class SnapshotReader:
    """Reads for one pipeline. `durable` returns the position up to which the lake is durable."""

    def __init__(  # noqa: PLR0917 - all parts of one pipeline
        self,
        capture: ChangeCapture,
        sink: Sink,
        table_set: TableSet,
        appender: EpochAppender,
        telemetry: SourceTelemetry,
        barrier: StreamBarrier,
        durable: Callable[[], Lsn],
        policy: SnapshotPolicy,
    ) -> None:
        self._policy = policy
        self._capture = capture
        self._sink = sink
        self._table_set = table_set
        self._appender = appender
        self._telemetry = telemetry
        self._barrier = barrier
        self._durable = durable
        self._read_permits = asyncio.Semaphore(policy.at_once)
        self._snapshots: dict[TableId, Snapshot] = {}

    # --- strategies --------------------------------------------------------------------------

    async def begin_at_point(self, snapshot_ids: Mapping[TableId, int], at_lsn: Lsn) -> Snapshot:
        """Take the snapshot of tables at one point."""
        tables = self._table_set.being_read(snapshot_ids)
        with _writing():
            await self._enter(tables, at_lsn)
        snapshot = await self._capture.snapshot(tables)
        self._table_set.record_point(self._table_set.being_read(snapshot_ids), snapshot.point)
        return snapshot

    async def read_at_point(self, run: SnapshotRun) -> None:
        """Read tables at one point."""
        # The discovery holds from that position on: the stream must have reached it.
        await self._barrier.reached(self._table_set.lsn)
        async with self._read_permits:
            if not self._table_set.being_read(run.snapshot_ids):
                return  # dropped, or cancelled
            snapshot = await self.begin_at_point(run.snapshot_ids, self._barrier.position)
            await self._read_begun(run, snapshot)

    async def read_begun(self, run: SnapshotRun, snapshot: Snapshot) -> None:
        """Read tables at the point of a snapshot that has been taken."""
        async with self._read_permits:
            await self._read_begun(run, snapshot)

    async def _read_begun(self, run: SnapshotRun, snapshot: Snapshot) -> None:
        async with _closing(snapshot):
            await self._barrier.reached(snapshot.point)
            await self._read_items(run, self._table_set.being_read(run.snapshot_ids), snapshot)

    async def read_incrementally(self, run: SnapshotRun) -> None:
        """Read tables incrementally, from the start."""
        await self._barrier.reached(self._table_set.lsn)
        tables = self._table_set.being_read(run.snapshot_ids)
        if not tables:
            return
        newly_published = any(self._table_set.is_new(t.id) for t in tables)
        with _writing():
            await self._enter(tables, self._barrier.position)
        # It may wait long for other transactions, and must not occupy a place meanwhile.
        snapshot = await self._warn_if_slow(
            run,
            self._capture.snapshot(tables, incremental=True, newly_published=newly_published),
        )
        async with _closing(snapshot), self._read_permits:
            # Without those cancelled meanwhile.
            tables = self._table_set.being_read(run.snapshot_ids)
            await self._open_windows(run, tables)
            being_read = self._table_set.being_read(run.snapshot_ids)
            self._table_set.record_point(being_read, snapshot.point)
            await self._settle(run, snapshot)
            await self._read_items(run, tables, snapshot)

    async def read_rest(self, run: SnapshotRun) -> None:
        """Read what an earlier run left of one table."""
        await self._barrier.reached(self._table_set.lsn)
        tables = self._table_set.being_read(run.snapshot_ids)
        if not tables:
            return
        table = tables[0]
        remainder = self._table_set.remainder(table.id)
        snapshot = await self._warn_if_slow(
            run, self._capture.snapshot([table], incremental=True, remainder=remainder)
        )
        async with _closing(snapshot), self._read_permits:
            if not self._table_set.being_read(run.snapshot_ids):
                return
            self._table_set.record_point([table], snapshot.point)
            with _writing():
                await self._enter([table], self._barrier.position)
            await self._open_windows(run, [table])
            # Whatever came before the window precedes this position, open transactions included.
            now = (await self._capture.lag()).current_lsn
            await self._wait_until_passed(now, snapshot)
            await self._wait_until_durable(now)
            with _writing():
                unsent = await self._sink.unsent(table, snapshot.point)
                if await self._sink.has_marker(table, snapshot.point):
                    run.marked.add(table.id)
            for rows in unsent:
                run.windows[table.id].add_unsent_rows(table, rows)
            await self._settle(run, snapshot)
            await self._read_items(run, [table], snapshot)

    async def _enter(self, tables: Sequence[Table], at_lsn: Lsn) -> None:
        """Record that tables are being read."""
        await self._appender.record_state(
            self._table_set.latest(tables), TableState.SNAPSHOTTING, at_lsn
        )

    async def read_partial(self, run: SnapshotRun, where: str) -> None:
        """Read rows of one table for which `where` holds; its state does not change."""
        await self._barrier.reached(self._table_set.lsn)
        [(name, snapshot_id)] = run.snapshot_ids.items()
        if not self._table_set.is_read_by(name, snapshot_id):
            return
        table = self._table_set.table(name)
        if name not in await self._capture.choose_incremental([table], initial=False):
            raise TableError(
                name,
                "can't be read in part: it has no key by whose text the server finds rows, or"
                " the source is a standby",
                remedy="run `ingestd snapshot` without --where to read all of it",
            )
        snapshot = await self._warn_if_slow(
            run, self._capture.snapshot([table], incremental=True, where=where)
        )
        async with _closing(snapshot), self._read_permits:
            await self._open_windows(run, [table])
            await self._settle(run, snapshot)
            await self._read_items(run, [table], snapshot)

    def abandon(self, table: TableId) -> None:
        """Stop reading a table."""
        snapshot = self._snapshots.get(table)
        if snapshot is not None:
            snapshot.abandon(table)

    async def record_cancelled(
        self, live: Sequence[Table], others: Sequence[TableId], at_lsn: Lsn
    ) -> None:
        """Record the result of cancelled reads: tables live as before, or stopped."""
        await self._appender.record_state(live, TableState.LIVE, at_lsn)
        events: list[TableEvent] = []
        for name in others:
            error = TableError(
                name,
                "its snapshot was cancelled before the lake had all rows",
                remedy="run `ingestd snapshot` to read it",
            )
            events.append(stopped(self._table_set.stop(name), error, utc_now(), at_lsn))
        await self._appender.record(events)

    # --- waiting -----------------------------------------------------------------------------

    async def _open_windows(self, run: SnapshotRun, tables: Sequence[Table]) -> None:
        floor = await self._capture.current_pg_snapshot()
        for table in tables:
            snapshot_id = run.snapshot_ids[table.id]
            run.windows[table.id] = self._appender.open_window(table, snapshot_id, floor)

    async def _settle(self, run: SnapshotRun, snapshot: Snapshot) -> None:
        """Wait until chunks see all that the stream delivered below the point."""
        await self._wait_until_passed(snapshot.point, snapshot)
        while any(
            self._table_set.is_read_by(n, snapshot_id)
            for n, snapshot_id in run.snapshot_ids.items()
        ):
            seen = await self._capture.current_pg_snapshot()
            if all(t.is_settled(snapshot.point, seen) for t in run.windows.values()):
                return
            for window in run.windows.values():
                window.advance_floor(seen)
            await asyncio.sleep(self._policy.patience_s)

    async def _warn_if_slow(
        self, run: SnapshotRun, beginning: Coroutine[Any, Any, Snapshot]
    ) -> Snapshot:
        """Wait for a snapshot to begin, and warn if that takes long."""
        return await warn_if_slow(
            beginning, lambda: self._telemetry.reading_waits(list(run.snapshot_ids))
        )

    async def _wait_until_passed(self, position: Lsn, snapshot: Snapshot) -> None:
        """Wait until the stream has passed a position; an idle server needs a nudge."""
        reached = asyncio.ensure_future(self._barrier.reached(position))
        try:
            done, _ = await asyncio.wait([reached], timeout=self._policy.patience_s)
            while not done:
                await snapshot.advance_source()
                done, _ = await asyncio.wait([reached], timeout=self._policy.advance_interval_s)
        finally:
            reached.cancel()

    async def _wait_until_durable(self, position: Lsn) -> None:
        """Wait until the lake is durable up to a position."""
        self._appender.request_flush(position)
        while self._durable() < position:  # noqa: ASYNC110 - several places advance it
            await asyncio.sleep(self._policy.patience_s)

    # --- rows --------------------------------------------------------------------------------

    async def _read_items(
        self, run: SnapshotRun, tables: Sequence[Table], snapshot: Snapshot
    ) -> None:
        """Put the tables' rows with their markers into the queue, and the end of each table."""
        snapshot_ids = run.snapshot_ids
        run.tables = {
            t.id: t for t in tables if self._table_set.is_read_by(t.id, snapshot_ids[t.id])
        }
        self._snapshots |= dict.fromkeys(run.snapshot_ids, snapshot)
        for name in run.unended.keys() - run.tables.keys():  # dropped, or cancelled
            snapshot.abandon(name)
            await run.end_table(name)
        for name, table in run.tables.items():
            if not run.is_partial and self._table_set.has_marker_first(name):
                await run.enqueue(_marker(table, run, snapshot))
        moved_at = time.monotonic()
        if not run.tables:
            return
        async with aclosing(snapshot.items()) as items:
            async for item in items:
                if _table_of(item) in run.tables:
                    await self._handle_item(run, snapshot, item)
                if time.monotonic() - moved_at >= self._policy.advance_interval_s:
                    await snapshot.advance_source()
                    moved_at = time.monotonic()
        await snapshot.advance_source()

    async def _handle_item(self, run: SnapshotRun, snapshot: Snapshot, item: SnapshotItem) -> None:
        if isinstance(item, SnapshotPage):
            name = item.batch.table.id
            await self._enqueue_page(run, snapshot, item)
            ratio = snapshot.ratio_read(name)
            self._telemetry.snapshot_progress(name, ratio, nbytes=item.batch.nbytes)
        elif isinstance(item, SplitRead):
            name, snapshot_id = item.table, run.snapshot_ids[item.table]
            snapshot_ids, oldest = run.snapshot_ids.values(), snapshot.oldest()
            await run.enqueue(
                QueuedSplitEnd(
                    name, snapshot_id, item.where, snapshot.remainder, oldest, snapshot_ids
                )
            )
            self._telemetry.snapshot_progress(name, snapshot.ratio_read(name))
            window = run.windows.get(name)
            owed = sys.maxsize
            while window is not None and self._policy.keys_at_once <= window.rows_to_read < owed:
                owed = window.rows_to_read  # if writers are faster, the rest waits for the end
                await self._reread_incomplete(run, snapshot, name)
        elif isinstance(item, TableRead):
            await self._end_table(run, snapshot, item.table)
        else:
            await run.fail(item)

    async def _end_table(self, run: SnapshotRun, snapshot: Snapshot, name: TableId) -> None:
        window = run.windows.get(name)
        if window is not None:
            window.close()
            while window.rows_to_read:
                await self._reread_incomplete(run, snapshot, name)
            if window.is_void:
                raise TableReplacedError(name, "its replica identity changed while it was read")
        owes_marker = not run.is_partial and self._table_set.has_marker_last(name)
        if owes_marker and name not in run.marked:
            await run.enqueue(_marker(run.tables[name], run, snapshot))
        await run.end_table(name)

    async def _reread_incomplete(self, run: SnapshotRun, snapshot: Snapshot, name: TableId) -> None:
        """Read rows that lack unsent values by their keys."""
        window = run.windows[name]
        keys = window.pop_unsent_keys(self._policy.keys_at_once)
        again = set()
        async with aclosing(snapshot.rows_of(run.tables[name], keys)) as pages:
            async for page in pages:
                await self._enqueue_page(run, snapshot, page)
                if page.seen is not None:
                    again |= window.superseded_keys(page.position, page.seen) & keys
        window.requeue_keys(again)

    async def _enqueue_page(self, run: SnapshotRun, snapshot: Snapshot, page: SnapshotPage) -> None:
        if page.seen is not None:
            await self._wait_until_passed(page.position, snapshot)
        if page.batch.rows.num_rows or page.batch.resume is not None:
            snapshot_id = run.snapshot_ids[page.batch.table.id]
            await run.enqueue(
                QueuedPage(page.batch, snapshot.at, snapshot_id, page.position, page.seen)
            )


def _table_of(item: SnapshotItem) -> TableId:
    return item.batch.table.id if isinstance(item, SnapshotPage) else item.table


def _marker(table: Table, run: SnapshotRun, snapshot: Snapshot) -> QueuedPage:
    batch = marker_batch(table, snapshot.point, snapshot.at)
    return QueuedPage(batch, snapshot.at, run.snapshot_ids[table.id])


@asynccontextmanager
async def _closing(snapshot: Snapshot) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await snapshot.close()
