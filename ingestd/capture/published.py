"""What a publication sends, and what that means for a table.

Source: PostgreSQL documentation, "System Catalogs" (pg_publication, pg_publication_rel), "Logical
Replication", "Row Filters" and "Column Lists".
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from psycopg import AsyncConnection, sql
from psycopg.rows import class_row

from ingestd.errors import TableError
from ingestd.schema import Table, TableId

_PUBLICATION = """
SELECT puballtables AS all_tables, pubviaroot AS via_root,
       pubinsert AND pubupdate AND pubdelete AND pubtruncate AS all_operations,
       pg_has_role(pubowner, 'USAGE') AND NOT pg_is_in_recovery() AS owned,
       pg_is_in_recovery() AS on_standby
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
    """A publication's flags. `owned`: this role may alter it, which nobody may `on_standby`."""

    all_tables: bool
    via_root: bool
    all_operations: bool
    owned: bool
    on_standby: bool = False


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


def only_inserts(table: Table, found: Published | None, unsent: Collection[str] = ()) -> str | None:
    """Say why the server refuses UPDATE and DELETE of this table once published; None if not.

    `table` as the catalog has it. `unsent`: see `Catalog.unsent_of`. Source: PostgreSQL,
    CheckCmdReplicaIdentity.
    """
    if not table.identity:
        return "no usable replica identity"
    if table.replica_identity == "f" and unsent:
        return f"REPLICA IDENTITY FULL, with generated column {min(unsent)!r} that is not published"
    if found is not None and found.columns is not None:
        hidden = [n for n in table.identity if n not in found.columns]
        if hidden:
            return f"its column list lacks {hidden[0]!r} of the replica identity"
    return None


def identify(
    table: Table,
    name: str = "",
    found: Published | None = None,
    unsent: Collection[str] = (),
) -> str:
    """Write what gives the table an identity, or publication `name` the columns of it."""
    quoted = sql.Identifier(table.id.schema, table.id.name).as_string(None)
    if unsent and (table.replica_identity == "f" or not table.key):
        key = "" if table.key else "add a primary key without generated columns; then "
        return f"{key}ALTER TABLE {quoted} REPLICA IDENTITY DEFAULT;"
    if table.identity and found is not None and found.columns is not None:
        whole = "ALTER PUBLICATION {0} DROP TABLE {1}; ALTER PUBLICATION {0} ADD TABLE {1};"
        return whole.format(sql.Identifier(name).as_string(None), quoted)
    if table.replica_identity == "n" and table.key:
        return f"ALTER TABLE {quoted} REPLICA IDENTITY DEFAULT;"
    return f"add a primary key, or ALTER TABLE {quoted} REPLICA IDENTITY FULL;"


def unidentified(
    table: Table, found: Published | None, *, manage: bool, unsent: Collection[str] = ()
) -> TableError | None:
    """Refuse a table that publishing would break, unless others publish it already.

    Then the harm is theirs, and only inserts and truncates can come: they are captured. `unsent`:
    see `Catalog.unsent_of`.
    """
    if found is not None and not (manage and found.membership is not None):
        return None
    why = only_inserts(table, None, unsent)
    if why is None:
        return None
    return TableError(
        table.id,
        f"{why}: publishing it would make its own UPDATE and DELETE fail",
        remedy=identify(table, unsent=unsent),
    )
