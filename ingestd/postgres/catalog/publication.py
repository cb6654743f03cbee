"""The contents of a publication.

Source: PostgreSQL documentation, "System Catalogs" (pg_publication, pg_publication_rel), "Logical
Replication", "Row Filters" and "Column Lists".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from psycopg import AsyncConnection, sql
from psycopg.rows import class_row

from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from ingestd.postgres.connection.names import odd_names

_PUBLICATION = """
SELECT puballtables AS all_tables, pubviaroot AS via_root,
       pubinsert AND pubupdate AND pubdelete AND pubtruncate AS all_operations,
       pg_has_role(pubowner, 'USAGE') AND NOT pg_is_in_recovery() AS owned,
       pg_is_in_recovery() AS on_standby,
       xmin::text AS altered
  FROM pg_publication WHERE pubname = %s
"""
FIRST_WITH_PARTS = 150000
"""PostgreSQL 15 brought column lists, row filters, and schemas."""
# The contents of pg_publication_tables, with the entry that publishes each table. The view itself
# is not used: servers from 16 on open every table for it, so a locked one would block the query.
_PUBLISHED = """
WITH RECURSIVE publication AS (
  SELECT * FROM pg_catalog.pg_publication WHERE pubname = %s
), publishable AS (
  SELECT oid, relname, relnamespace, relkind, relispartition FROM pg_catalog.pg_class
   WHERE relkind IN ('r', 'p') AND relpersistence = 'p' AND oid >= 16384
), member AS (
  SELECT c.oid, r.oid AS rel, {schema} AS schema, {list} AS list, {filter} AS filter
    FROM publication p CROSS JOIN publishable c
    LEFT JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid {schemas}
   WHERE p.puballtables OR r.oid IS NOT NULL OR {schema} IS NOT NULL
), part AS (
  SELECT c.oid FROM publishable c JOIN pg_catalog.pg_inherits i ON i.inhrelid = c.oid
    JOIN member ON member.oid = i.inhparent
   WHERE c.relispartition AND NOT i.inhdetachpending
   UNION
  SELECT c.oid FROM publishable c JOIN pg_catalog.pg_inherits i ON i.inhrelid = c.oid
    JOIN part ON part.oid = i.inhparent
   WHERE c.relispartition AND NOT i.inhdetachpending
)
SELECT n.nspname, c.relname, m.rel::int8, coalesce(m.rel, m.schema, p.oid)::int8,
       {parts}, {generated}
  FROM publication p CROSS JOIN publishable c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  LEFT JOIN member m ON m.oid = c.oid
  LEFT JOIN part ON part.oid = c.oid
 WHERE CASE WHEN p.pubviaroot THEN m.oid IS NOT NULL AND part.oid IS NULL
            ELSE c.relkind = 'r' AND (m.oid IS NOT NULL OR part.oid IS NOT NULL) END
"""
_LISTS_SCHEMAS = """
SELECT EXISTS (SELECT FROM pg_publication_namespace n JOIN pg_publication p ON p.oid = n.pnpubid
                WHERE p.pubname = %s)
"""
_SCHEMAS = """
    LEFT JOIN pg_catalog.pg_publication_namespace s
           ON s.pnpubid = p.oid AND s.pnnspid = c.relnamespace"""
# Not as SQL: writing that would lock every filtered table (see `published_filters`). A filter does
# not apply if the table's schema is published, too.
_PARTS = """CASE WHEN m.list IS NOT NULL THEN
         ARRAY(SELECT a.attname::text FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid
                  AND a.attnum = ANY(m.list) ORDER BY a.attnum) END,
       CASE WHEN m.schema IS NULL THEN pg_catalog.md5(m.filter::text) END"""
_WHOLE = "NULL::text[], NULL::text"
WITH_GENERATED = 180000
"""From PostgreSQL 18 on generated columns can be sent. UPDATE and DELETE are refused if an identity
contains one that is not sent."""
_GENERATED = """ARRAY(SELECT a.attname::text FROM pg_catalog.pg_attribute a
                WHERE a.attrelid = c.oid AND a.attgenerated <> ''
                  AND CASE WHEN m.list IS NOT NULL THEN a.attnum = ANY(m.list)
                           ELSE p.pubgencols = 's' AND a.attgenerated = 's' END)"""
_NO_GENERATED = "'{}'::text[]"


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication's flags. `owned`: this role may alter it; no role may `on_standby`.

    `altered`: the transaction that last altered it, other than by adding or dropping tables.
    """

    all_tables: bool
    via_root: bool
    all_operations: bool
    owned: bool
    on_standby: bool = False
    altered: str = ""

    @property
    def is_complete(self) -> bool:
        """Return whether it sends all changes, those of partitions as their root's."""
        return self.all_operations and self.via_root


@dataclass(frozen=True, slots=True)
class Published:
    """What a publication sends of a table.

    `columns`: its column list, None for all columns published by default. `filter_digest`: of its
    row filter, None for all rows. `row_filter`: as SQL; set by `with_row_filters` only, as is
    `filter_fault`, if it can't be read. `membership`: OID of the publication's entry for this
    table; None if it is published with its schema or with all tables. `entry`: OID of what
    publishes it: the entry of the table, of its schema, or the publication itself. It changes if
    the table was removed and added again; 0 if unknown. `generated`: the generated columns that are
    sent (18+, listed or by option).
    """

    columns: frozenset[str] | None
    row_filter: str | None
    membership: int | None
    generated: frozenset[str] = frozenset()
    entry: int = 0
    filter_digest: str | None = field(default=None, compare=False)
    filter_fault: TableError | None = field(default=None, compare=False)

    def has_filter_of(self, other: Published) -> bool:
        """Return whether both have the same row filter, of the same entry."""
        return (self.membership, self.filter_digest) == (other.membership, other.filter_digest)


async def lists_schemas(connection: AsyncConnection[Any], name: str) -> bool:
    """Return whether a publication has schemas, with all of their tables. Raises psycopg.Error."""
    if connection.info.server_version < FIRST_WITH_PARTS:
        return False
    row = await (await connection.execute(_LISTS_SCHEMAS, (name,))).fetchone()
    return bool(row and row[0])


async def find_publication(connection: AsyncConnection[Any], name: str) -> Publication | None:
    """Return the publication; None if it is missing."""
    async with connection.cursor(row_factory=class_row(Publication)) as cursor:
        await cursor.execute(_PUBLICATION, (name,))
        return await cursor.fetchone()


async def published(
    connection: AsyncConnection[Any], name: str, server_version: int
) -> dict[TableId, Published]:
    """Return every published table (by list, schema or all tables) and what is sent of it.

    Locks no table. The row filters are not read: see `with_row_filters`.
    Names that no query can refer to are omitted: another name may be written alike, and such
    tables are never captured.
    """
    query = sql.SQL(_PUBLISHED).format(**_by_version(server_version))
    rows = await (await connection.execute(query, (name,))).fetchall()
    return {
        TableId(schema, table): Published(
            None if columns is None else frozenset(columns) - set(odd_names(*columns)),
            None,
            membership,
            frozenset(made),
            entry,
            filter_digest,
        )
        for schema, table, membership, entry, columns, filter_digest, made in rows
        if not odd_names(schema, table)
    }


def _by_version(server_version: int) -> dict[str, sql.SQL]:
    """Return the parts that complete _PUBLISHED."""
    found = {
        "schema": sql.SQL("NULL::oid"),
        "schemas": sql.SQL(""),
        "list": sql.SQL("NULL"),
        "filter": sql.SQL("NULL"),
        "parts": sql.SQL(_WHOLE),
        "generated": sql.SQL(_NO_GENERATED),
    }
    if server_version >= FIRST_WITH_PARTS:
        found |= {
            "schema": sql.SQL("s.oid"),
            "schemas": sql.SQL(_SCHEMAS),
            "list": sql.SQL("r.prattrs::int2[]"),
            "filter": sql.SQL("r.prqual"),
            "parts": sql.SQL(_PARTS),
        }
    if server_version >= WITH_GENERATED:
        found["generated"] = sql.SQL(_GENERATED)
    return found
