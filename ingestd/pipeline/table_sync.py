"""Keeps the set of tables in sync with the source while the stream continues.

One task, step by step::

    start the snapshots that are due -> wait until tables change or a snapshot is requested
      -> discover -> record removals -> prepare -> record other changes -> (again)

A request triggers a discovery as well, so that a table is read as the catalog has it now. Each
snapshot is a task (`ingestd.pipeline.snapshot_reader`), which appends nothing itself: its pages go
through the pipeline's one queue. A transient fault of a snapshot is retried here; one that needs an
operator stops the tables of the snapshot, not their source (I8). Any other fault ends the
pipeline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from ingestd.model.backoff import Backoff
from ingestd.model.errors import (
    IngestdError,
    OperatorError,
    TableError,
    TransientError,
)
from ingestd.model.lake_state import TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table, TableId
from ingestd.pipeline.appender import EpochAppender
from ingestd.pipeline.policy import SnapshotPolicy
from ingestd.pipeline.retry import ONCE_ATTEMPTS
from ingestd.pipeline.snapshot_queue import QueuedPage, StreamBarrier
from ingestd.pipeline.snapshot_reader import (
    Enqueue,
    LakeFault,
    ReadStrategy,
    SnapshotReader,
    SnapshotRun,
)
from ingestd.pipeline.table_set import TableSet
from ingestd.pipeline.telemetry.source import SourceTelemetry
from ingestd.ports import ChangeCapture, Sink, Snapshot
from ingestd.process.clock import utc_now
from ingestd.process.tasks import cancel_all

MAX_READS = 8
"""Maximum number of started reads: some wait for transactions (`SnapshotPolicy.at_once` read)."""
DROP_INTERVAL_S = 15.0
BURST_PAUSE_S = 0.1
POSTPONED_S = 2.0
"""When it is retried after a table was locked, or dropped meanwhile."""
DRAIN_POLL_S = 0.05
RETRIES = Backoff(1.0, 30.0)

_RETRIED_REASONS = frozenset(
    {
        "deadlock",
        "lock_timeout",
        "no_free_slot",
        "recovery_conflict",
        "snapshot_gone",
        "table_gone",
        "timeout",
    }
)
"""Reasons of transient faults that leave the stream intact."""

SnapshotIds = Mapping[TableId, int]
"""The numbers of tables' reads in the TableSet."""


class TableSync:
    """See the module. `durable` returns the position up to which the lake is durable."""

    def __init__(  # noqa: PLR0917 - all parts of one pipeline
        self,
        capture: ChangeCapture,
        sink: Sink,
        table_set: TableSet,
        appender: EpochAppender,
        telemetry: SourceTelemetry,
        durable: Callable[[], Lsn],
        *,
        reads_existing_rows: bool,
        policy: SnapshotPolicy,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capture = capture
        self._table_set = table_set
        self._appender = appender
        self._telemetry = telemetry
        self._durable = durable
        self._reads_existing_rows = reads_existing_rows
        self._monotonic = monotonic
        self._resnapshot_wanted = appender.resnapshot_wanted
        self.barrier = StreamBarrier()
        self._first: tuple[SnapshotIds, Snapshot] | None = None
        self._partial: list[tuple[TableId, str]] = []
        self._reader = SnapshotReader(
            capture, sink, table_set, appender, telemetry, self.barrier, durable, policy
        )
        self._read_tasks: set[asyncio.Task[None]] = set()
        self._not_before_s = 0.0
        self._is_retrying = False
        self._failures = self._retries = 0
        self._fault: TransientError | None = None
        self._discoveries_begun = self._discovered = 0

    def request(self, tables: Sequence[TableId], where: str | None = None) -> None:
        """Re-read tables, or with `where` add the rows for which it holds to the existing ones.

        Raises OperatorError for a table that is not captured, or if nothing is ever read.
        """
        if not self._reads_existing_rows:
            raise OperatorError(
                'snapshot = "never": tables are not read',
                remedy='set snapshot = "initial", send SIGHUP to the daemon, and retry',
            )
        if where is None:
            self._table_set.request(tables, self._capture.retry(tables))
        else:
            self._table_set.request_partial(tables)
            self._partial += [(table, where) for table in tables]
        self._resnapshot_wanted.set()

    @property
    def is_loading(self) -> bool:
        """True if rows of a table must be read, or are not durable yet."""
        return self._table_set.is_loading or self._table_set.has_partial or bool(self._partial)

    async def drain(self) -> None:
        """Return once all that the source had committed before the call is durable.

        Tables that were created or altered by then are complete as well. Raise the TransientError
        that was retried ONCE_ATTEMPTS times in a row without success, also of a table that is
        altered each time it is read: its owner must not keep the run from ending.
        """
        await self._until(lambda: not self.is_loading)
        position = await self._capture.end_position()
        self._appender.request_flush(position)
        await self._until(lambda: self._durable() >= position)
        begun = self._discoveries_begun  # one that is running may have begun too early
        self._resnapshot_wanted.set()
        await self._until(lambda: self._discovered > begun)
        await self._until(lambda: not self.is_loading)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._fault is not None and max(self._failures, self._retries) >= ONCE_ATTEMPTS:
                raise self._fault
            altered = self._table_set.often_altered(ONCE_ATTEMPTS)
            if altered is not None:
                raise TransientError(
                    f"source {self._telemetry.source}: table {altered} was altered each time that"
                    " it was read",
                    reason="table_altered",
                    remedy="run it again when no session alters or truncates the table",
                )
            await asyncio.sleep(DRAIN_POLL_S)

    def cancel(self, tables: Sequence[TableId]) -> Coroutine[Any, Any, None]:
        """Cancel reads; return the coroutine that records it. Raises OperatorError without any."""
        asked = {table for table, _ in self._partial}
        self._partial = [(table, where) for table, where in self._partial if table not in tables]
        live, others = self._table_set.cancel([t for t in tables if t not in asked])
        for table in tables:
            self._reader.abandon(table)
        return self._reader.record_cancelled(live, others, self._reached())

    async def begin_first_snapshot(self) -> SnapshotIds:
        """Take the snapshot of the tables to read before the stream begins; return their numbers.

        Without the tables that are read incrementally: those need the stream.
        """
        tables = self._table_set.to_read()
        large = await self._capture.choose_incremental(tables, initial=True)
        snapshot_ids = self._table_set.begin_snapshot([t for t in tables if t.id not in large])
        if snapshot_ids:
            try:
                snapshot = await self._reader.begin_at_point(snapshot_ids, self._reached())
            except LakeFault as fault:
                raise fault.error from fault
            self._first = snapshot_ids, snapshot
        return snapshot_ids

    async def capture_without_reading(self) -> None:
        """Capture unknown tables without reading them (snapshot = "never")."""
        unknown = self._table_set.unknown()
        snapshot_ids = self._table_set.begin_snapshot(unknown)
        await self._appender.record_state(unknown, TableState.LIVE, self._durable())
        self._table_set.end_snapshots(snapshot_ids.values())

    async def run(self, enqueue: Enqueue) -> None:
        """Run indefinitely."""
        dropping = asyncio.create_task(self._drop_visible_xids())
        try:
            while True:
                if self._table_set.has_postponed:
                    asyncio.get_running_loop().call_later(POSTPONED_S, self._resnapshot_wanted.set)
                if self._reads_existing_rows:
                    await self._start_reading(enqueue)
                else:
                    for name, snapshot_id in self._table_set.begin_snapshot(
                        self._table_set.to_read()
                    ).items():
                        await enqueue(QueuedPage(self._missed(name), utc_now(), snapshot_id))
                await self._until_tables_change()
                await asyncio.sleep(BURST_PAUSE_S)  # catalog changes often come in bursts
                await self._discover()
                if not self._reads_existing_rows:
                    await self.capture_without_reading()
        finally:
            await cancel_all(*self._read_tasks, dropping)

    def _missed(self, name: TableId) -> TableError:
        """Return why a table stops instead of being read; the recorded reason if it had stopped."""
        known, cause = self._table_set.known.get(name), self._table_set.cause(name)
        why = "" if cause is None else f" ({cause})"
        reason = f'changes may have been missed{why}, and snapshot = "never"'
        is_this = known is not None and known.oid == self._table_set.table(name).oid
        if cause is None and known is not None and is_this and known.state is TableState.STOPPED:
            reason = known.reason or reason
        return TableError(name, reason, remedy='set snapshot = "initial" to have it re-read')

    async def _discover(self) -> None:
        """Discover, and prepare the stream for the result.

        Repeated later if a table is dropped meanwhile, or locked for long.
        """
        self._discoveries_begun += 1
        try:
            discovery = await self._capture.discover(self._table_set.known)
        except TransientError as error:
            self._retry_later(error)
            return
        self._table_set.update(discovery)
        self._telemetry.offered(discovery)
        await self._appender.record(self._table_set.removal_events(utc_now(), self._reached()))
        try:
            self._table_set.apply_prepared(await self._capture.prepare(discovery.tables))
        except TransientError as error:
            self._retry_later(error)
            self._table_set.postpone([table.id for table in self._table_set.to_read()])
            return
        self._is_retrying = False
        await self._appender.record(
            self._table_set.discovery_events(utc_now(), self.barrier.position)
        )
        self._discovered = self._discoveries_begun
        self._retries = self._retries + 1 if self._table_set.has_postponed else 0
        if self._table_set.has_postponed:
            what = f"source {self._telemetry.source}: other sessions have tables locked"
            remedy = "find them: SELECT * FROM pg_catalog.pg_locks WHERE locktype = 'relation';"
            self._fault = TransientError(what, reason="lock_timeout", remedy=remedy)

    def _retry_later(self, error: TransientError) -> None:
        """Schedule a retry if the fault is transient; raise it otherwise."""
        if error.reason not in _RETRIED_REASONS:
            raise error
        if not self._is_retrying:
            self._telemetry.reading_failed(error, POSTPONED_S)
        self._is_retrying = True
        self._retries, self._fault = self._retries + 1, error
        asyncio.get_running_loop().call_later(POSTPONED_S, self._resnapshot_wanted.set)

    # --- reading ------------------------------------------------------------------------------

    async def _start_reading(self, enqueue: Enqueue) -> None:
        """Start the reads that are due, alongside running ones."""
        first, self._first = self._first, None
        if first is not None:
            snapshot_ids, snapshot = first
            run = SnapshotRun(enqueue, snapshot_ids)
            self._begin(self._guarded(run, self._reader.read_begun(run, snapshot)))
        if self._monotonic() < self._not_before_s:
            return
        try:
            while len(self._read_tasks) < MAX_READS and self._partial:
                table, where = self._partial.pop(0)
                snapshot_ids = {table: self._table_set.begin_partial(table)}
                run = SnapshotRun(enqueue, snapshot_ids, is_partial=True)
                work = self._reader.read_partial(run, where)
                self._begin(self._guarded_partial(run, work))
            while len(self._read_tasks) < MAX_READS and self._table_set.to_read():
                tables, strategy = await self._next_group()
                wanted = {table.id for table in self._table_set.to_read()}
                tables = [t for t in tables if t.id in wanted]  # without those cancelled meanwhile
                if not tables:
                    continue
                for table_ in tables:  # it may be requested while it is being read
                    self._reader.abandon(table_.id)
                run = SnapshotRun(enqueue, self._table_set.begin_snapshot(tables))
                self._begin(self._guarded(run, strategy(run)))
        except TransientError as error:
            self._back_off_or_raise(error)

    async def _next_group(self) -> tuple[list[Table], ReadStrategy]:
        """Return tables to read together, and how: unfinished ones first, one by one."""
        tables = self._table_set.to_read()
        begun = next((t for t in tables if self._table_set.remainder(t.id)), None)
        if begun is not None:
            return [begun], self._reader.read_rest
        able = await self._capture.choose_incremental(tables, initial=False)
        incremental = [t for t in tables if t.id in able]
        if incremental:  # a few are read separately: one may have to wait
            few = len(incremental) <= MAX_READS // 2
            return incremental[:1] if few else incremental, self._reader.read_incrementally
        return tables, self._reader.read_at_point

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._read_tasks.add(asyncio.create_task(work))

    async def _guarded(self, run: SnapshotRun, work: Coroutine[Any, Any, None]) -> None:
        """Run a read. Retry transient faults; stop its tables if an operator is needed."""
        try:
            await work
        except TransientError as error:
            self._table_set.fail_snapshots(run.unended)
            self._back_off_or_raise(error)
        except TableError as error:
            await run.fail(error)
            self._table_set.fail_snapshots(run.unended)
        except OperatorError as error:
            for name in run.unended:
                await run.fail(TableError(name, error.what, remedy=error.remedy))
        else:
            self._failures = 0
        for name in run.unended:
            await run.end_table(name)

    async def _guarded_partial(self, run: SnapshotRun, work: Coroutine[Any, Any, None]) -> None:
        """Run a partial read. Its faults are reported; the tables continue."""
        try:
            await work
        except TransientError as error:
            if error.reason not in _RETRIED_REASONS:
                raise
            failed: IngestdError = error
        except OperatorError as error:
            failed = error
        else:
            for name in run.unended:  # dropped, or cancelled
                await run.end_table(name)
            return
        what = failed.reason if isinstance(failed, TableError) else failed.what
        for name in run.unended:
            await run.fail(TableError(name, what, remedy=failed.remedy or "request it again"))

    def _back_off_or_raise(self, error: TransientError) -> None:
        if error.reason not in _RETRIED_REASONS:
            raise error
        self._failures, self._fault = self._failures + 1, error
        delay_s = RETRIES.after(self._failures)
        self._telemetry.reading_failed(error, delay_s)
        self._not_before_s = self._monotonic() + delay_s
        asyncio.get_running_loop().call_later(delay_s, self._resnapshot_wanted.set)

    def _reached(self) -> Lsn:
        return max(self._durable(), self.barrier.position)

    async def _drop_visible_xids(self) -> None:
        """Periodically drop the transactions that every session sees."""
        while True:
            await asyncio.sleep(DROP_INTERVAL_S)
            if self._appender.unseen_xids.count:
                with contextlib.suppress(TransientError):  # `health` reports lasting faults
                    self._appender.unseen_xids.drop_visible(
                        await self._capture.current_pg_snapshot()
                    )

    # --- waiting ------------------------------------------------------------------------------

    async def _until_tables_change(self) -> None:
        """Return when the catalog may have changed, or a snapshot is requested.

        Raises the error that ended a read.
        """
        waits = [self._capture.tables_changed(), self._resnapshot_wanted.wait()]
        tasks: list[asyncio.Task[object]] = [asyncio.ensure_future(w) for w in waits]
        try:
            while not any(task.done() for task in tasks):
                await asyncio.wait([*tasks, *self._read_tasks], return_when=asyncio.FIRST_COMPLETED)
                if self._remove_ended_reads() and (self._table_set.to_read() or self._partial):
                    break  # another read can start
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await cancel_all(*tasks)
        self._resnapshot_wanted.clear()

    def _remove_ended_reads(self) -> bool:
        """Remove reads that have ended; return whether there were any. Raises the error of one."""
        ended = {task for task in self._read_tasks if task.done()}
        self._read_tasks -= ended
        for task in ended:
            try:
                task.result()
            except LakeFault as fault:
                raise fault.error from fault
        return bool(ended)
