"""The relations that hold a table's rows: the table itself, or the leaves of a partitioned one.

`rewrites/catalog_evidence.py` finds partitions that were attached or detached.

Source: PostgreSQL documentation, "System Administration Functions", "Database Object Size
Functions".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from psycopg import AsyncConnection, sql
from psycopg.rows import class_row

from ingestd.model.errors import TableChangedError, TableError
from ingestd.model.schema import Table, TableId
from ingestd.postgres.connection.names import name_bytes, name_from, odd_names
from ingestd.postgres.connection.quoting import printed

# Runs under the snapshot, so the partitions are those at its point; the sizes are current.
_TREE = """
WITH RECURSIVE tree AS (
  SELECT %(oid)s::oid AS oid, NULL::oid AS parent
  UNION ALL
  SELECT i.inhrelid, t.oid FROM tree t
    JOIN pg_catalog.pg_class p ON p.oid = t.oid AND p.relkind = 'p'
    JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid AND NOT i.inhdetachpending)
SELECT c.oid::int8 AS oid, tree.parent::int8 AS parent,
       {schema} AS schema_bytes, {name} AS name_bytes,
       c.relkind::text AS kind, c.oid = %(oid)s::oid AS is_root,
       pg_catalog.has_table_privilege(c.oid, 'SELECT') AS is_readable,
       coalesce(pg_catalog.pg_relation_filenode(c.oid), 0)::int8 AS file,
       CASE WHEN c.relkind = 'r' THEN
         pg_catalog.pg_relation_size(c.oid)
           / pg_catalog.current_setting('block_size')::int8 ELSE 0 END AS blocks,
       CASE WHEN c.relkind = 'r' THEN pg_catalog.pg_table_size(c.oid) ELSE 0 END AS nbytes,
       CASE WHEN c.reltoastrelid > 0 THEN pg_catalog.pg_relation_size(c.reltoastrelid)
         ELSE 0 END AS toast_bytes,
       pg_catalog.current_setting('server_encoding') IN ('UTF8', 'SQL_ASCII') AS is_sent_as_stored
  FROM tree
  JOIN pg_catalog.pg_class c ON c.oid = tree.oid
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 ORDER BY c.oid
"""
_QUERY = sql.SQL(_TREE).format(schema=name_bytes("n.nspname"), name=name_bytes("c.relname"))
_TABLE, _PARTITIONED, _FOREIGN = "r", "p", "f"


@dataclass(frozen=True, slots=True)
class _Relation:
    """The table or one of its partitions. `nbytes`: including TOAST.

    `is_sent_as_stored`: texts have the same length on the server as when sent, so they can be
    packed behind their lengths.
    """

    oid: int
    parent: int | None
    schema_bytes: bytes
    name_bytes: bytes
    kind: str
    is_root: bool
    is_readable: bool | None
    file: int
    blocks: int | None
    nbytes: int | None
    toast_bytes: int | None
    is_sent_as_stored: bool
    schema: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A relation that holds rows of the table; no row is in two. `nbytes`: including TOAST.

    `file`: pg_relation_filenode, which a rewrite replaces. `is_splittable`: it can be read by
    ranges of blocks, which needs the privilege to read the complete table. `is_whole`: it
    represents the complete table, which has no blocks itself and can't be read leaf by leaf.
    `is_packed`: small values only, so the server can pack them by column.
    """

    oid: int
    schema: str
    name: str
    file: int
    blocks: int
    nbytes: int
    is_whole: bool = False
    is_packed: bool = False
    is_splittable: bool = True


async def leaves_of(connection: AsyncConnection[Any], table: Table) -> list[Leaf]:
    """Return the relations with the table's rows, as of the connection's snapshot.

    Raises TableChangedError if the table is missing, TableError if it is not a table.
    """
    async with connection.cursor(row_factory=class_row(_Relation)) as cursor:
        await cursor.execute(_QUERY, {"oid": table.oid})
        found = await cursor.fetchall()
    relations = [
        replace(
            r,
            schema=name_from(connection, r.schema_bytes),
            name=name_from(connection, r.name_bytes),
        )
        for r in found
    ]
    return _leaves(table.id, relations)


def _can_be_read(partition: _Relation) -> bool:
    """Return whether a partition can be read without its root.

    Not if no query can refer to it. A role that may read the root may lack SELECT on a partition.
    """
    is_named = not odd_names(partition.schema, partition.name)
    return partition.kind == _TABLE and bool(partition.is_readable) and is_named


def _leaves(table: TableId, relations: Sequence[_Relation]) -> list[Leaf]:
    root = next((r for r in relations if r.is_root), None)
    if root is None:
        raise TableChangedError(table, "does not exist any more")
    if root.kind not in {_TABLE, _PARTITIONED}:
        raise TableError(table, "is not a table", remedy="remove it from `tables`")
    leaves = [r for r in relations if r.kind != _PARTITIONED]
    foreign = next((r for r in leaves if r.kind == _FOREIGN), None)
    if foreign is not None:
        [parent] = [r for r in relations if r.oid == foreign.parent]
        detach = sql.SQL("ALTER TABLE {} DETACH PARTITION {};").format(
            sql.Identifier(parent.schema, parent.name),
            sql.Identifier(foreign.schema, foreign.name),
        )
        raise TableError(
            table,
            f"partition {TableId(foreign.schema, foreign.name)} is a foreign table: its rows are"
            " on another server",
            remedy=printed(detach),
        )
    if root.kind == _PARTITIONED and not all(_can_be_read(r) for r in leaves):
        leaves = []
    if not leaves:
        nbytes = sum(r.nbytes or 0 for r in relations)
        return [Leaf(root.oid, root.schema, root.name, root.file, 0, nbytes, is_whole=True)]
    return [
        Leaf(
            r.oid,
            r.schema,
            r.name,
            r.file,
            r.blocks or 0,
            r.nbytes or 0,
            is_packed=bool(r.is_readable and r.is_sent_as_stored and not r.toast_bytes),
            is_splittable=bool(r.is_readable),
        )
        for r in leaves
    ]
