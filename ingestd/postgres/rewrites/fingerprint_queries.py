"""Queries for table fingerprints, and for the questions that `catalog_evidence` leaves open.

Source: PostgreSQL documentation, "System Catalogs" (pg_class, pg_inherits, pg_depend).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql

from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.bounded_text import shortened
from ingestd.postgres.catalog.relation_lock import NONE, lock_relation
from ingestd.postgres.connection.names import odd_names
from ingestd.postgres.rewrites.catalog_evidence import Doubt, Proven, Question, judge
from ingestd.postgres.rewrites.fingerprint import TableFingerprint

# A partition that DETACH CONCURRENTLY is removing counts as detached, although older transactions
# still see it.
_FILES = """
WITH RECURSIVE tree AS (
  SELECT c.oid AS root, c.oid, c.relkind, c.relfilenode AS file, c.reltoastrelid AS toast
    FROM pg_catalog.pg_class c WHERE c.oid = ANY(%s::oid[])
  UNION ALL
  SELECT t.root, c.oid, c.relkind, c.relfilenode, c.reltoastrelid FROM tree t
    JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid AND NOT i.inhdetachpending
    JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
   WHERE t.relkind = 'p')
SELECT root::int8, oid::int8, file::int8, toast::int8
  FROM tree WHERE relkind <> 'p' ORDER BY 1, 2
"""
# A partition's place: the transactions that attached it and its ancestors.
_ATTACH_XIDS = f"""
WITH RECURSIVE tree AS (
  SELECT c.oid AS root, c.oid, '' AS place
    FROM pg_catalog.pg_class c WHERE c.oid = ANY(%s::oid[]) AND c.relkind = 'p'
  UNION ALL
  SELECT t.root, i.inhrelid, t.place || '.' || i.xmin::text FROM tree t
    JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid AND NOT i.inhdetachpending)
SELECT t.root::int8, t.oid::int8, {shortened(256, "t.place")}
  FROM tree t WHERE t.oid <> t.root ORDER BY 1, 2
"""  # noqa: S608 - constants
# SET SCHEMA replaces this row; OWNER TO, RENAME, GRANT and ANALYZE do not.
_SCHEMA_XIDS = """
SELECT d.objid::int8, d.xmin::text FROM pg_catalog.pg_depend d
 WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = ANY(%s::oid[])
   AND d.objsubid = 0 AND d.refclassid = 'pg_catalog.pg_namespace'::pg_catalog.regclass
"""
# The size is that of the current file, which may differ from the one of the catalog reading.
_EMPTY = """
SELECT c.oid::int8, pg_catalog.pg_relation_filenode(c.oid)::int8,
       pg_catalog.pg_relation_size(c.oid), pg_catalog.pg_relation_filenode(c.oid)::int8
  FROM pg_catalog.pg_class c WHERE c.oid = ANY(%s::oid[]) AND c.relkind = 'r' AND c.relpages = 0
"""
_OLDER_ROW = """
SELECT EXISTS (SELECT FROM {table} r
                WHERE pg_catalog.age(r.xmin) > pg_catalog.age({xid}::text::xid)
                   OR pg_catalog.age(r.xmin) < 0)
"""
# Checks the partition, and the partitioned tables above it that were added with it. CREATE TABLE
# ... PARTITION OF inserts all rows of pg_attribute, of system and user columns, in one command;
# ATTACH alters those of user columns. A file that is not the first held other rows before it was
# replaced. One that VACUUM has counted (reltuples) may have held rows, which it truncated.
_CAME_EMPTY = """
WITH RECURSIVE places AS (
  SELECT i.inhrelid, i.inhparent FROM pg_catalog.pg_inherits i WHERE i.inhrelid = %(oid)s
  UNION ALL
  SELECT i.inhrelid, i.inhparent
    FROM places p JOIN pg_catalog.pg_inherits i ON i.inhrelid = p.inhparent)
SELECT c.relkind = 'r' AND c.relfilenode = c.oid
   AND (pg_catalog.pg_relation_size(c.oid) = 0 AND c.reltuples < 0 OR NOT EXISTS (
     SELECT FROM places p
      WHERE p.inhrelid <> ALL(%(known)s::oid[]) AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_attribute s
          JOIN pg_catalog.pg_attribute a ON a.attrelid = s.attrelid AND a.attnum > 0
           AND a.xmin = s.xmin AND a.cmin = s.cmin AND a.xmax = 0 AND a.attinhcount > 0
         WHERE s.attrelid = p.inhrelid AND s.attname = 'tableoid' AND s.attnum < 0 AND s.xmax = 0)))
  FROM pg_catalog.pg_class c WHERE c.oid = %(oid)s
"""
# The pg_attribute rows of system columns are never altered.
_MAKERS = """
SELECT attrelid::int8, xmin::text::int8 FROM pg_catalog.pg_attribute
 WHERE attrelid = ANY(%s::oid[]) AND attname = 'tableoid' AND attnum < 0
"""
_NEVER_A_PARTITION = """
SELECT NOT EXISTS (
  SELECT FROM pg_catalog.pg_class p
   WHERE p.relkind = 'p' AND p.oid <> %(oid)s AND NOT EXISTS (
     SELECT FROM (SELECT attname, atttypid FROM pg_catalog.pg_attribute
                   WHERE attrelid = p.oid AND attnum > 0 AND NOT attisdropped) there
       FULL JOIN (SELECT attname, atttypid FROM pg_catalog.pg_attribute
                   WHERE attrelid = %(oid)s AND attnum > 0 AND NOT attisdropped) here
         USING (attname, atttypid)
      WHERE there IS NULL OR here IS NULL))
"""
_NAME = """
SELECT n.nspname::text, c.relname::text FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s
"""
_XIDS = 1 << 32


async def read_files(
    connection: AsyncConnection[Any], tables: Iterable[int]
) -> tuple[dict[int, dict[int, int]], dict[int, dict[int, int]]]:
    """Return `files` and `toast` of these tables' fingerprints, by OID. Takes no lock."""
    cursor = await connection.execute(_FILES, (list(tables),))
    files: dict[int, dict[int, int]] = {}
    toast: dict[int, dict[int, int]] = {}
    for root, oid, file, toast_oid in await cursor.fetchall():
        files.setdefault(root, {})[oid] = file
        toast.setdefault(root, {})[oid] = toast_oid
    return files, toast


async def read_attach_xids(
    connection: AsyncConnection[Any], tables: Iterable[int]
) -> dict[int, dict[int, str]]:
    """Return `attach_xids` of these tables' fingerprints, if partitioned, by OID. Takes no lock."""
    cursor = await connection.execute(_ATTACH_XIDS, (list(tables),))
    found: dict[int, dict[int, str]] = {}
    for root, oid, place in await cursor.fetchall():
        found.setdefault(root, {})[oid] = place
    return found


async def read_schema_xids(
    connection: AsyncConnection[Any], tables: Iterable[int]
) -> dict[int, str]:
    """Return `TableFingerprint.schema_xid` of these tables, by OID. Takes no lock."""
    cursor = await connection.execute(_SCHEMA_XIDS, (list(tables),))
    return dict(await cursor.fetchall())


async def read_empty(
    connection: AsyncConnection[Any], partitions: Mapping[int, int], before: Collection[int] = ()
) -> frozenset[int]:
    """Return which of these partitions (their files by OID) have no blocks in that file.

    `before`: those that had none in the same file. They count if the size is unknown now, because a
    partition is locked or has a new file: any rows added to them are in the stream.
    """
    try:
        cursor = await connection.execute(_EMPTY, (list(partitions),))
    except psycopg.errors.LockNotAvailable:
        return frozenset(before)
    return frozenset(
        oid
        for oid, file, size, after in await cursor.fetchall()
        if (not size if file == after == partitions[oid] else oid in before)
    )


async def difference(
    connection: AsyncConnection[Any], oid: int, then: TableFingerprint, now: TableFingerprint
) -> str | None:
    """Return why the rows of a table are re-read; None if they are those of the stream.

    May scan a table or partition until it finds a row that is old enough. Raises psycopg.Error.
    """
    doubts = []
    for found in judge(oid, then, now):
        if isinstance(found, Proven):
            return found.reason
        doubts.append(found)
    for doubt in doubts:
        if not await _holds(connection, doubt):
            return doubt.reason
    return None


async def _holds(connection: AsyncConnection[Any], doubt: Doubt) -> bool:
    """Return whether the answer is yes; False if the query can't be run."""
    if doubt.question is Question.HAS_OLDER_ROW:
        return await _has_older_row(connection, doubt.oid, doubt.ended)
    of = {"oid": doubt.oid, "known": list(doubt.known)}
    if doubt.question is Question.CAME_EMPTY:
        cursor = await connection.execute(_CAME_EMPTY, of)
    else:
        cursor = await connection.execute(_NEVER_A_PARTITION, of)
    row = await cursor.fetchone()
    return row is not None and bool(row[0])


async def read_makers(connection: AsyncConnection[Any], tables: Collection[int]) -> dict[int, int]:
    """Return the ids of the (sub)transactions that created these tables, by OID."""
    if not tables:
        return {}
    return dict(await (await connection.execute(_MAKERS, (list(tables),))).fetchall())


async def _has_older_row(connection: AsyncConnection[Any], oid: int, ended: int) -> bool:
    name = await (await connection.execute(_NAME, (oid,))).fetchone()
    if name is None or odd_names(*name):
        return False
    schema, relation = name
    blocks = BlockRange(schema, relation, oid=oid)
    question = sql.SQL(_OLDER_ROW).format(table=blocks.relation, xid=ended % _XIDS)
    try:
        async with connection.transaction():
            await lock_relation(connection, TableId(*name), blocks, NONE)
            row = await (await connection.execute(question)).fetchone()
    except (
        TableError,
        psycopg.errors.ObjectNotInPrerequisiteState,
        psycopg.errors.InsufficientPrivilege,  # SELECT on the partitioned table need not cover it
        psycopg.errors.WrongObjectType,
        psycopg.errors.UndefinedTable,
        psycopg.errors.InvalidSchemaName,
    ):
        return False
    return row is not None and bool(row[0])
