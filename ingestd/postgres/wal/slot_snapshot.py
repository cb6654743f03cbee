"""Tables read at the consistent point of a slot."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import psycopg

from ingestd.model.schema import Table, TableId
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.session import connect
from ingestd.postgres.connection.wal_position import advance_wal
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.snapshot.incremental_choice import can_be_incremental
from ingestd.postgres.snapshot.point import PointSnapshot
from ingestd.postgres.snapshot.read_view import ReadPoint
from ingestd.postgres.snapshot.resume import remainder_text
from ingestd.postgres.wal.slots.create import ExportedPoint


class SlotSnapshot(PointSnapshot):
    """A snapshot at the consistent point of a slot."""

    def __init__(
        self,
        settings: WalSettings,
        exported: ExportedPoint,
        tables: Sequence[Table],
        *,
        row_limit_bytes: int,
    ) -> None:
        super().__init__(
            settings,
            exported.snapshot,
            ReadPoint(exported.point, exported.at),
            tables,
            row_limit_bytes=row_limit_bytes,
        )
        self._held = exported
        self._tables = {t.id: t for t in tables}

    def remainder(self, table: TableId, done: Collection[str]) -> str:
        """See the port: the remainder is read in chunks, or the table is read again."""
        described = self._tables[table]
        if not can_be_incremental(described):
            return ""
        nbytes, splits = self._readers.nbytes(table), self._readers.splits(table)
        return remainder_text(described, self.point, nbytes, splits, done)

    async def advance_source(self) -> None:
        """Write a message to the WAL; pgoutput skips it, but the position passes it."""
        try:
            async with await connect(self._dsn) as connection:
                await advance_wal(connection)
        except psycopg.Error as error:
            raise classify(error, "snapshot", self._dsn) from error

    @property
    def is_closed(self) -> bool:
        """True if it can no longer be read."""
        return self._held.connection.closed

    async def close(self) -> None:
        """Release the snapshot, and drop a temporary slot."""
        await self._close_split_connection()
        await self._held.close()
