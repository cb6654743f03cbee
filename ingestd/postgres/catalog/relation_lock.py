"""The only way to a relation by its name: locked, and compared with the one that is meant.

A query names a relation, and its owner decides what has that name. Whoever waits for a lock gets
what has the name once the lock is granted: a view, for instance, whose functions run with the
reader's rights. So the name is locked first, by a statement that runs nothing; then OID and kind
are compared; then it is read, in the same transaction. The lock keeps it from being renamed,
dropped and replaced.

PREPARE takes the lock: it analyses a query and does not plan it. Planning is too much already: it
evaluates the immutable functions of a view (see `ingestd.postgres.catalog.planner_functions`). It
needs no right to the table, where LOCK TABLE needs SELECT on all columns. Both are allowed on a
standby.

What a lock does not keep from changing is the schema's name; `restrict_nonsystem_relation_kind`
(`ingestd.postgres.connection.pinned_settings`) has the server refuse a view there, in versions that
have it.

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

PUT_BACK = "give the table its name back, or take it out of `tables`"

# A cancel between the two statements leaves one prepared: so all are dropped before, not after.
_PREPARE = sql.SQL("DEALLOCATE ALL; PREPARE ingestd_lock AS SELECT FROM {}")
_LOCK = sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE")
# The functions see the present, pg_class what the transaction's snapshot sees. Up to PostgreSQL 15
# CREATE RULE turns an empty table into a view of the same OID, which has no file.
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
    with their table; that needs the right to read all columns. Raises psycopg.Error;
    TableChangedError if the name is another relation's now; TableError where planning a query on it
    would run functions of others.
    """
    if before_snapshot:
        await connection.execute(_LOCK.format(blocks.relation))
    else:
        await lock_name(connection, blocks.relation)
    await _ensure_meant(connection, table, blocks)
    await ensure_plannable(connection, table, blocks.oid, with_partitions=blocks.is_whole)


async def lock_name(connection: AsyncConnection[Any], relation: sql.Composable) -> None:
    """Lock what has this name now, whatever it is, and run nothing. Raises psycopg.Error."""
    await connection.execute(_PREPARE.format(relation))


def whole(table: Table, *, is_partitioned: bool) -> BlockRange:
    """Return the table itself, all of it; with its partitions, if it has such."""
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
            table, f"{name} is another relation than the one that was to be read", remedy=PUT_BACK
        )
