"""Detects tables whose storage was replaced after the snapshot being read.

TRUNCATE and rewrites are not MVCC-safe: PostgreSQL documentation, "Caveats" of "Concurrency
Control". After a TRUNCATE an older snapshot sees an empty table, which is correct here, because the
stream sends the `t`. After an ALTER TABLE that rewrites, it sees an empty table too, but the stream
sends nothing. VACUUM FULL and CLUSTER keep the rows, but move them between the blocks of different
splits.
"""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection, sql

from ingestd.model.errors import TableChangedError, TableReplacedError
from ingestd.model.schema import Table
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.relation_lock import lock_table
from ingestd.postgres.connection.session import connect
from ingestd.postgres.rewrites.fingerprint import TableFingerprint, digest

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
    described = TableFingerprint.parse(table.storage)
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
