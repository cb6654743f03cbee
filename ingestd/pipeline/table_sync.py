"""Keeps up with what tables there are, while the stream goes on.

One task, one step after another::

    start to read what must be read -> wait until tables change, or a snapshot is asked for
      -> discover -> record departures -> prepare -> record other changes -> (again)

and a task for each reading (`ingestd.pipeline.snapshot_reader`), which appends nothing itself: its
pages go through the pipeline's one queue. A fault of reading that passes by itself is tried again
here; one that needs a person stops the tables that were to be read, not their source (I8). Any
other fault ends the pipeline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
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
from ingestd.pipeline.snapshot_queue import Page, StreamBarrier
from ingestd.pipeline.snapshot_reader import Give, LakeFault, SnapshotReader, SnapshotRun, Way
from ingestd.pipeline.table_set import TableSet
from ingestd.pipeline.telemetry.source import SourceTelemetry
from ingestd.ports import ChangeCapture, Sink, Snapshot

READINGS = 8
"""How many are begun at most: some wait for others' transactions (`reading.AT_ONCE` read)."""
FORGET_INTERVAL_S = 15.0
LOOK_INTERVAL_S = 0.1
POSTPONED_S = 2.0
"""When it is tried again where a table was locked, or had gone."""
RETRIES = Backoff(1.0, 30.0)

_PASSING = frozenset(
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
"""Reasons of transient faults that leave the stream unharmed."""

Loads = Mapping[TableId, int]
"""The numbers of tables' readings in the TableSet."""


class TableSync:
    """See above. `durable` gives the position up to which the lake is durable."""

    def __init__(  # noqa: PLR0917 - all parts of one pipeline
        self,
        capture: ChangeCapture,
        sink: Sink,
        book: TableSet,
        intake: EpochAppender,
        watch: SourceTelemetry,
        durable: Callable[[], Lsn],
        *,
        reads: bool,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capture = capture
        self._book = book
        self._intake = intake
        self._watch = watch
        self._durable = durable
        self._reads = reads
        self._monotonic = monotonic
        self._requested = intake.wanted
        self.gate = StreamBarrier()
        self._first: tuple[Loads, Snapshot] | None = None
        self._partial: list[tuple[TableId, str]] = []
        self._reader = SnapshotReader(capture, sink, book, intake, watch, self.gate, durable)
        self._readings: set[asyncio.Task[None]] = set()
        self._not_before_s = 0.0
        self._is_held_up = False
        self._failures = 0

    def request(self, tables: Sequence[TableId], where: str | None = None) -> None:
        """Have tables re-read; with `where` the rows for which it holds, added to what is there.

        Raises OperatorError for one that is not captured, or where nothing is ever read.
        """
        if not self._reads:
            raise OperatorError(
                'snapshot = "never": tables are not read',
                remedy='set snapshot = "initial", send SIGHUP to the daemon, and ask again',
            )
        if where is None:
            self._book.request(tables)
        else:
            self._book.request_partial(tables)
            self._partial += [(table, where) for table in tables]
        self._requested.set()

    def cancel(self, tables: Sequence[TableId]) -> Coroutine[Any, Any, None]:
        """Return up readings; what is returned records it. Raises OperatorError: none to cancel."""
        asked = {table for table, _ in self._partial}
        self._partial = [(table, where) for table, where in self._partial if table not in tables]
        whole, others = self._book.cancel([t for t in tables if t not in asked])
        for table in tables:
            self._reader.abandon(table)
        return self._reader.record_cancelled(whole, others, self._reached())

    async def begin_first_load(self) -> Loads:
        """Take the snapshot of what must be read before the stream begins; gives its numbers.

        Of what is not read in chunks: those need the stream.
        """
        tables = self._book.to_read()
        large = await self._capture.chunked(tables, initial=True)
        loads = self._book.begin([t for t in tables if t.id not in large])
        if loads:
            try:
                snapshot = await self._reader.begin_at_point(loads, self._reached())
            except LakeFault as fault:
                raise fault.error from fault
            self._first = loads, snapshot
        return loads

    async def take_unread(self) -> None:
        """Take tables that nothing is known of as they come (snapshot = "never")."""
        unknown = self._book.unknown()
        loads = self._book.begin(unknown)
        await self._intake.enter(unknown, TableState.LIVE, self._durable())
        self._book.loaded(loads.values())

    async def run(self, give: Give) -> None:
        """Follow, indefinitely."""
        forgetting = asyncio.create_task(self._forget())
        try:
            while True:
                if self._book.has_postponed:
                    asyncio.get_running_loop().call_later(POSTPONED_S, self._requested.set)
                if self._reads:
                    await self._start_reading(give)
                else:
                    for name, load in self._book.begin(self._book.to_read()).items():
                        await give(Page(self._missed(name), _now(), load))
                await self._until_tables_change()
                await asyncio.sleep(LOOK_INTERVAL_S)  # what changes now may change again at once
                await self._look()
                if not self._reads:
                    await self.take_unread()
        finally:
            await _cancel([*self._readings, forgetting])

    def _missed(self, name: TableId) -> TableError:
        """Say why a table stops that would be read if it might; as when it did, if it had."""
        known, cause = self._book.known.get(name), self._book.cause(name)
        why = "" if cause is None else f" ({cause})"
        reason = f'changes may have been missed{why}, and snapshot = "never"'
        is_this = known is not None and known.oid == self._book.table(name).oid
        if cause is None and known is not None and is_this and known.state is TableState.STOPPED:
            reason = known.reason or reason
        return TableError(name, reason, remedy='set snapshot = "initial" to have it read anew')

    async def _look(self) -> None:
        """Discover, and have the stream bring what was found.

        It is done again later if a table goes meanwhile, or is locked for long.
        """
        try:
            discovery = await self._capture.discover(self._book.known)
        except TransientError as error:
            self._hold_up(error)
            return
        self._book.update(discovery)
        self._watch.offered(discovery)
        await self._intake.record(self._book.departures(_now(), self._reached()))
        try:
            self._book.prepared(await self._capture.prepare(discovery.tables))
        except TransientError as error:
            self._hold_up(error)
            self._book.postpone([table.id for table in self._book.to_read()])
            return
        self._is_held_up = False
        await self._intake.record(self._book.changed(_now(), self.gate.position))

    def _hold_up(self, error: TransientError) -> None:
        """Look again soon if the fault passes; raise it otherwise."""
        if error.reason not in _PASSING:
            raise error
        if not self._is_held_up:
            self._watch.reading_failed(error, POSTPONED_S)
        self._is_held_up = True
        asyncio.get_running_loop().call_later(POSTPONED_S, self._requested.set)

    # --- reading ------------------------------------------------------------------------------

    async def _start_reading(self, give: Give) -> None:
        """Read what must be read, beside what is being read already."""
        first, self._first = self._first, None
        if first is not None:
            loads, snapshot = first
            reading = SnapshotRun(give, loads)
            self._begin(self._guarded(reading, self._reader.read_begun(reading, snapshot)))
        if self._monotonic() < self._not_before_s:
            return
        try:
            while len(self._readings) < READINGS and self._partial:
                table, where = self._partial.pop(0)
                loads = {table: self._book.begin_partial(table)}
                reading = SnapshotRun(give, loads, is_partial=True)
                work = self._reader.read_partial(reading, where)
                self._begin(self._guarded_partial(reading, work))
            while len(self._readings) < READINGS and self._book.to_read():
                tables, way = await self._next_group()
                wanted = {table.id for table in self._book.to_read()}
                tables = [t for t in tables if t.id in wanted]  # or cancelled meanwhile
                if not tables:
                    continue
                for table_ in tables:  # it may be asked for while it is read
                    self._reader.abandon(table_.id)
                reading = SnapshotRun(give, self._book.begin(tables))
                self._begin(self._guarded(reading, way(reading)))
        except TransientError as error:
            self._pass_or_raise(error)

    async def _next_group(self) -> tuple[list[Table], Way]:
        """Return tables to be read together, and how: what was begun goes on first, one by one."""
        tables = self._book.to_read()
        begun = next((t for t in tables if self._book.left(t.id)), None)
        if begun is not None:
            return [begun], self._reader.read_rest
        able = await self._capture.chunked(tables, initial=False)
        chunked = [t for t in tables if t.id in able]
        if chunked:  # a few by themselves: one may have to wait
            few = len(chunked) <= READINGS // 2
            return chunked[:1] if few else chunked, self._reader.read_in_chunks
        return tables, self._reader.read_at_point

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._readings.add(asyncio.create_task(work))

    async def _guarded(self, reading: SnapshotRun, work: Coroutine[Any, Any, None]) -> None:
        """Read; what passes by itself is tried again, what needs a person stops the tables."""
        try:
            await work
        except TransientError as error:
            self._book.give_up(reading.unended)
            self._pass_or_raise(error)
        except TableError as error:
            await reading.fail(error)
            self._book.give_up(reading.unended)
        except OperatorError as error:
            for name in reading.unended:
                await reading.fail(TableError(name, error.what, remedy=error.remedy))
        else:
            self._failures = 0
        for name in reading.unended:
            await reading.end(name)

    async def _guarded_partial(self, reading: SnapshotRun, work: Coroutine[Any, Any, None]) -> None:
        """Read some rows; whatever is in the way, the tables go on and who asked is told."""
        try:
            await work
        except TransientError as error:
            if error.reason not in _PASSING:
                raise
            failed: IngestdError = error
        except OperatorError as error:
            failed = error
        else:
            for name in reading.unended:  # gone, or given up
                await reading.end(name)
            return
        what = failed.reason if isinstance(failed, TableError) else failed.what
        for name in reading.unended:
            await reading.fail(TableError(name, what, remedy=failed.remedy or "ask again"))

    def _pass_or_raise(self, error: TransientError) -> None:
        if error.reason not in _PASSING:
            raise error
        self._failures += 1
        delay_s = RETRIES.after(self._failures)
        self._watch.reading_failed(error, delay_s)
        self._not_before_s = self._monotonic() + delay_s
        asyncio.get_running_loop().call_later(delay_s, self._requested.set)

    def _reached(self) -> Lsn:
        return max(self._durable(), self.gate.position)

    async def _forget(self) -> None:
        """Now and then forget the transactions that everybody sees."""
        while True:
            await asyncio.sleep(FORGET_INTERVAL_S)
            if self._intake.delivered.count:
                with contextlib.suppress(TransientError):  # `health` tells of what lasts
                    self._intake.delivered.forget(await self._capture.seen())

    # --- waiting ------------------------------------------------------------------------------

    async def _until_tables_change(self) -> None:
        """Return when the catalog may be another, or a snapshot is asked for.

        Raises what a reading ended with.
        """
        waits = [self._capture.tables_changed(), self._requested.wait()]
        tasks: list[asyncio.Task[object]] = [asyncio.ensure_future(w) for w in waits]
        try:
            while not any(task.done() for task in tasks):
                await asyncio.wait([*tasks, *self._readings], return_when=asyncio.FIRST_COMPLETED)
                if self._end_readings() and (self._book.to_read() or self._partial):
                    break  # there is a place again
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await _cancel(tasks)
        self._requested.clear()

    def _end_readings(self) -> bool:
        """Forget those that have ended; say whether there were any. Raises what one ended with."""
        ended = {task for task in self._readings if task.done()}
        self._readings -= ended
        for task in ended:
            try:
                task.result()
            except LakeFault as fault:
                raise fault.error from fault
        return bool(ended)


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _now() -> datetime:
    return datetime.now(UTC)
