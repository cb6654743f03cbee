"""Keeps up with what tables there are, while the stream goes on.

One task, one step after another::

    start to read what is to be read -> wait until tables change, or a snapshot is asked for
      -> discover -> record departures -> prepare -> record other changes -> (again)

and a task for each reading (`ingestd.run.joining`), which appends nothing itself: its pages go
through the pipeline's one queue. A fault of reading that passes by itself is tried again here; one
that needs a person stops the tables that were to be read, not their source (I8). Any other fault
ends the pipeline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ingestd.changes import TableBatch
from ingestd.errors import OperatorError, TableChangedError, TableError, TransientError
from ingestd.ports import ChangeCapture, Snapshot
from ingestd.positions import Lsn
from ingestd.recorded import TableState
from ingestd.run.intake import Intake
from ingestd.run.joining import Gate, Loaded, Page, read_tables
from ingestd.run.tables import TableBook
from ingestd.run.watch import Watch
from ingestd.schema import Table, TableId

READINGS = 2
"""How many snapshots are read at once: a new small table need not wait for a large one."""
POSTPONED_S = 2.0
"""When it is tried again where a table was locked, or had gone."""
RETRY_S = 1.0
RETRY_LIMIT_S = 30.0

_PASSING = frozenset(
    {
        "deadlock",
        "lock_timeout",
        "no_free_slot",
        "recovery_conflict",
        "snapshot_gone",
        "table_gone",
        "table_rewritten",
        "timeout",
    }
)
"""Reasons of transient faults that leave the stream unharmed."""

Give = Callable[[Page | Loaded], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Reading:
    """Tables whose rows are read at one point; `load` is the reading's number in the TableBook."""

    tables: Sequence[Table]
    snapshot: Snapshot
    load: int


class Follower:
    """See above. `durable` gives the position up to which the lake is durable."""

    def __init__(
        self,
        capture: ChangeCapture,
        book: TableBook,
        intake: Intake,
        watch: Watch,
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
        self._first: Reading | None = None
        self._readings: set[asyncio.Task[None]] = set()
        self._not_before_s = 0.0
        self._is_held_up = False
        self._delay_s = RETRY_S
        self.gate = Gate()

    def request(self, tables: Sequence[TableId]) -> None:
        """Have tables read anew.

        Raises OperatorError for one that is not captured, or where nothing is ever read.
        """
        if not self._reads:
            raise OperatorError(
                'snapshot = "never": tables are not read',
                remedy='set snapshot = "initial" and restart the daemon',
            )
        self._book.request(tables)
        self._requested.set()

    async def begin_first_load(self) -> int:
        """Take the snapshot of what is to be read before the stream begins; gives its number."""
        load = self._book.begin(self._book.to_read())
        await self._enter(load)
        self._first = await self._take_snapshot(load)
        return load

    async def take_unread(self) -> None:
        """Take tables that nothing is known of as they come (snapshot = "never")."""
        unknown = self._book.unknown()
        load = self._book.begin(unknown)
        await self._intake.enter(unknown, TableState.LIVE, self._durable())
        self._book.loaded([load])

    async def run(self, give: Give) -> None:
        """Follow, for ever."""
        try:
            while True:
                if self._book.has_postponed:
                    asyncio.get_running_loop().call_later(POSTPONED_S, self._requested.set)
                if self._reads:
                    self._start_reading(give)
                else:
                    load = self._book.begin(self._book.to_read())
                    for table in self._book.being_read(load):
                        await give(Page(_missed(table.id), _now(), load))
                await self._until_tables_change()
                await self._look()
                if not self._reads:
                    await self.take_unread()
        finally:
            await _cancel(self._readings)

    async def _look(self) -> None:
        """Discover, and have the stream bring what was found.

        It is done again later if a table goes meanwhile, or is locked for long.
        """
        try:
            discovery = await self._capture.discover(self._book.known)
            self._book.update(discovery)
            self._watch.offered(discovery)
            await self._intake.record(self._book.departures(_now(), self._reached()))
            self._book.postpone(await self._capture.prepare(discovery.tables))
        except TransientError as error:
            if error.reason not in _PASSING:
                raise
            self._book.postpone([table.id for table in self._book.to_read()])
            if not self._is_held_up:
                self._watch.reading_failed(error, POSTPONED_S)
            self._is_held_up = True
            asyncio.get_running_loop().call_later(POSTPONED_S, self._requested.set)
        else:
            self._is_held_up = False
            await self._intake.record(self._book.changed(_now(), self.gate.position))

    # --- reading ------------------------------------------------------------------------------

    def _start_reading(self, give: Give) -> None:
        """Read what is to be read, beside what is being read already."""
        first, self._first = self._first, None
        if first is not None:
            self._readings.add(asyncio.create_task(self._read(give, first.load, first)))
        is_free = len(self._readings) < READINGS and self._monotonic() >= self._not_before_s
        if is_free and self._book.to_read():
            load = self._book.begin(self._book.to_read())
            self._readings.add(asyncio.create_task(self._read(give, load)))

    async def _read(self, give: Give, load: int, reading: Reading | None = None) -> None:
        """Read the tables of this number; `reading`: their snapshot, if it is taken already."""
        if reading is None:
            # What the discovery tells holds from there on: the stream has to be as far.
            await self.gate.reached(self._book.lsn)
            await self._enter(load)
        try:
            reading = reading or await self._take_snapshot(load)
            async with aclosing(self._rows(reading)) as rows:
                async for item in rows:
                    await give(item)
        except TransientError as error:
            if error.reason not in _PASSING:
                raise
            self._book.give_up(load)
            self._watch.reading_failed(error, self._delay_s)
            self._wait_before_next()
            await give(Loaded(load))
        except OperatorError as error:
            for table in self._book.being_read(load):
                stopping = TableError(table.id, error.what, remedy=error.remedy)
                await give(Page(stopping, _now(), load))
            await give(Loaded(load))
        else:
            self._delay_s = RETRY_S

    async def _enter(self, load: int) -> None:
        tables = self._book.being_read(load)
        await self._intake.enter(tables, TableState.SNAPSHOTTING, self._reached())

    def _reached(self) -> Lsn:
        return max(self._durable(), self.gate.position)

    def _wait_before_next(self) -> None:
        self._not_before_s = self._monotonic() + self._delay_s
        asyncio.get_running_loop().call_later(self._delay_s, self._requested.set)
        self._delay_s = min(2 * self._delay_s, RETRY_LIMIT_S)

    async def _take_snapshot(self, load: int) -> Reading:
        tables = self._book.being_read(load)
        snapshot = await self._capture.snapshot(tables)
        self._book.read_at(tables, snapshot.point)
        return Reading(tables, snapshot, load)

    async def _rows(self, reading: Reading) -> AsyncGenerator[Page | Loaded, None]:
        """Give the tables' rows, from when the stream has reached them."""
        snapshot = reading.snapshot
        try:
            await self.gate.reached(snapshot.point)
            items = read_tables(snapshot, reading.tables, self._book.replaces, reading.load)
            async with aclosing(items):
                async for item in items:
                    yield item
                    self._watch_page(item, snapshot)
            await snapshot.move_on()
        finally:
            await snapshot.close()

    def _watch_page(self, item: Page | Loaded, snapshot: Snapshot) -> None:
        if isinstance(item, Loaded):
            return
        if isinstance(item.content, TableChangedError):
            self._wait_before_next()
        elif isinstance(item.content, TableBatch):
            table, nbytes = item.content.table.id, item.content.nbytes
            self._watch.snapshot_progress(table, snapshot.progress(table), nbytes=nbytes)

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
                if self._end_readings() and self._book.to_read():
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
            task.result()
        return bool(ended)


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _missed(table: TableId) -> TableError:
    return TableError(
        table,
        'changes were missed, and snapshot = "never"',
        remedy='set snapshot = "initial" to have it read anew',
    )


def _now() -> datetime:
    return datetime.now(UTC)
