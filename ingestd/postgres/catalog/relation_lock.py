"""The only way to access a relation by its name: lock it, then check that it is the expected one.

A query refers to a relation and its columns by name, and the owner decides what has these names. A
session that waits for a lock gets the relation that has the name once the lock is granted: for
instance a view, whose functions run with the reader's privileges. Or the table has another column
of that name, of a type of the owner's, whose casts the query would call. A snapshot does not
protect against that: the server parses a query with its newest catalog, whatever the query sees.

The rule: nothing that another role owns is evaluated, in planning or execution, before it was
judged under the lock. So a statement that runs nothing first locks the name; then OID and kind are
compared, and number and type of each column that a query will name, by a statement that evaluates
nothing of what has the name; then conditions and what the planner evaluates are judged; then the
relation is read, in the same transaction. The lock prevents it from being renamed, dropped,
replaced or altered.

PREPARE takes the lock: it analyzes a query without planning it. Planning would be too much, because
it evaluates the immutable functions of a view (see `ingestd.postgres.catalog.planner_functions`).
PREPARE needs no privilege on the table; LOCK TABLE needs SELECT on all columns. Both are allowed on
a standby.

The lock does not protect the schema's name. `restrict_nonsystem_relation_kind`
(`ingestd.postgres.connection.pinned_settings`) makes the server refuse a view there, in versions
that support it. Nor does it protect types: queries must not depend on what ALTER TYPE changes.

Source: PostgreSQL documentation, "LOCK", "PREPARE"; src/backend/catalog/namespace.c
(RangeVarGetRelidExtended); CVE-2024-7348.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql

from ingestd.model.errors import TableChangedError, TableReplacedError
from ingestd.model.schema import Table, TableId
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.planner_functions import ensure_plannable
from ingestd.postgres.catalog.table_faults import own_fault
from ingestd.postgres.catalog.trusted_columns import ensure_trusted, read_type_trust

PUT_BACK = "rename the table back, or remove it from `tables`"

NONE: Mapping[str, int] = MappingProxyType({})
"""No columns: the queries name only system columns."""

# A cancel between the two statements leaves a prepared one, so drop all before, not after.
_PREPARE = sql.SQL("DEALLOCATE ALL; PREPARE ingestd_lock AS SELECT FROM {}")
_LOCK = sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE")
# The functions see the present, and so does a null of the table's row type; the catalog's tables
# are seen as of the transaction's snapshot. `types`: at present. `seen`: in the snapshot, 0 for a
# later column, null if the column has another name at present or was dropped. Up to PostgreSQL 15,
# CREATE RULE turns an empty table into a view with the same OID, which has no file.
# The name may be that of a sequence and, as these have no row type, of a domain of the owner's. A
# cast of a null to a domain makes its checks, already at planning; an element of a null array has
# the same type without a cast, whatever that is.
_CHECK = sql.SQL("""
SELECT coalesce(pg_catalog.to_regclass({name})::pg_catalog.oid = c.oid
            AND pg_catalog.to_regtype({name})::pg_catalog.oid = c.reltype, false)
   AND (c.relkind = 'p' OR c.relkind = 'r' AND pg_catalog.pg_relation_filenode(c.oid) IS NOT NULL),
       ARRAY[{types}]::pg_catalog.oid[] AS types,
       ARRAY(SELECT CASE WHEN a.attnum IS NULL THEN 0
                         WHEN (pg_catalog.pg_identify_object_as_address(
                                'pg_catalog.pg_class'::pg_catalog.regclass, c.oid, a.attnum)
                              ).object_names[3] = a.attname THEN a.atttypid END
               FROM pg_catalog.unnest({names}::pg_catalog.text[]) WITH ORDINALITY AS n(name, place)
               LEFT JOIN pg_catalog.pg_attribute a
                 ON a.attrelid = c.oid AND a.attname = n.name AND NOT a.attisdropped
              ORDER BY n.place) AS seen
  FROM pg_catalog.pg_class c CROSS JOIN (SELECT ((NULL::{relation}[])[1]).*) AS present
 WHERE c.oid = {oid}
""")
_TYPE = sql.SQL("pg_catalog.pg_typeof(present.{})")


async def lock_table(
    connection: AsyncConnection[Any],
    table: Table,
    blocks: BlockRange,
    others: Mapping[str, int] = NONE,
    *,
    before_snapshot: bool = False,
) -> None:
    """Lock the table, or its partition that `blocks` names, for queries on its columns.

    `others`: further columns that they name. See `lock_relation`.
    """
    columns = {**others, **{column.name: column.type_oid for column in table.columns}}
    await lock_relation(
        connection,
        table.id,
        blocks,
        columns,
        condition=table.row_filter,
        before_snapshot=before_snapshot,
    )


async def lock_relation(
    connection: AsyncConnection[Any],
    table: TableId,
    blocks: BlockRange,
    columns: Mapping[str, int],
    *,
    condition: str | None = None,
    before_snapshot: bool = False,
) -> None:
    """Lock the table or partition that `blocks` names until the transaction ends; then read it.

    `columns`: those that the queries name, with the type OIDs that they were composed for.
    `condition`: SQL that is part of them. `before_snapshot`: the transaction's snapshot is taken
    afterwards, and partitions are locked with their table, which needs the privilege to read all
    columns. Raises psycopg.Error; TableChangedError if another relation has the name now, or
    another column one of the names (TableReplacedError if only since the snapshot); TableError if
    planning a query on it would run another role's code, or the condition could.
    """
    with own_fault(table):
        if before_snapshot:
            await connection.execute(_LOCK.format(blocks.relation))
        else:
            await lock_name(connection, blocks.relation)
        if condition is None:
            await _ensure_same_relation(connection, table, blocks, columns)
        else:
            await ensure_condition(connection, table, blocks, condition, columns)
        await ensure_plannable(connection, table, blocks.oid, with_partitions=blocks.is_whole)


async def ensure_condition(
    connection: AsyncConnection[Any],
    table: TableId,
    blocks: BlockRange,
    condition: str,
    columns: Mapping[str, int],
) -> None:
    """Check that neither these columns nor a condition on a locked relation call an owner's code.

    Runs nothing of the condition. Raises as `lock_relation`; psycopg.Error if it is invalid.
    """
    trust = await read_type_trust(connection, blocks.oid)
    await _ensure_same_relation(connection, table, blocks, {**trust.trusted, **columns})
    await ensure_trusted(connection, table, blocks, trust, condition)


async def lock_name(connection: AsyncConnection[Any], relation: sql.Composable) -> None:
    """Lock the relation of this name, of any kind, and run nothing. Raises psycopg.Error."""
    await connection.execute(_PREPARE.format(relation))


def whole(table: Table, *, is_partitioned: bool) -> BlockRange:
    """Return the complete table, with its partitions if it is partitioned."""
    name = table.id
    return BlockRange(name.schema, name.name, is_whole=is_partitioned, oid=table.oid)


async def _ensure_same_relation(
    connection: AsyncConnection[Any],
    table: TableId,
    blocks: BlockRange,
    columns: Mapping[str, int],
) -> None:
    relation = sql.Identifier(blocks.schema, blocks.name)
    name = relation.as_string(None)
    query = _CHECK.format(
        name=name,
        types=sql.SQL(", ").join(_TYPE.format(sql.Identifier(c)) for c in columns),
        relation=relation,
        names=list(columns),
        oid=blocks.oid,
    )
    try:
        row = await (await connection.execute(query)).fetchone()
    except (
        psycopg.errors.UndefinedColumn,
        psycopg.errors.UndefinedObject,
        psycopg.errors.WrongObjectType,
    ) as error:  # a column that is missing; a relation without a row type
        raise TableChangedError(
            table, f"a column of {name} was dropped or renamed, or another relation has its name"
        ) from error
    if row is None or not row[0]:
        raise TableChangedError(
            table, f"{name} is a different relation than the one discovered", remedy=PUT_BACK
        )
    for (column, expected), present, seen in zip(columns.items(), row[1], row[2], strict=True):
        if present != expected or seen not in {0, expected}:
            # What was read of the same snapshot before may be of the former column.
            kind = TableChangedError if seen == present else TableReplacedError
            raise kind(
                table, f"column {column!r} was replaced, or its type changed, before it was read"
            )
