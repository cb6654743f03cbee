"""Tables read at one point, by several readers at once, without a slot."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime
from typing import Any, Protocol

import psycopg
import pyarrow as pa
from psycopg import AsyncConnection

from ingestd.capture.pages import LOCK_TIMEOUT_S
from ingestd.capture.polling.poll import Now, first_progress
from ingestd.capture.polling.polled import PolledTable
from ingestd.capture.polling.queries import is_deleted
from ingestd.capture.polling.seen import Progress
from ingestd.capture.readers import SplitReaders
from ingestd.capture.session import connect
from ingestd.capture.settings import PollingSettings
from ingestd.capture.splits import enter_snapshot, read_error, splits_seen
from ingestd.capture.views import ExportedView, Place
from ingestd.changes import TableBatch, change_schema
from ingestd.errors import TableError
from ingestd.keys import Key
from ingestd.ports import SnapshotItem, SnapshotPage, Split, SplitRead, TableRead
from ingestd.positions import Lsn
from ingestd.schema import Table, TableId
from ingestd.visibility import Visibility


class Reads(Protocol):
    """What becomes of the tables that are read."""

    def resume_of(self, table: TableId, first: Progress) -> str | None:
        """Give what is kept with a table's last page; `first`: where polling begins after it."""
        ...

    def has_read(self, table: TableId, first: Progress) -> None:
        """Take that all pages of a table have been given."""
        ...

    def close(self) -> None:
        """Take that no more is read. Twice is fine."""
        ...


class PollingSnapshot:
    """See `ingestd.ports.Snapshot`. `connection` is in the transaction of `now`, and exported it.

    `tables`: as they are polled. `move_on` lets `live` pass its position.
    """

    is_chunked = False

    def __init__(  # noqa: PLR0917 - what it is of
        self,
        settings: PollingSettings,
        connection: AsyncConnection[Any],
        exported: str,
        now: Now,
        point: Lsn,
        tables: Sequence[PolledTable],
        reads: Reads,
        move_on: Callable[[], None],
    ) -> None:
        self._dsn = settings.dsn.get_secret_value()
        self._split_bytes = 2 * settings.snapshot_chunk
        self._connection = connection
        self._exported = exported
        self._now = now
        self._point = point
        self._polled: Mapping[TableId, PolledTable] = {p.table.id: p for p in tables}
        self._reads = reads
        self._move_on = move_on
        self._cutter: AsyncConnection[Any] | None = None
        view = ExportedView(self._dsn, exported, Place(point, now.at))
        readable = [_present(p) for p in tables]
        self._readers = SplitReaders(
            self._dsn, readable, self._cut, view, workers=settings.snapshot_workers
        )

    @property
    def point(self) -> Lsn:
        """All that it sees lies below; the polls after it lie above."""
        return self._point

    @property
    def at(self) -> datetime:
        """The server's time of the snapshot."""
        return self._now.at

    @property
    def is_closed(self) -> bool:
        """Whether it can't be read any more."""
        return self._connection.closed

    async def items(self) -> AsyncGenerator[SnapshotItem, None]:
        """Give the tables' rows; see the port.

        A table's last page says where polling goes on: each is held back until the next has come.
        """
        held: dict[TableId, list[SnapshotItem]] = {}
        async with aclosing(self._readers.items()) as items:
            async for item in items:
                if isinstance(item, SnapshotPage):
                    page = self._page(item)
                    for earlier in held.get(page.batch.table.id, ()):
                        yield earlier
                    held[page.batch.table.id] = [page]
                elif isinstance(item, SplitRead):
                    held.setdefault(item.table, []).append(item)
                elif isinstance(item, TableRead):
                    async for last in self._end(item.table, held.pop(item.table, [])):
                        yield last
                else:
                    yield item

    def rows_of(self, table: Table, keys: Collection[Key]) -> AsyncGenerator[SnapshotPage, None]:
        """Refuse: at one point every row is whole, so none is ever owed. Raises RuntimeError."""
        msg = f"{len(keys)} rows of {table.id} by their keys: only a snapshot in chunks owes any"
        raise RuntimeError(msg)

    def oldest(self) -> Visibility | None:
        """None: its rows are not held against the stream."""
        return None

    def abandon(self, table: TableId) -> None:
        """Begin to read no more splits of a table."""
        self._readers.abandon(table)

    def progress(self, table: TableId) -> float:
        """By the sizes of the splits that were read to their ends."""
        return self._readers.progress(table)

    def left(self, table: TableId, done: Collection[str]) -> str:
        """Nothing is kept: after a kill the table is read anew, at a higher point."""
        del table, done
        return ""

    async def move_on(self) -> None:
        """Let the next poll's position be above."""
        self._move_on()

    async def close(self) -> None:
        """Let the snapshot go."""
        self._reads.close()
        await self._close_cutter()
        await self._connection.close()

    # --- inside ------------------------------------------------------------------------------

    def _page(self, page: SnapshotPage) -> SnapshotPage:
        """Give the page with the table as it is captured, not as it was read."""
        batch = page.batch
        table = self._polled[batch.table.id].table
        return SnapshotPage(TableBatch(table, batch.rows, batch.nbytes), page.position)

    async def _end(
        self, name: TableId, held: list[SnapshotItem]
    ) -> AsyncGenerator[SnapshotItem, None]:
        polled = self._polled[name]
        try:
            first = await first_progress(self._connection, polled, self._now)
        except (psycopg.Error, TableError) as error:
            fault: Exception = error
            if isinstance(error, psycopg.Error):
                fault = read_error(error, name, self._dsn)
            if not isinstance(fault, TableError):
                raise fault from error
            yield fault
            return
        resume = self._reads.resume_of(name, first)
        if not (held and isinstance(held[0], SnapshotPage)):
            nothing = pa.RecordBatch.from_pylist([], change_schema(polled.table))
            held.insert(0, SnapshotPage(TableBatch(polled.table, nothing, 0), self._point))
        for item in held:
            if isinstance(item, SnapshotPage):
                yield replace(item, batch=replace(item.batch, resume=resume))
            else:
                yield item
        yield TableRead(name)
        # Only now: its `t`, where that comes last, has been given too.
        self._reads.has_read(name, first)

    async def _cut(self, table: Table) -> tuple[Sequence[Split], int]:
        try:
            if self._cutter is None or self._cutter.closed:
                self._cutter = await connect(
                    self._dsn, autocommit=False, lock_timeout_s=LOCK_TIMEOUT_S
                )
                await enter_snapshot(self._cutter, self._exported)
            return await splits_seen(self._cutter, table, self._exported, self._split_bytes), 0
        except psycopg.Error as error:
            await self._close_cutter()  # its transaction is over
            raise read_error(error, table.id, self._dsn) from error

    async def _close_cutter(self) -> None:
        cutter, self._cutter = self._cutter, None
        if cutter is not None:
            await cutter.close()


def _present(polled: PolledTable) -> Table:
    """Give the table without the rows that count as deleted."""
    if polled.deleted is None:
        return polled.table
    return replace(polled.table, row_filter=f"NOT {is_deleted(polled).as_string(None)}")
