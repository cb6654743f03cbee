"""Tables read at one point, by several readers at once (design section 8.9, way a)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from datetime import datetime
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.capture.pages import LOCK_TIMEOUT_S
from ingestd.capture.readers import SplitReaders
from ingestd.capture.session import classify, connect
from ingestd.capture.settings import WalSettings
from ingestd.capture.splits import enter_snapshot, read_error, splits_seen
from ingestd.capture.unread import unread
from ingestd.capture.views import ExportedView, Place
from ingestd.capture.wal.chunks import can_be_chunked, move_on
from ingestd.capture.wal.slot import ExportedPoint
from ingestd.keys import Key
from ingestd.ports import SnapshotItem, SnapshotPage, Split
from ingestd.positions import Lsn
from ingestd.schema import Table, TableId
from ingestd.visibility import Visibility


class TableSnapshot:
    """See `ingestd.ports.Snapshot`."""

    is_chunked = False

    def __init__(
        self, settings: WalSettings, exported: ExportedPoint, tables: Sequence[Table]
    ) -> None:
        self._dsn = dsn = settings.dsn.get_secret_value()
        # Nobody waits for a split to end: they may be larger than chunks.
        self._split_bytes = 2 * settings.snapshot_chunk
        workers = settings.snapshot_workers
        self._exported = exported
        self._cutter: AsyncConnection[Any] | None = None
        self._tables = {t.id: t for t in tables}
        place = Place(exported.point, exported.at)
        view = ExportedView(dsn, exported.snapshot, place)
        self._readers = SplitReaders(dsn, tables, self._cut, view, workers=workers)

    @property
    def point(self) -> Lsn:
        """The exported consistent point."""
        return self._exported.point

    @property
    def at(self) -> datetime:
        """The server's time just before it."""
        return self._exported.at

    @property
    def exported(self) -> str:
        """What other sessions, anywhere, take it up by while this is open (`Split.snapshot`)."""
        return self._exported.snapshot

    def items(self) -> AsyncGenerator[SnapshotItem, None]:
        """Give the tables' rows; see the port."""
        return self._readers.items()

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
        """See the port: what is left is read in chunks, or all of it anew."""
        described = self._tables[table]
        if not can_be_chunked(described):
            return ""
        nbytes, splits = self._readers.nbytes(table), self._readers.splits(table)
        return unread(described, self.point, nbytes, splits, done)

    async def move_on(self) -> None:
        """Write a message to the WAL; pgoutput leaves it out, the position passes it."""
        try:
            async with await connect(self._dsn) as connection:
                await move_on(connection)
        except psycopg.Error as error:
            raise classify(error, "snapshot", self._dsn) from error

    @property
    def is_closed(self) -> bool:
        """Whether it can't be read any more."""
        return self._exported.connection.closed

    async def close(self) -> None:
        """Let the snapshot, and a temporary slot, go."""
        await self._close_cutter()
        await self._exported.close()

    async def _cut(self, table: Table) -> tuple[Sequence[Split], int]:
        snapshot = self._exported.snapshot
        try:
            if self._cutter is None or self._cutter.closed:
                self._cutter = await connect(
                    self._dsn, autocommit=False, lock_timeout_s=LOCK_TIMEOUT_S
                )
                await enter_snapshot(self._cutter, snapshot)
            return await splits_seen(self._cutter, table, snapshot, self._split_bytes), 0
        except psycopg.Error as error:
            await self._close_cutter()  # its transaction is over
            raise read_error(error, table.id, self._dsn) from error

    async def _close_cutter(self) -> None:
        cutter, self._cutter = self._cutter, None
        if cutter is not None:
            await cutter.close()
