"""A database's contents for display: schemas, tables, columns, sizes, statistics.

Source: PostgreSQL documentation, "System Catalogs" and the view pg_stats, which shows statistics of
the columns that the role may read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncConnection

from ingestd.model.errors import TransientError
from ingestd.model.schema import TableId
from ingestd.ports import ColumnInfo, TableInfo
from ingestd.postgres.catalog.bounded_text import at_most
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.names import TYPE_NAME, tables_apart
from ingestd.postgres.connection.session import connect

DEFAULT_TIMEOUT_S = 10.0

_USER_TABLES: LiteralString = """
  FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence <> 't'
   AND n.nspname <> 'information_schema' AND NOT starts_with(n.nspname::text, 'pg_')
"""

_SCHEMAS: LiteralString = (
    'SELECT DISTINCT n.nspname::text COLLATE "C"' + _USER_TABLES + "ORDER BY 1"
)

# No query waits for a lock. For a locked table the pages of its last ANALYZE are counted, because
# pg_table_size would wait, as would pg_partition_tree. reltuples is -1 before the first ANALYZE. A
# partitioned table gets the sum of its partitions, because it is seldom analyzed itself.
_TABLES: LiteralString = (
    """
WITH RECURSIVE wanted AS (
  SELECT c.oid, c.relkind, c.relname, c.relreplident, n.nspname"""  # noqa: S608 - joined from constants
    + _USER_TABLES
    + """
     AND (%(schema)s::text IS NULL OR n.nspname = %(schema)s::text)),
tree AS (
  SELECT oid AS root, oid, relkind FROM wanted
  UNION ALL
  SELECT t.root, p.oid, p.relkind FROM tree t
    JOIN pg_catalog.pg_inherits i
      ON i.inhparent = t.oid AND t.relkind = 'p' AND NOT i.inhdetachpending
    JOIN pg_catalog.pg_class p ON p.oid = i.inhrelid),
locked AS MATERIALIZED (
  SELECT relation FROM pg_catalog.pg_locks
   WHERE locktype = 'relation' AND mode = 'AccessExclusiveLock'
     AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())),
sizes AS (
  SELECT t.root, sum(l.reltuples) FILTER (WHERE l.reltuples >= 0)::int8 AS rows,
         sum(CASE WHEN l.oid IN (SELECT relation FROM locked)
                  THEN l.relpages::int8 * current_setting('block_size')::int8
                  ELSE pg_catalog.pg_table_size(l.oid) END)::int8 AS bytes
    FROM tree t JOIN pg_catalog.pg_class l ON l.oid = t.oid AND l.relkind <> 'p'
   GROUP BY t.root)
SELECT w.oid::int8, w.nspname::text, w.relname::text, w.relreplident::text,
       pg_catalog."left"(pg_catalog.obj_description(w.oid, 'pg_class'), 8192),
       ARRAY(SELECT a.attname::text
               FROM pg_catalog.pg_index i,
                    unnest(i.indkey::int2[]) WITH ORDINALITY k(number, place)
               JOIN pg_catalog.pg_attribute a ON a.attnum = k.number
              WHERE i.indrelid = w.oid AND i.indisprimary AND a.attrelid = w.oid
                AND k.place <= i.indnkeyatts
              ORDER BY k.place),
       s.rows, coalesce(s.bytes, 0)
  FROM wanted w LEFT JOIN sizes s ON s.root = w.oid
 ORDER BY w.nspname COLLATE "C", w.relname COLLATE "C"
"""
)

_COLUMNS: LiteralString = (
    """
SELECT a.attrelid::int8, a.attname::text,
       type.name, NOT a.attnotnull,
       """
    + at_most(1 << 20, "d.comment", of="PARTITION BY a.attrelid ORDER BY a.attnum")
    + """,
       s.null_frac::float8, s.n_distinct::float8
  FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid
  LEFT JOIN pg_catalog.pg_stats s ON s.schemaname = n.nspname AND s.tablename = c.relname
       AND s.attname = a.attname AND s.inherited = (c.relkind = 'p')
 CROSS JOIN LATERAL (
   SELECT pg_catalog."left"(pg_catalog.col_description(a.attrelid, a.attnum), 8192)) d (comment)
"""
    + TYPE_NAME
    + """
 WHERE c.oid = ANY(%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY a.attrelid, a.attnum
"""
)


class PostgresMetadata:
    """The catalog of one database; see `ingestd.ports.Metadata`. Keeps no connection open."""

    def __init__(self, dsn: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._dsn = dsn
        self._timeout_s = timeout_s

    async def schemas(self) -> Sequence[str]:
        """Query pg_class."""
        async with self._session("schemas") as connection:
            cursor = await connection.execute(_SCHEMAS)
            return [name for (name,) in await cursor.fetchall()]

    async def tables(self, schema: str | None = None) -> Sequence[TableInfo]:
        """Query pg_class, pg_attribute and pg_stats."""
        where = "all tables" if schema is None else f"tables of schema {schema!r}"
        async with self._session(where) as connection:
            cursor = await connection.execute(_TABLES, {"schema": schema})
            rows = await cursor.fetchall()
            names = tables_apart([row[1:3] for row in rows])
            tables = [
                _FoundTable(oid, *name, *facts)
                for (oid, _, _, *facts), name in zip(rows, names, strict=True)
            ]
            cursor = await connection.execute(_COLUMNS, ([t.oid for t in tables],))
            columns: dict[int, list[_FoundColumn]] = {}
            for oid, *facts in await cursor.fetchall():
                columns.setdefault(oid, []).append(_FoundColumn(*facts))
        return [t.info(columns.get(t.oid, ())) for t in tables]

    @asynccontextmanager
    async def _session(self, doing: str) -> AsyncGenerator[AsyncConnection[Any], None]:
        """Connect. The block inside is limited in time, and raises the errors of the port."""
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await connect(
                    self._dsn,
                    autocommit=False,
                    statement_timeout_s=self._timeout_s,
                    reads_names=True,
                )
                async with connection:
                    yield connection
        except TimeoutError as error:
            raise self._timed_out(doing) from error
        except psycopg.errors.QueryCanceled as error:
            raise self._timed_out(doing) from error
        except psycopg.Error as error:
            raise classify(error, f"metadata, {doing}", self._dsn) from error

    def _timed_out(self, doing: str) -> TransientError:
        return TransientError(
            f"metadata, {doing}: no answer within {self._timeout_s:g} s", reason="timeout"
        )


@dataclass(frozen=True, slots=True)
class _FoundColumn:
    name: str
    pg_type: str
    nullable: bool
    comment: str | None
    null_fraction: float | None
    n_distinct: float | None

    def info(self, rows: int | None) -> ColumnInfo:
        return ColumnInfo(
            name=self.name,
            pg_type=self.pg_type,
            nullable=self.nullable,
            comment=self.comment,
            null_fraction=self.null_fraction,
            distinct=distinct(self.n_distinct, rows),
        )


@dataclass(frozen=True, slots=True)
class _FoundTable:
    oid: int
    schema: str
    name: str
    replica_identity: str
    comment: str | None
    key: list[str]
    rows: int | None
    nbytes: int

    def info(self, columns: Sequence[_FoundColumn]) -> TableInfo:
        return TableInfo(
            id=TableId(self.schema, self.name),
            columns=tuple(c.info(self.rows) for c in columns),
            key=tuple(self.key),
            replica_identity=self.replica_identity,
            comment=self.comment,
            rows=self.rows,
            bytes=self.nbytes,
        )


def distinct(n_distinct: float | None, rows: int | None) -> float | None:
    """Return the number of distinct values for pg_stats.n_distinct: a number, or minus a fraction.

    Source: PostgreSQL documentation, "pg_stats"; 0 is "unknown".
    """
    if not n_distinct:
        return None
    if n_distinct > 0:
        return n_distinct
    return None if rows is None else -n_distinct * rows
