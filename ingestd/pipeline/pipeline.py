"""A source's pipeline: from its capture to its sink, one attempt.

States and transitions::

    starting ----> streaming ----> closed (stop)
                       any fault: raised to `SourceRunner`, which retries with a new one

An epoch that is being committed is finished first, unless that takes too long: if the slot is lost
with the failure (a failover), nothing resends what some tables lack of it. The epoch is not
confirmed: a new connection may reach another server, which may not have all of it.

Two tasks put work into one bounded queue: `_feed` the stream's change sets, the `TableSync` the
rows of tables that must be read. Only the loop in `_stream` takes from it, appends to the open
epoch and closes it.

The capture delivers positions (ChangeSet.position), the sink makes them durable (commit, advance).
Only `_confirm` here, called with a position that has just become durable, confirms it to the
capture (I1).

A table that needs a snapshot (new, re-created, rewritten, a gap, requested) is read while the
stream continues (I6), at one point or incrementally: see `ingestd.pipeline.snapshot_reader`. It is
`live` once the epoch with its last rows is durable. After a kill the rest is read incrementally; a
table without a key starts over, at a higher point, whose `t` voids the earlier rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from ingestd.model.changes import ChangeSet
from ingestd.model.errors import (
    IngestdError,
    LakeLostError,
    OperatorError,
    TableError,
    TransientError,
)
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.schema import TableId
from ingestd.observe.status import SourceState
from ingestd.pipeline.appender import EpochAppender
from ingestd.pipeline.filling_epoch import FillingEpoch
from ingestd.pipeline.known_lake import KnownLake, LakeRoot, lake_lost
from ingestd.pipeline.policy import PipelinePolicy
from ingestd.pipeline.snapshot_queue import SnapshotWork, StreamBarrier
from ingestd.pipeline.startup import Judgement, Started, Startup
from ingestd.pipeline.table_set import TableSet
from ingestd.pipeline.table_sync import TableSync
from ingestd.pipeline.telemetry.source import SourceTelemetry
from ingestd.ports import ChangeCapture, Sink
from ingestd.process.tasks import cancel_all

LEAST_IDLE_S = 0.1
CLAIM_WITHIN_S = 1.0
"""How long a fault waits to learn whether the claim is lost, which would explain it."""
QUEUE_SIZE = 2
"""Change sets and pages that wait to be appended."""

PipelineWork = ChangeSet | SnapshotWork
OnDrained = Callable[[], Awaitable[None]]


T = TypeVar("T")


class Pipeline:
    """Runs one source until it is stopped or fails. Used once."""

    def __init__(
        self,
        capture: ChangeCapture,
        sink: Sink,
        policy: PipelinePolicy,
        telemetry: SourceTelemetry,
        *,
        known: KnownLake | None = None,
        root: LakeRoot | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._known = known or KnownLake()
        self._root = root or LakeRoot()
        self._capture = capture
        self._sink = sink
        self._policy = policy
        self._telemetry = telemetry
        self._monotonic = monotonic
        self._durable = ZERO
        self._idle_until = 0.0
        self._idle_s = policy.idle_interval_s
        self._is_streaming = False
        self._may_confirm = True
        self._table_sync: TableSync | None = None
        self._barrier = StreamBarrier()
        self._epoch: FillingEpoch | None = None
        self._committing: FillingEpoch | None = None
        self._commit: asyncio.Task[None] | None = None
        self._stopped: list[TableError] = []
        self._background: list[asyncio.Task[None]] = []

    async def run(self, stop: asyncio.Event, drained: OnDrained | None = None) -> None:
        """Run until `stop` is set. Raise the fault that ended it otherwise; leave nothing running.

        `drained`: awaited once the lake has all that the source has committed by then.

        A stop finishes the open epoch if it can be closed, within `finish_limit_s`; a start or a
        snapshot is abandoned at once. A fault drops the open epoch, and waits as long for the one
        that is being committed.
        """
        async with AsyncExitStack() as cleaning:
            # In reverse order: the claim is released once no thread writes to the lake any more.
            cleaning.push_async_callback(self._capture.close)
            cleaning.push_async_callback(self._sink.close)
            cleaning.push_async_callback(self._abandon)
            stopping = asyncio.create_task(_until(stop))
            cleaning.push_async_callback(cancel_all, stopping)
            work = asyncio.create_task(self._run_claimed(stop, drained))
            cleaning.push_async_callback(cancel_all, work)
            await asyncio.wait([stopping, work], return_when=asyncio.FIRST_COMPLETED)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._policy.finish_limit_s):
                    await self._finish(work, stop)
            self._root.fail(self._telemetry.source)
            if work.done():
                await self._refuse_vanished(work)
                work.result()

    async def _finish(self, work: asyncio.Task[None], stop: asyncio.Event) -> None:
        """Wait for the work that a stop or a fault must finish."""
        if stop.is_set() and self._is_streaming:
            await asyncio.wait([work])
        if work.done() and self._commit is not None:
            # Don't confirm: after a failover this connection may reach another server. The next
            # start meets any fault of this commit as well.
            self._may_confirm = False
            self._table_sync = None
            await cancel_all(*self._background)
            await asyncio.wait([self._commit])

    async def _abandon(self) -> None:
        """Cancel all tasks, and drop the open epoch."""
        await cancel_all(*self._background, self._commit)
        if self._epoch is not None:
            try:
                await self._epoch.writer.abort()
            except IngestdError as error:
                self._telemetry.not_removed(error)

    def request_snapshot(self, tables: Sequence[TableId], where: str | None = None) -> None:
        """Re-read these tables, or only the rows for which the condition `where` holds.

        The stream continues meanwhile. Raises OperatorError for a table that is not captured,
        TransientError before the start.
        """
        self._started().request(tables, where)

    def cancel_snapshot(self, tables: Sequence[TableId]) -> None:
        """Cancel the snapshots of these tables, requested or running.

        Raises OperatorError for a table that has none, TransientError before the start.
        """
        self._start(self._started().cancel(tables))

    def _started(self) -> TableSync:
        if self._table_sync is None:
            raise TransientError(
                f"source {self._telemetry.source}: is starting",
                reason="starting",
                remedy="retry in a moment",
            )
        return self._table_sync

    async def _run_claimed(self, stop: asyncio.Event, drained: OnDrained | None) -> None:
        self._telemetry.enter(SourceState.STARTING)
        await self._capture.claim()
        holding = asyncio.create_task(self._capture.hold())
        working = asyncio.create_task(self._run_started(stop, drained))
        try:
            await asyncio.wait([holding, working], return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                if not isinstance(working.exception(), TransientError):
                    return working.result()
                await self._ask_for_claim(holding)
            if holding.done():  # its error explains the one that ended the work
                holding.result()
            await working
        finally:
            await cancel_all(working, holding)

    async def _ask_for_claim(self, holding: asyncio.Task[None]) -> None:
        """Make `holding` end soon if the claim is lost."""
        asking = asyncio.create_task(self._capture.health())
        await asyncio.wait(
            [holding, asking], timeout=CLAIM_WITHIN_S, return_when=asyncio.FIRST_COMPLETED
        )
        await cancel_all(asking)

    async def _run_started(self, stop: asyncio.Event, drained: OnDrained | None) -> None:
        """Do what only the holder of the claim may."""
        startup = Startup(
            self._capture,
            self._sink,
            self._policy,
            self._telemetry,
            known=self._known,
            root=self._root,
            monotonic=self._monotonic,
        )
        started = await startup.run()
        self._durable = started.durable
        self._start(self._monitor())
        epoch = self._epoch = self._first_epoch(started.judgement)
        table_sync = await self._begin_reading(started, epoch)
        self._table_sync = table_sync
        work: asyncio.Queue[PipelineWork] = asyncio.Queue(QUEUE_SIZE)
        self._start(self._feed(work, started.judgement.committed.position))
        self._start(table_sync.run(work.put))
        self._barrier = table_sync.barrier
        if drained is not None:
            self._start(_drain(table_sync, drained))
        await self._stream(epoch, work, started.table_set, started.appender, stop)

    def _first_epoch(self, judgement: Judgement) -> FillingEpoch:
        committed, start = judgement.committed, judgement.position
        epoch = FillingEpoch(self._sink.begin_epoch(), start, floor=committed.floor or ZERO)
        for rows in committed.unlisted.values():
            epoch.add_unlisted(rows)
        return epoch

    async def _begin_reading(self, started: Started, epoch: FillingEpoch) -> TableSync:
        """Take the snapshot with which a first start begins; the epoch waits for its rows."""
        table_set = started.table_set
        table_sync = TableSync(
            self._capture,
            self._sink,
            table_set,
            started.appender,
            self._telemetry,
            lambda: self._durable,
            reads_existing_rows=self._policy.reads_existing_rows,
            policy=self._policy.snapshots,
        )
        if not self._policy.reads_existing_rows:
            await table_sync.capture_without_reading()
        elif table_set.to_read():
            self._telemetry.enter(SourceState.SNAPSHOTTING)
            table_set.mark_newly_published()
            if started.may_begin_at_point:  # the new slot's own
                # The first cut that a reader sees has all tables, unless they are too large.
                snapshot_ids = await self._beside_background(table_sync.begin_first_snapshot())
                epoch.awaits = set(snapshot_ids.values())
                epoch.patience_bytes = self._policy.epoch.max_bytes
        return table_sync

    async def _refuse_vanished(self, work: asyncio.Task[None]) -> None:
        """Raise LakeLostError if the lake is missing, whatever fault that caused."""
        error = None if work.cancelled() else work.exception()
        if self._known.found.is_set() and isinstance(error, OperatorError):
            try:
                await self._sink.ensure_exists()
            except LakeLostError as lost:
                self._known.mark_lost()
                self._root.report(self._telemetry.source, lost.what)
                raise lake_lost(self._telemetry.source, lost.what) from error
            except IngestdError:
                return

    async def _beside_background(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work, but raise at once the error of a background task that ends."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait([task, *self._background], return_when=asyncio.FIRST_COMPLETED)
            for background in self._background:
                if background.done():
                    background.result()
            return await task
        finally:
            await cancel_all(task)

    # --- streaming ---------------------------------------------------------------------------

    async def _stream(
        self,
        epoch: FillingEpoch,
        work: asyncio.Queue[PipelineWork],
        table_set: TableSet,
        appender: EpochAppender,
        stop: asyncio.Event,
    ) -> None:
        self._start(_until(stop))
        self._idle_until = self._monotonic()
        self._is_streaming = True
        getter = asyncio.create_task(work.get())
        flushing = asyncio.create_task(appender.flush_requested.wait())
        try:
            while not stop.is_set():
                await self._wait(epoch, getter, flushing)
                if flushing.done():  # a wake-up: `_close_if_due` decides
                    appender.flush_requested.clear()
                    flushing = asyncio.create_task(appender.flush_requested.wait())
                if getter.done():
                    await self._discard_stopped(epoch)
                    await appender.append_work(epoch, getter.result())
                    getter = asyncio.create_task(work.get())
                    self._barrier.advance(epoch.position)
                if not table_set.is_loading:
                    self._telemetry.enter(SourceState.STREAMING)
                epoch = self._epoch = await self._close_if_due(epoch, appender)
        finally:
            await cancel_all(getter, flushing)
        await self._finish_open_epoch(epoch, appender)

    async def _feed(self, work: asyncio.Queue[PipelineWork], after: Lsn | None) -> None:
        async with contextlib.aclosing(self._capture.changes(after)) as live:
            async for change_set in live:
                await work.put(change_set)

    async def _wait(self, epoch: FillingEpoch, *wakers: asyncio.Task[Any]) -> None:
        """Return when one of `wakers` has ended, an epoch may be due, or a commit has ended.

        Raise the error of a background task that ended.
        """
        tasks = [*wakers, *self._background]
        if self._commit is None:
            timeout = self._patience_s(epoch)
        else:
            timeout = None
            tasks.append(self._commit)
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in self._background:
            if task.done():
                task.result()
        self._background = [task for task in self._background if not task.done()]
        if self._commit is not None and self._commit.done():
            commit, self._commit = self._commit, None
            commit.result()
            await self._discard_stopped(epoch)

    def _patience_s(self, epoch: FillingEpoch) -> float | None:
        """Return how long to wait for work; None: indefinitely."""
        now = self._monotonic()
        if epoch.is_idle:
            return max(0.0, self._idle_until - now) if epoch.position > self._durable else None
        return epoch.wait_s(now, self._policy.epoch)

    async def _close_if_due(self, epoch: FillingEpoch, appender: EpochAppender) -> FillingEpoch:
        """Commit the epoch in the background if it is due; return the epoch to fill."""
        if self._commit is not None:
            return epoch
        now = self._monotonic()
        asked = self._capture.commit_requested() or appender.flush_requested_lsn > self._durable
        if epoch.is_due(now, self._policy.epoch, asked=asked):
            self._commit = asyncio.create_task(self._commit_epoch(epoch, appender))
            first_s = max(self._policy.epoch.max_delay_s, LEAST_IDLE_S)
            self._idle_s = min(first_s, self._policy.idle_interval_s)
            self._idle_until = now + self._idle_s
            await asyncio.sleep(0)  # the writer closes in its first step; then the next may begin
            return FillingEpoch(
                self._sink.begin_epoch(), start=epoch.position, position=epoch.position
            )
        if not epoch.is_idle:
            return epoch
        if epoch.ends_reads:  # all rows of whatever ended are in earlier epochs
            await self._advance(epoch.position)
            await appender.mark_durable(epoch)
        elif epoch.position > self._durable and (asked or now >= self._idle_until):
            await self._advance(epoch.position)
            self._idle_s = min(2 * self._idle_s, self._policy.idle_interval_s)
            self._idle_until = now + self._idle_s
        return epoch

    async def _advance(self, position: Lsn) -> None:
        """Record, durably, that nothing captured precedes a position, and confirm it."""
        if position > self._durable:
            await self._sink.advance(position)
            await self._confirm(position)

    async def _commit_epoch(self, epoch: FillingEpoch, appender: EpochAppender) -> None:
        started = self._monotonic()
        self._committing = epoch

        async def stop(errors: Sequence[TableError]) -> None:
            self._stopped += errors  # before they are recorded, and can be requested again
            await appender.stop_damaged(errors, epoch.position)

        committed = await epoch.writer.commit(epoch.summary(), stop)
        self._committing = None
        self._telemetry.committed(committed, epoch, self._monotonic() - started)
        await appender.mark_durable(epoch)
        await self._confirm(epoch.position)

    async def _discard_stopped(self, epoch: FillingEpoch) -> None:
        """Drop rows of tables that the previous epoch's commit stopped meanwhile.

        Before any other work is taken: it may belong to the next read of such a table.
        """
        errors, self._stopped = self._stopped, []
        for error in errors:
            await epoch.discard(error.table)

    async def _confirm(self, position: Lsn) -> None:
        """Confirm a position that has just become durable (I1)."""
        self._durable = position
        self._known.note_position(position)
        if not self._may_confirm:
            return
        await self._capture.confirm(position)
        self._telemetry.confirmed(position)

    async def _finish_open_epoch(self, epoch: FillingEpoch, appender: EpochAppender) -> None:
        """Finish what can be: the epoch being committed, then the open one."""
        commit, self._commit = self._commit, None
        if commit is not None:
            await commit
            await self._discard_stopped(epoch)
        if epoch.can_close and epoch.has_rows:
            await self._commit_epoch(epoch, appender)

    # --- signals -----------------------------------------------------------------------------

    async def _monitor(self) -> None:
        checked_at = -math.inf
        while True:
            if self._monotonic() - checked_at >= self._sink.check_interval_s:
                checked_at = self._monotonic()
                with contextlib.suppress(TransientError):  # a commit reports it as well
                    await self._sink.ensure_exists()
            await self._capture.health()
            try:
                lag = await self._capture.lag()
            except TransientError as error:
                self._telemetry.not_measured(error)
            else:
                epochs = [e for e in (self._committing, self._epoch) if e is not None]
                oldest = [e.oldest_us for e in epochs if e.oldest_us is not None]
                self._telemetry.measured(lag, min(oldest, default=None))
            await asyncio.sleep(self._policy.monitor_interval_s)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._background.append(asyncio.create_task(work))


async def _drain(table_sync: TableSync, drained: OnDrained) -> None:
    await table_sync.drain()
    await drained()


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()
