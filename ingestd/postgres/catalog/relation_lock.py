"""The only way to access a relation by its name: lock it, then check that it is the expected one.

A query refers to a relation by name, and the owner decides which relation has the name. A session
that waits for a lock gets the relation that has the name once the lock is granted: for instance a
view, whose functions run with the reader's privileges. So a statement that runs nothing first locks
the name; then OID and kind are compared; then the relation is read, in the same transaction. The
lock prevents it from being renamed, dropped or replaced.

PREPARE takes the lock: it analyzes a query without planning it. Planning would be too much, because
it evaluates the immutable functions of a view (see `ingestd.postgres.catalog.planner_functions`).
PREPARE needs no privilege on the table; LOCK TABLE needs SELECT on all columns. Both are allowed on
a standby.

The lock does not protect the schema's name. `restrict_nonsystem_relation_kind`
(`ingestd.postgres.connection.pinned_settings`) makes the server refuse a view there, in versions
that support it.

Source: PostgreSQL documentation, "LOCK", "PREPARE"; src/backend/catalog/namespace.c
(RangeVarGetRelidExtended); CVE-2024-7348.
"""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection, sql

from ingestd.model.errors import TableChangedError
from ingestd.model.schema import Table, TableId
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.planner_functions import ensure_plannable

PUT_BACK = "rename the table back, or remove it from `tables`"

# A cancel between the two statements leaves a prepared one, so drop all before, not after.
_PREPARE = sql.SQL("DEALLOCATE ALL; PREPARE ingestd_lock AS SELECT FROM {}")
_LOCK = sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE")
# The functions see the present, pg_class the transaction's snapshot. Up to PostgreSQL 15, CREATE
# RULE turns an empty table into a view with the same OID, which has no file.
_IS_MEANT = """
SELECT coalesce(pg_catalog.to_regclass(%s)::oid = c.oid, false)
   AND (c.relkind = 'p' OR c.relkind = 'r' AND pg_catalog.pg_relation_filenode(c.oid) IS NOT NULL)
  FROM pg_catalog.pg_class c WHERE c.oid = %s
"""


async def lock_relation(
    connection: AsyncConnection[Any],
    table: TableId,
    blocks: BlockRange,
    *,
    before_snapshot: bool = False,
) -> None:
    """Lock the table or partition that `blocks` names until the transaction ends; then read it.

    `before_snapshot`: the transaction's snapshot is taken afterwards, and partitions are locked
    with their table, which needs the privilege to read all columns. Raises psycopg.Error;
    TableChangedError if another relation has the name now; TableError if planning a query on it
    would run another role's function.
    """
    if before_snapshot:
        await connection.execute(_LOCK.format(blocks.relation))
    else:
        await lock_name(connection, blocks.relation)
    await _ensure_meant(connection, table, blocks)
    await ensure_plannable(connection, table, blocks.oid, with_partitions=blocks.is_whole)


async def lock_name(connection: AsyncConnection[Any], relation: sql.Composable) -> None:
    """Lock the relation of this name, of any kind, and run nothing. Raises psycopg.Error."""
    await connection.execute(_PREPARE.format(relation))


def whole(table: Table, *, is_partitioned: bool) -> BlockRange:
    """Return the complete table, with its partitions if it is partitioned."""
    name = table.id
    return BlockRange(name.schema, name.name, is_whole=is_partitioned, oid=table.oid)


async def _ensure_meant(
    connection: AsyncConnection[Any], table: TableId, blocks: BlockRange
) -> None:
    name = sql.Identifier(blocks.schema, blocks.name).as_string(None)
    cursor = await connection.execute(_IS_MEANT, (name, blocks.oid))
    row = await cursor.fetchone()
    if row is None or not row[0]:
        raise TableChangedError(
            table, f"{name} is not the relation that should be read", remedy=PUT_BACK
        )
