"""Keeps up with what tables there are, while the stream goes on.

One task, one step after another::

    read what is to be read (`ingestd.run.joining`) -> wait until tables change, or a snapshot is
    asked for -> discover -> record departures -> prepare -> record other changes -> (again)

It appends nothing itself: its pages go through the pipeline's one queue. A fault of reading that
passes by itself is tried again here; one that needs a person stops the tables that were to be read,
not their source (I8). Any other fault ends the pipeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime

from ingestd.changes import TableBatch
from ingestd.errors import OperatorError, TableError, TransientError
from ingestd.ports import ChangeCapture, Snapshot
from ingestd.positions import Lsn
from ingestd.recorded import TableState
from ingestd.run.intake import Intake
from ingestd.run.joining import Gate, Loaded, Page, read_tables
from ingestd.run.tables import TableBook
from ingestd.run.watch import Watch
from ingestd.schema import Table, TableId

RETRY_S = 1.0
RETRY_LIMIT_S = 30.0
LOOKS = 10
"""How often tables are looked at without a pause, while they go before they are prepared."""

_PASSING = frozenset(
    {"deadlock", "lock_timeout", "recovery_conflict", "snapshot_gone", "table_rewritten", "timeout"}
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
    ) -> None:
        self._capture = capture
        self._book = book
        self._intake = intake
        self._watch = watch
        self._durable = durable
        self._reads = reads
        self._requested = intake.wanted
        self._reading: Reading | None = None
        self._load = 0
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

    async def begin_reading(self) -> None:
        """Take the snapshot of what is to be read."""
        tables = self._book.to_read()
        self._load = self._book.begin(tables)
        await self._intake.enter(tables, TableState.SNAPSHOTTING, self._durable())
        snapshot = await self._capture.snapshot(tables)
        self._book.read_at(tables, snapshot.point)
        self._reading = Reading(tables, snapshot, self._load)

    async def take_unread(self) -> None:
        """Take tables that nothing is known of as they come (snapshot = "never")."""
        unknown = self._book.unknown()
        load = self._book.begin(unknown)
        await self._intake.enter(unknown, TableState.LIVE, self._durable())
        self._book.loaded([load])

    async def run(self, give: Give) -> None:
        """Follow, for ever."""
        while True:
            if not self._reads:
                for table in self._book.to_read():
                    await give(Page(_missed(table.id), _now()))
            elif self._reading is not None or self._book.to_read():
                await self._read(give)
            await self._until_tables_change()
            await self._look()
            if not self._reads:
                await self.take_unread()

    async def _look(self) -> None:
        """Discover, and have the stream bring what was found; again if that has gone by then."""
        for attempt in range(1, LOOKS + 1):
            discovery = await self._capture.discover(self._book.known)
            self._book.update(discovery)
            self._watch.offered(discovery)
            await self._intake.record(self._book.departures(_now(), self._durable()))
            try:
                await self._capture.prepare(discovery.tables)
            except TransientError as error:
                if error.reason != "table_gone" or attempt == LOOKS:
                    raise
            else:
                break
        await self._intake.record(self._book.changed(_now(), self.gate.position))

    async def _read(self, give: Give) -> None:
        """Read what is to be read."""
        wanted = self._book.to_read() if self._reading is None else self._reading.tables
        try:
            if self._reading is None:
                await self.begin_reading()
            await self._give_rows(give)
        except TransientError as error:
            if error.reason not in _PASSING:
                raise
            self._book.give_up(self._load)
            self._watch.reading_failed(error, self._delay_s)
            asyncio.get_running_loop().call_later(self._delay_s, self._requested.set)
            self._delay_s = min(2 * self._delay_s, RETRY_LIMIT_S)
        except OperatorError as error:
            for table in wanted:
                stopping = TableError(table.id, error.what, remedy=error.remedy)
                await give(Page(stopping, _now()))
            await give(Loaded(self._load))
        else:
            self._delay_s = RETRY_S

    async def _give_rows(self, give: Give) -> None:
        """Give the tables' rows, from when the stream has reached them."""
        reading, self._reading = self._reading, None
        assert reading is not None
        snapshot = reading.snapshot
        try:
            await self.gate.reached(snapshot.point)
            async with aclosing(self._items(reading)) as items:
                async for item in items:
                    await give(item)
                    if isinstance(item, Page) and isinstance(item.content, TableBatch):
                        table = item.content.table.id
                        self._watch.snapshot_progress(table, snapshot.progress(table))
            await snapshot.move_on()
        finally:
            await snapshot.close()

    def _items(self, reading: Reading) -> AsyncGenerator[Page | Loaded, None]:
        return read_tables(reading.snapshot, reading.tables, self._book.has_rows, reading.load)

    async def _until_tables_change(self) -> None:
        """Return when the catalog may be another, or a snapshot is asked for."""
        waits = [self._capture.tables_changed(), self._requested.wait()]
        tasks: list[asyncio.Task[object]] = [asyncio.ensure_future(w) for w in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._requested.clear()


def _missed(table: TableId) -> TableError:
    return TableError(
        table,
        'changes were missed, and snapshot = "never"',
        remedy='set snapshot = "initial" to have it read anew',
    )


def _now() -> datetime:
    return datetime.now(UTC)
