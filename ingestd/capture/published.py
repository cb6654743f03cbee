"""What a publication sends.

Source: PostgreSQL documentation, "System Catalogs" (pg_publication, pg_publication_rel), "Logical
Replication", "Row Filters" and "Column Lists".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psycopg import AsyncConnection, sql
from psycopg.rows import class_row

from ingestd.schema import TableId

_PUBLICATION = """
SELECT puballtables AS all_tables, pubviaroot AS via_root,
       pubinsert AND pubupdate AND pubdelete AND pubtruncate AS all_operations,
       pg_has_role(pubowner, 'USAGE') AND NOT pg_is_in_recovery() AS owned,
       pg_is_in_recovery() AS on_standby,
       xmin::text::int8 AS altered, pubowner::int8 AS owner
  FROM pg_publication WHERE pubname = %s
"""
FIRST_WITH_PARTS = 150000
"""PostgreSQL 15 brought column lists, row filters, and schemas."""
# The view knows that a filter does not hold where the table's schema is published too; only
# pg_publication_rel tells a list from all columns, and one membership from the next.
_PUBLISHED = """
SELECT t.schemaname, t.tablename, r.oid::int8 AS membership, {entry}::int8, {parts}, {generated}
  FROM pg_publication_tables t
  JOIN pg_publication p ON p.pubname = t.pubname
  JOIN pg_namespace n ON n.nspname = t.schemaname
  JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
  LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid
 WHERE t.pubname = %s
"""
_ENTRY = """coalesce(r.oid, (SELECT s.oid FROM pg_publication_namespace s
                  WHERE s.pnpubid = p.oid AND s.pnnspid = n.oid), p.oid)"""
_ENTRY_OR_ALL = "coalesce(r.oid, p.oid)"
_PARTS = """CASE WHEN r.prattrs IS NOT NULL THEN
         ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = c.oid
                  AND a.attnum = ANY(r.prattrs::int2[]) ORDER BY a.attnum) END, t.rowfilter"""
_WHOLE = "NULL::text[], NULL::text"
WITH_GENERATED = 180000
"""PostgreSQL 18 can send generated columns, and refuses what follows where it does not."""
_GENERATED = """ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = c.oid
                  AND a.attgenerated <> '' AND a.attname = ANY(t.attnames))"""
_NO_GENERATED = "'{}'::text[]"


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication's flags. `owned`: this role may alter it, which nobody may `on_standby`.

    `altered`: the transaction that altered it last, other than by adding or dropping tables.
    """

    all_tables: bool
    via_root: bool
    all_operations: bool
    owned: bool
    on_standby: bool = False
    altered: int = 0
    owner: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether it sends all changes, those of partitions as their root's."""
        return self.all_operations and self.via_root

    @property
    def mark(self) -> str:
        """What tells it from what it was before it was altered (`was_altered`)."""
        return f"{self.altered}:{self.owner}"


def was_altered(then: str, now: str) -> bool:
    """Whether a publication was altered between two marks: for a time it may not have sent all.

    Not if either is not known, or another owner may be all that is new.
    """
    return bool(then and now) and then != now and then.split(":")[1] == now.split(":")[1]


@dataclass(frozen=True, slots=True)
class Published:
    """What a publication sends of a table.

    `columns`: its column list, None for all that are published by themselves. `row_filter`: as
    SQL, None for all rows. `membership`: names the publication's entry for this table; None where
    it is published with its schema or with all tables. `entry`: names what publishes it, the entry
    of the table, of its schema, or the publication itself: another one if it was taken out and put
    back, 0 if that is not known. `generated`: the generated columns that are sent (18+, listed or
    by option).
    """

    columns: frozenset[str] | None
    row_filter: str | None
    membership: int | None
    generated: frozenset[str] = frozenset()
    entry: int = 0


async def find_publication(connection: AsyncConnection[Any], name: str) -> Publication | None:
    """Read the publication; None if there is none."""
    async with connection.cursor(row_factory=class_row(Publication)) as cursor:
        await cursor.execute(_PUBLICATION, (name,))
        return await cursor.fetchone()


async def published(
    connection: AsyncConnection[Any], name: str, server_version: int
) -> dict[TableId, Published]:
    """Give every table it publishes, however it came to (list, schema, all tables), and how."""
    parts = _PARTS if server_version >= FIRST_WITH_PARTS else _WHOLE
    generated = _GENERATED if server_version >= WITH_GENERATED else _NO_GENERATED
    entry = _ENTRY if server_version >= FIRST_WITH_PARTS else _ENTRY_OR_ALL
    query = sql.SQL(_PUBLISHED).format(
        entry=sql.SQL(entry), parts=sql.SQL(parts), generated=sql.SQL(generated)
    )
    cursor = await connection.execute(query, (name,))
    return {
        TableId(schema, table): Published(
            None if columns is None else frozenset(columns),
            row_filter,
            membership,
            frozenset(made),
            entry,
        )
        for schema, table, membership, entry, columns, row_filter, made in await cursor.fetchall()
    }
