"""Tables read in one exported snapshot, by parallel readers (design section 8.9, way a)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from datetime import datetime
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.model.keys import Key
from ingestd.model.lsn import Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import Table, TableId
from ingestd.ports import SnapshotItem, SnapshotPage, Split
from ingestd.postgres.connection.session import connect
from ingestd.postgres.settings import PostgresSettings
from ingestd.postgres.snapshot.ctid_splits import split_table
from ingestd.postgres.snapshot.errors import snapshot_error
from ingestd.postgres.snapshot.read_view import (
    LOCK_TIMEOUT_S,
    ExportedView,
    ReadPoint,
    enter_snapshot,
)
from ingestd.postgres.snapshot.split_readers import SplitReaders


class PointSnapshot:
    """The common part of snapshots at one point; see `ingestd.ports.Snapshot` for the contract.

    `exported`: the id by which other sessions, on any client, import it (`Split.snapshot`), while
    the exporting session keeps it open; `read_point`: the position and time of its rows.
    """

    is_incremental = False

    def __init__(
        self,
        settings: PostgresSettings,
        exported: str,
        read_point: ReadPoint,
        tables: Sequence[Table],
        *,
        row_limit_bytes: int,
    ) -> None:
        self._dsn = settings.dsn.get_secret_value()
        self.exported = exported
        self._read_point = read_point
        # No other work waits for the end of a split: splits may be larger than chunks.
        self._split_bytes = 2 * settings.snapshot_chunk
        self._split_connection: AsyncConnection[Any] | None = None
        self._readers = SplitReaders(
            self._dsn,
            tables,
            self._split,
            ExportedView(self._dsn, exported, read_point),
            workers=settings.snapshot_workers,
            row_limit_bytes=row_limit_bytes,
        )

    @property
    def point(self) -> Lsn:
        """The position of its rows, above everything that it sees."""
        return self._read_point.position

    @property
    def at(self) -> datetime:
        """The server's time of the snapshot."""
        return self._read_point.at

    def items(self) -> AsyncGenerator[SnapshotItem, None]:
        """Yield the tables' rows; see the port."""
        return self._readers.items()

    def rows_of(self, table: Table, keys: Collection[Key]) -> AsyncGenerator[SnapshotPage, None]:
        """Raise RuntimeError: at one point every row is complete, so none is read by key."""
        what = f"{len(keys)} rows of {table.id}"
        msg = f"{what}: only an incremental snapshot has rows to re-read by key"
        raise RuntimeError(msg)

    def oldest(self) -> PgSnapshot | None:
        """Return None: its rows are not compared with the stream."""
        return None

    def abandon(self, table: TableId) -> None:
        """Stop reading further splits of a table."""
        self._readers.abandon(table)

    def ratio_read(self, table: TableId) -> float:
        """Return the fraction read, by the sizes of the completed splits."""
        return self._readers.ratio_read(table)

    async def _close_split_connection(self) -> None:
        connection, self._split_connection = self._split_connection, None
        if connection is not None:
            await connection.close()

    async def _split(self, table: Table) -> tuple[Sequence[Split], int]:
        try:
            if self._split_connection is None or self._split_connection.closed:
                self._split_connection = await connect(
                    self._dsn, autocommit=False, lock_timeout_s=LOCK_TIMEOUT_S
                )
                await enter_snapshot(self._split_connection, self.exported)
            connection = self._split_connection
            return await split_table(connection, table, self.exported, self._split_bytes), 0
        except psycopg.Error as error:
            await self._close_split_connection()  # its transaction is over
            raise snapshot_error(error, table.id, self._dsn) from error
