"""Tables read at a consistent point by several readers in parallel, without a slot."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

import psycopg
import pyarrow as pa
from psycopg import AsyncConnection

from ingestd.model.changes import TableBatch, change_schema
from ingestd.model.errors import TableError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table, TableId
from ingestd.ports import SnapshotItem, SnapshotPage, SplitRead, TableRead
from ingestd.postgres.polling.poll import PollPoint, first_progress
from ingestd.postgres.polling.polled_table import PolledTable
from ingestd.postgres.polling.progress import PollProgress
from ingestd.postgres.polling.queries import is_deleted
from ingestd.postgres.settings import PollingSettings
from ingestd.postgres.snapshot.errors import snapshot_error
from ingestd.postgres.snapshot.point import PointSnapshot
from ingestd.postgres.snapshot.read_view import ReadPoint


class TableReads(Protocol):
    """Receives the progress of the tables that are read."""

    def resume_of(self, table: TableId, first: PollProgress) -> str | None:
        """Return the text for a table's last page; `first`: where polling begins after it."""
        ...

    def has_read(self, table: TableId, first: PollProgress) -> None:
        """Record that all pages of a table have been yielded."""
        ...

    def close(self) -> None:
        """Record that no more is read. May be called twice."""
        ...


class PollingSnapshot(PointSnapshot):
    """A snapshot at a poll. `connection` is in the transaction of `now`, and exported it.

    `tables`: as they are polled. `move_on` lets `changes` pass the snapshot's position.
    """

    def __init__(  # noqa: PLR0917 - the parts of a snapshot
        self,
        settings: PollingSettings,
        connection: AsyncConnection[Any],
        exported: str,
        now: PollPoint,
        point: Lsn,
        tables: Sequence[PolledTable],
        reads: TableReads,
        move_on: Callable[[], None],
        *,
        row_limit_bytes: int,
    ) -> None:
        super().__init__(
            settings,
            exported,
            ReadPoint(point, now.at),
            [_present(p) for p in tables],
            row_limit_bytes=row_limit_bytes,
        )
        self._connection = connection
        self._now = now
        self._polled: Mapping[TableId, PolledTable] = {p.table.id: p for p in tables}
        self._reads = reads
        self._move_on = move_on

    @property
    def is_closed(self) -> bool:
        """True if it can no longer be read."""
        return self._connection.closed

    async def items(self) -> AsyncGenerator[SnapshotItem, None]:
        """Yield the tables' rows; see the port.

        A table's last page has its progress, so each page is held back until the next one arrives.
        """
        held: dict[TableId, list[SnapshotItem]] = {}
        async with aclosing(super().items()) as items:
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

    def remainder(self, table: TableId, done: Collection[str]) -> str:
        """Return nothing: after a kill the table is re-read, at a higher point."""
        del table, done
        return ""

    async def advance_source(self) -> None:
        """Make the position of the next poll higher."""
        self._move_on()

    async def close(self) -> None:
        """Release the snapshot."""
        self._reads.close()
        await self._close_split_connection()
        await self._connection.close()

    # --- inside ------------------------------------------------------------------------------

    def _page(self, page: SnapshotPage) -> SnapshotPage:
        """Return the page with the captured table in place of the one that was read."""
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
                fault = snapshot_error(error, name, self._dsn)
            if not isinstance(fault, TableError):
                raise fault from error
            yield fault
            return
        resume = self._reads.resume_of(name, first)
        if not (held and isinstance(held[0], SnapshotPage)):
            nothing = pa.RecordBatch.from_pylist([], change_schema(polled.table))
            held.insert(0, SnapshotPage(TableBatch(polled.table, nothing, 0), self.point))
        for item in held:
            if isinstance(item, SnapshotPage):
                yield replace(item, batch=replace(item.batch, resume=resume))
            else:
                yield item
        yield TableRead(name)
        # Last: by now its `t` has been yielded, too.
        self._reads.has_read(name, first)


def _present(polled: PolledTable) -> Table:
    """Return the table without the rows that count as deleted."""
    if polled.deleted is None:
        return polled.table
    return replace(polled.table, row_filter=f"NOT {is_deleted(polled).as_string(None)}")
