"""What is in a database, for people to look at: schemas, tables, columns, sizes, statistics.

Source: PostgreSQL documentation, "System Catalogs" and the view pg_stats, which shows the
statistics of columns that the role may read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncConnection

from ingestd.capture.session import classify, connect
from ingestd.errors import TransientError
from ingestd.ports import ColumnInfo, TableInfo
from ingestd.schema import TableId

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

# reltuples is -1 before the first ANALYZE. A partitioned table has the sum of its partitions.
_TABLES: LiteralString = (
    """
SELECT c.oid::int8, c.relname::text, c.relreplident::text,
       pg_catalog.obj_description(c.oid, 'pg_class'),
       ARRAY(SELECT a.attname::text
               FROM pg_catalog.pg_index i,
                    unnest(i.indkey::int2[]) WITH ORDINALITY k(number, place)
               JOIN pg_catalog.pg_attribute a ON a.attnum = k.number
              WHERE i.indrelid = c.oid AND i.indisprimary AND a.attrelid = c.oid
                AND k.place <= i.indnkeyatts
              ORDER BY k.place),
       CASE WHEN c.reltuples >= 0 THEN c.reltuples::int8 END,
       CASE c.relkind WHEN 'r' THEN pg_catalog.pg_table_size(c.oid)
            ELSE (SELECT coalesce(sum(pg_catalog.pg_table_size(p.relid)), 0)::int8
                    FROM pg_catalog.pg_partition_tree(c.oid) p WHERE p.isleaf) END
"""  # noqa: S608 - joined from constants
    + _USER_TABLES
    + 'AND n.nspname = %s ORDER BY c.relname COLLATE "C"'
)

# n_distinct: a number, or minus the fraction of the rows.
_COLUMNS: LiteralString = """
SELECT a.attrelid::int8, a.attname::text,
       pg_catalog.format_type(a.atttypid, a.atttypmod), NOT a.attnotnull,
       pg_catalog.col_description(a.attrelid, a.attnum),
       s.null_frac::float8,
       CASE WHEN s.n_distinct >= 0 THEN s.n_distinct
            WHEN c.reltuples >= 0 THEN -s.n_distinct * c.reltuples END::float8
  FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid
  LEFT JOIN pg_catalog.pg_stats s ON s.schemaname = n.nspname AND s.tablename = c.relname
       AND s.attname = a.attname AND s.inherited = (c.relkind = 'p')
 WHERE c.oid = ANY(%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
 ORDER BY a.attrelid, a.attnum
"""


class PostgresMetadata:
    """The catalog of one database; see `ingestd.ports.Metadata`. Nothing stays open."""

    def __init__(self, dsn: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._dsn = dsn
        self._timeout_s = timeout_s

    async def schemas(self) -> Sequence[str]:
        """Ask pg_class."""
        async with self._session("schemas") as connection:
            cursor = await connection.execute(_SCHEMAS)
            return [name for (name,) in await cursor.fetchall()]

    async def tables(self, schema: str) -> Sequence[TableInfo]:
        """Ask pg_class, pg_attribute and pg_stats."""
        async with self._session(f"tables of schema {schema!r}") as connection:
            cursor = await connection.execute(_TABLES, (schema,))
            tables = await cursor.fetchall()
            cursor = await connection.execute(_COLUMNS, ([oid for oid, *_ in tables],))
            columns: dict[int, list[ColumnInfo]] = {}
            for oid, *facts in await cursor.fetchall():
                columns.setdefault(oid, []).append(ColumnInfo(*facts))
        return [
            TableInfo(
                id=TableId(schema, name),
                columns=tuple(columns.get(oid, ())),
                key=tuple(key),
                replica_identity=identity,
                comment=comment,
                rows=rows,
                bytes=nbytes,
            )
            for oid, name, identity, comment, key, rows, nbytes in tables
        ]

    @asynccontextmanager
    async def _session(self, doing: str) -> AsyncGenerator[AsyncConnection[Any], None]:
        """Connect; whatever happens inside ends in time, and fails as the port says."""
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await connect(
                    self._dsn, autocommit=False, statement_timeout_s=self._timeout_s
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
