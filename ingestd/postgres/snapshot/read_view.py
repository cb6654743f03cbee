"""The views in which a split is read: an exported snapshot, or its own short one.

Source: PostgreSQL documentation, "SET TRANSACTION", "Snapshot Synchronization Functions",
"Transaction ID and Snapshot Information Functions".

A table's storage may have been replaced after the snapshot. TRUNCATE and rewrites are not
MVCC-safe: PostgreSQL documentation, "Caveats" of "Concurrency Control". After a TRUNCATE an older
snapshot sees an empty table, which is correct here, because the stream sends the `t`. After an
ALTER TABLE that rewrites, it sees an empty table too, but the stream sends nothing. VACUUM FULL and
CLUSTER keep the rows, but move them between the blocks of different splits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import psycopg
from psycopg import AsyncConnection, sql

from ingestd.model.errors import TableChangedError, TableReplacedError, TransientError
from ingestd.model.lsn import Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import Table
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.planner_functions import ensure_plannable
from ingestd.postgres.catalog.relation_lock import lock_table
from ingestd.postgres.connection.session import connect
from ingestd.postgres.connection.wal_position import insert_position
from ingestd.postgres.rewrites.fingerprint import TableFingerprint, digest

LOCK_TIMEOUT_S = 10.0
"""How long a reader waits for a table that is locked for DDL."""

_SNAPSHOT_AND_TIME = "SELECT pg_catalog.pg_current_snapshot()::text, pg_catalog.clock_timestamp()"
_FILE = "SELECT pg_catalog.pg_relation_filenode(%s::oid)::int8"

NotePosition = Callable[[AsyncConnection[Any]], Awaitable[Lsn]]


@dataclass(frozen=True, slots=True)
class ReadPoint:
    """The WAL position of rows, the time of the read, and its snapshot (`SnapshotPage`)."""

    position: Lsn
    at: datetime
    pg_snapshot: PgSnapshot | None = None


class ReadView(Protocol):
    """Begins the transaction in which a split is read."""

    async def enter(
        self, connection: AsyncConnection[Any], table: Table, blocks: BlockRange
    ) -> ReadPoint:
        """Begin it, on a connection that is in none. Raises psycopg.Error, IngestdError."""
        ...


@dataclass(frozen=True, slots=True)
class ExportedView:
    """A snapshot that another session exported.

    `read_point`: the position and time of its rows.
    """

    dsn: str
    exported_id: str
    read_point: ReadPoint

    async def enter(
        self, connection: AsyncConnection[Any], table: Table, blocks: BlockRange
    ) -> ReadPoint:
        """Import the snapshot; lock the relation against replacement."""
        # The planner also uses what was added after the snapshot, which does not see it.
        await ensure_plannable(connection, table.id, blocks.oid, with_partitions=blocks.is_whole)
        await connection.rollback()
        await enter_snapshot(connection, self.exported_id)
        await lock_unless_rewritten(connection, self.dsn, table, blocks)
        await ensure_described(connection, table)
        return self.read_point


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
    ) -> ReadPoint:
        """Begin, unless the relation is not the one that the split was made from."""
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await lock_table(connection, table, blocks, before_snapshot=True)
        read_point = await self._now(connection)
        await ensure_described(connection, table)
        if blocks.file:
            cursor = await connection.execute(_FILE, (blocks.oid,))
            row = await cursor.fetchone()
            if row is None or row[0] != blocks.file:
                raise TableReplacedError(table.id, "was rewritten or truncated while it was read")
        return read_point

    async def _now(self, connection: AsyncConnection[Any]) -> ReadPoint:
        cursor = await connection.execute(_SNAPSHOT_AND_TIME)
        row = await cursor.fetchone()
        assert row is not None
        pg_snapshot, at = row
        return ReadPoint(await self._position(connection), at, PgSnapshot.parse(pg_snapshot))


async def enter_snapshot(connection: AsyncConnection[Any], snapshot: str) -> None:
    """Begin a transaction that sees an exported snapshot; psycopg must not be in one.

    Raises TransientError (``snapshot_gone``) if the exporting session has ended.
    """
    begin = sql.SQL(
        "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY; SET TRANSACTION SNAPSHOT {}"
    )
    try:
        await connection.execute(begin.format(snapshot))
    except (psycopg.errors.UndefinedObject, psycopg.errors.InvalidParameterValue) as error:
        raise TransientError(
            f"snapshot {snapshot}: the session that exported it has ended", reason="snapshot_gone"
        ) from error


async def current_pg_snapshot(connection: AsyncConnection[Any]) -> PgSnapshot:
    """Return a new snapshot, or that of the transaction that the connection is in."""
    cursor = await connection.execute("SELECT pg_catalog.pg_current_snapshot()::text")
    row = await cursor.fetchone()
    assert row is not None
    return PgSnapshot.parse(row[0])


# --- storage that was replaced -------------------------------------------------------------------

# pg_class as of the snapshot, compared with the function, which sees the present.
_REPLACED = """
SELECT c.oid::int8, c.relfilenode <> pg_catalog.pg_relation_filenode(c.oid)
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = %s AND c.relname = %s
"""
_COLUMNS = """
SELECT attnum::int, atttypid::int8, atttypmod, attname::text FROM pg_catalog.pg_attribute
 WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
"""
# Every rewriting ALTER TABLE changes this, and TRUNCATE does not.
_DEFINITION = """
SELECT c.relpersistence::text, c.relam::text,
       ARRAY(SELECT a.attnum || ' ' || a.xmin::text FROM pg_catalog.pg_attribute a
              WHERE a.attrelid = c.oid AND a.attnum > 0 ORDER BY a.attnum)
  FROM pg_catalog.pg_class c WHERE c.oid = %s
"""


async def lock_unless_rewritten(
    connection: AsyncConnection[Any], dsn: str, table: Table, blocks: BlockRange
) -> None:
    """Lock the relation (`lock_table`), and check that its file was not replaced before.

    `connection` is in the snapshot's transaction. Raises TableReplacedError if rows would be
    missing or read twice.
    """
    await lock_table(connection, table, blocks)
    if blocks.is_whole:
        return
    cursor = await connection.execute(_REPLACED, (blocks.schema, blocks.name))
    found = await cursor.fetchone()
    if found is None or not found[1]:
        return
    cursor = await connection.execute(
        sql.SQL("SELECT EXISTS (SELECT FROM {})").format(blocks.relation)
    )
    row = await cursor.fetchone()
    assert row is not None
    if row[0]:
        is_harmed = not blocks.is_all
    else:
        then = await _definition(connection, found[0])
        async with await connect(dsn) as present:
            is_harmed = await _definition(present, found[0]) != then
    if is_harmed:
        raise TableReplacedError(
            table.id, "was rewritten (ALTER TABLE, VACUUM FULL or CLUSTER) while it was read"
        )


async def ensure_described(connection: AsyncConnection[Any], table: Table) -> None:
    """Check that the table's columns at the snapshot are those that it was described with.

    Other columns could already have values, which would not be read. `connection` is in the
    snapshot's transaction. Raises TableChangedError.
    """
    described = TableFingerprint.parse(table.fingerprint)
    if described is None:
        return
    known = {(c.number, c.type_oid, c.typmod, c.name) for c in described.columns}
    cursor = await connection.execute(_COLUMNS, (table.oid,))
    for number, type_oid, typmod, name in await cursor.fetchall():
        if (number, type_oid, typmod, digest(name)) not in known:
            raise TableChangedError(table.id, "was altered before its snapshot was taken")


async def _definition(connection: AsyncConnection[Any], oid: int) -> Any:  # noqa: ANN401 - a row
    cursor = await connection.execute(_DEFINITION, (oid,))
    return await cursor.fetchone()
