"""The views in which a split is read: an exported snapshot, or its own short one.

Source: PostgreSQL documentation, "SET TRANSACTION", "Snapshot Synchronization Functions",
"Transaction ID and Snapshot Information Functions".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from psycopg import AsyncConnection

from ingestd.model.errors import TableReplacedError
from ingestd.model.lsn import Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import Table
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.planner_functions import ensure_plannable
from ingestd.postgres.catalog.relation_lock import lock_table
from ingestd.postgres.connection.wal_position import insert_position
from ingestd.postgres.snapshot.ctid_splits import enter_snapshot
from ingestd.postgres.snapshot.staleness import ensure_described, lock_unless_rewritten

_SEEN = "SELECT pg_catalog.pg_current_snapshot()::text, pg_catalog.clock_timestamp()"
_FILE = "SELECT pg_catalog.pg_relation_filenode(%s::oid)::int8"

NotePosition = Callable[[AsyncConnection[Any]], Awaitable[Lsn]]


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """The WAL position of rows, the time of the read, and its snapshot (`SnapshotPage`)."""

    position: Lsn
    at: datetime
    seen: PgSnapshot | None = None


class ReadView(Protocol):
    """Begins the transaction in which a split is read."""

    async def enter(
        self, connection: AsyncConnection[Any], table: Table, blocks: BlockRange
    ) -> RowOrigin:
        """Begin it, on a connection that is in none. Raises psycopg.Error, IngestdError."""
        ...


@dataclass(frozen=True, slots=True)
class ExportedView:
    """A snapshot that another session exported, at `place`."""

    dsn: str
    snapshot: str
    place: RowOrigin

    async def enter(
        self, connection: AsyncConnection[Any], table: Table, blocks: BlockRange
    ) -> RowOrigin:
        """Import the snapshot; lock the relation against replacement."""
        # The planner also uses what was added after the snapshot, which does not see it.
        await ensure_plannable(connection, table.id, blocks.oid, with_partitions=blocks.is_whole)
        await connection.rollback()
        await enter_snapshot(connection, self.snapshot)
        await lock_unless_rewritten(connection, self.dsn, table, blocks)
        await ensure_described(connection, table)
        return self.place


class OwnView:
    """A snapshot of the present.

    The lock precedes the snapshot: a statement that replaces a file, TRUNCATE or a rewrite, has
    either ended and is visible, or waits. The position follows the snapshot: whatever that sees has
    committed below. `position` obtains it, on the connection of the view: by default the end of the
    WAL, which other reads may share.
    """

    def __init__(self, position: NotePosition = insert_position) -> None:
        self._position = position

    async def enter(
        self, connection: AsyncConnection[Any], table: Table, blocks: BlockRange
    ) -> RowOrigin:
        """Begin, unless the relation is not the one that the split was cut from."""
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await lock_table(connection, table, blocks, before_snapshot=True)
        place = await self._now(connection)
        await ensure_described(connection, table)
        if blocks.file:
            cursor = await connection.execute(_FILE, (blocks.oid,))
            row = await cursor.fetchone()
            if row is None or row[0] != blocks.file:
                raise TableReplacedError(table.id, "was rewritten or truncated while it was read")
        return place

    async def _now(self, connection: AsyncConnection[Any]) -> RowOrigin:
        cursor = await connection.execute(_SEEN)
        row = await cursor.fetchone()
        assert row is not None
        seen, at = row
        return RowOrigin(await self._position(connection), at, PgSnapshot.parse(seen))


async def current_snapshot(connection: AsyncConnection[Any]) -> PgSnapshot:
    """Return a new snapshot, or that of the transaction that the connection is in."""
    cursor = await connection.execute("SELECT pg_catalog.pg_current_snapshot()::text")
    row = await cursor.fetchone()
    assert row is not None
    return PgSnapshot.parse(row[0])
