"""Cuts tables into ranges of blocks, to be read under one exported snapshot.

A range is read by a TID range scan, PostgreSQL 14 or newer. Source: PostgreSQL documentation,
"System Columns" (ctid), "SET TRANSACTION", "Database Object Size Functions".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql
from psycopg.rows import class_row

from ingestd.capture.blocks import BlockRange
from ingestd.capture.session import classify, connect, identifier, role_of
from ingestd.errors import IngestdError, TableChangedError, TableError, TransientError
from ingestd.ports import Split
from ingestd.schema import Table, TableId

# Under the snapshot, so that the partitions are those of that point; the sizes are those of now.
_LEAVES = """
WITH RECURSIVE tree AS (
  SELECT %(oid)s::oid AS oid
  UNION ALL
  SELECT i.inhrelid FROM tree t
    JOIN pg_catalog.pg_class p ON p.oid = t.oid AND p.relkind = 'p'
    JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid)
SELECT n.nspname::text AS schema, c.relname::text AS name, c.relkind::text AS kind,
       c.oid = %(oid)s::oid AS is_root,
       pg_catalog.has_table_privilege(c.oid, 'SELECT') AS is_readable,
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
_TABLE, _PARTITIONED = "r", "p"


@dataclass(frozen=True, slots=True)
class _Relation:
    """The table or one of its partitions. `nbytes`: with TOAST.

    `is_sent_as_stored`: texts have at the server the length that they arrive with, and so can be
    packed behind their lengths.
    """

    schema: str
    name: str
    kind: str
    is_root: bool
    is_readable: bool | None
    blocks: int | None
    nbytes: int | None
    toast_bytes: int | None
    is_sent_as_stored: bool


class CtidSplits:
    """Splits of plain tables, and of the leaves of partitioned ones.

    Together they have every row that the snapshot sees once, whatever happens meanwhile but for a
    rewrite, which `ingestd.capture.pages` notices. See `ingestd.ports.SplitManager`.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    async def splits(self, table: Table, snapshot: str, target_bytes: int) -> Sequence[Split]:
        """Cut `table`; TableError for what is not a table any more, or never was one."""
        if target_bytes <= 0:
            msg = f"target_bytes must be above 0, not {target_bytes}"
            raise ValueError(msg)
        try:
            async with await connect(self._dsn, autocommit=False) as connection:
                await enter_snapshot(connection, snapshot)
                async with connection.cursor(row_factory=class_row(_Relation)) as cursor:
                    await cursor.execute(_LEAVES, {"oid": table.oid})
                    relations = await cursor.fetchall()
        except psycopg.Error as error:
            raise read_error(error, table.id, self._dsn) from error
        return [
            Split(table, snapshot, blocks.to_text(), nbytes)
            for blocks, nbytes in _pieces(table.id, relations, target_bytes)
        ]


def _pieces(
    table: TableId, relations: Sequence[_Relation], target_bytes: int
) -> list[tuple[BlockRange, int]]:
    """Give ranges with their sizes."""
    root = next((r for r in relations if r.is_root), None)
    if root is None:
        raise TableError(table, "does not exist", remedy="take it out of `tables`")
    if root.kind not in {_TABLE, _PARTITIONED}:
        raise TableError(table, "is not a table", remedy="take it out of `tables`")
    leaves = [r for r in relations if r.kind != _PARTITIONED]
    if root.kind == _PARTITIONED and not all(r.kind == _TABLE and r.is_readable for r in leaves):
        # A foreign partition has no blocks; and who may read the root may not always read its
        # partitions.
        leaves = []
    if not leaves:
        nbytes = sum(r.nbytes or 0 for r in relations)
        return [(BlockRange(root.schema, root.name, is_whole=True), nbytes)]
    return [piece for leaf in leaves for piece in _ranges(leaf, target_bytes)]


def _ranges(relation: _Relation, target_bytes: int) -> list[tuple[BlockRange, int]]:
    """Cut by blocks. The last range is open: what the table has grown since is in it."""
    blocks, nbytes = relation.blocks or 0, relation.nbytes or 0
    count = max(1, min(blocks, -(-nbytes // target_bytes)))
    bounds = [blocks * i // count for i in range(count)]
    is_packed = relation.is_sent_as_stored and not relation.toast_bytes
    return [
        (
            BlockRange(relation.schema, relation.name, start, end, is_packed=is_packed),
            nbytes // count,
        )
        for start, end in zip(bounds, [*bounds[1:], None], strict=True)
    ]


async def enter_snapshot(connection: AsyncConnection[Any], snapshot: str) -> None:
    """Begin a transaction that sees an exported snapshot; psycopg must not be in one.

    Raises TransientError (``snapshot_gone``) if who exported it has ended.
    """
    begin = sql.SQL(
        "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY; SET TRANSACTION SNAPSHOT {}"
    )
    try:
        await connection.execute(begin.format(snapshot))
    except (psycopg.errors.UndefinedObject, psycopg.errors.InvalidParameterValue) as error:
        raise TransientError(
            f"snapshot {snapshot}: whoever exported it has ended", reason="snapshot_gone"
        ) from error


_GONE = ("42P01", "42703", "3F000")


def read_error(error: psycopg.Error, table: TableId, dsn: str) -> IngestdError:
    """Say what it means that this table can't be read: its own fault, or the connection's."""
    said = error.diag.message_primary or str(error)
    if error.sqlstate in _GONE:
        return TableChangedError(table, f"changed while it was read: {said}")
    fault = classify(error, f"table {table}, read", dsn)
    if error.sqlstate != psycopg.errors.InsufficientPrivilege.sqlstate:
        return fault
    remedy = fault.remedy
    if "row-level security" not in said:
        role = identifier(role_of(dsn)) or "<role>"
        schema, name = identifier(table.schema), identifier(table.name)
        remedy = (
            f"GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT ON {schema}.{name} TO {role};"
        )
    return TableError(table, said, remedy=remedy)
