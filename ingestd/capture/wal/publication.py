"""The publication: which tables the server sends, and which of their columns and rows.

Source: PostgreSQL documentation, CREATE PUBLICATION and ALTER PUBLICATION, "Logical Replication",
"Column Lists" and "Row Filters".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from psycopg import AsyncConnection, AsyncCursor, sql
from psycopg.rows import class_row

from ingestd.config import SourceSettings, TableSettings
from ingestd.errors import OperatorError, TableError
from ingestd.schema import Table, TableId

_PUBLICATION = """
SELECT puballtables AS all_tables, pubviaroot AS via_root,
       pubinsert AND pubupdate AND pubdelete AND pubtruncate AS all_operations,
       pg_has_role(pubowner, 'USAGE') AS owned
  FROM pg_publication WHERE pubname = %s
"""
_TABLES = "SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname = %s"
_EXPLICIT = """
SELECT n.nspname, c.relname
  FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
  JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE p.pubname = %s
"""
FIRST_WITH_PARTS = 150000
"""PostgreSQL 15 brought column lists and row filters."""
# The view knows that a filter does not hold where the table's schema is published too; only
# pg_publication_rel tells a list from all columns, and one membership from the next.
_PUBLISHED = """
SELECT t.schemaname, t.tablename, r.oid::int8 AS membership, {parts}
  FROM pg_publication_tables t
  JOIN pg_publication p ON p.pubname = t.pubname
  JOIN pg_namespace n ON n.nspname = t.schemaname
  JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
  LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid
 WHERE t.pubname = %s
"""
_PARTS = """CASE WHEN r.prattrs IS NOT NULL THEN
         ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = c.oid
                  AND a.attnum = ANY(r.prattrs::int2[]) ORDER BY a.attnum) END, t.rowfilter"""
_WHOLE = "NULL::text[], NULL::text"
# Of a partition the server looks at its own replica identity, whatever the root's is.
_UNCOVERED = """
SELECT EXISTS (
  SELECT FROM (SELECT to_regclass(%(table)s)::oid AS relid UNION
               SELECT relid FROM pg_partition_tree(to_regclass(%(table)s)::oid)) tree
    JOIN pg_class c ON c.oid = tree.relid
   WHERE c.relreplident = 'f'
      OR EXISTS (SELECT FROM pg_index i, unnest(i.indkey::int2[]) k(number)
                   JOIN pg_attribute a ON a.attnum = k.number
                  WHERE i.indrelid = c.oid AND a.attrelid = c.oid
                    AND CASE c.relreplident WHEN 'i' THEN i.indisreplident
                             WHEN 'd' THEN i.indisprimary ELSE false END
                    AND a.attname <> ALL(%(columns)s::name[])))
"""
_BY_SCHEMA = """
SELECT EXISTS (SELECT FROM pg_publication_namespace n JOIN pg_publication p ON p.oid = n.pnpubid
                WHERE p.pubname = %s)
"""
_OPTIONS = "publish = 'insert, update, delete, truncate', publish_via_partition_root = true"


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication's flags. `owned`: this role may alter it."""

    all_tables: bool
    via_root: bool
    all_operations: bool
    owned: bool


@dataclass(frozen=True, slots=True)
class Published:
    """What a publication sends of a table.

    `columns`: its column list, None for all that are published by themselves. `row_filter`: as
    SQL, None for all rows. `membership`: names the publication's entry for this table, another one
    if the table was taken out and put back; None where it is published with its schema or with all
    tables.
    """

    columns: frozenset[str] | None
    row_filter: str | None
    membership: int | None


ColumnLists = Mapping[TableId, Sequence[str]]
"""Column lists that are wanted; a table that is not there is published with all columns."""
WHOLE: ColumnLists = MappingProxyType({})


async def find_publication(connection: AsyncConnection[Any], name: str) -> Publication | None:
    """Read the publication; None if there is none."""
    async with connection.cursor(row_factory=class_row(Publication)) as cursor:
        await cursor.execute(_PUBLICATION, (name,))
        return await cursor.fetchone()


async def published_tables(connection: AsyncConnection[Any], name: str) -> set[TableId]:
    """Give every table it publishes, however it came to (list, schema, all tables)."""
    cursor = await connection.execute(_TABLES, (name,))
    return {TableId(*row) for row in await cursor.fetchall()}


async def published(
    connection: AsyncConnection[Any], name: str, server_version: int
) -> dict[TableId, Published]:
    """Give every table it publishes, however it came to (list, schema, all tables), and how."""
    parts = _PARTS if server_version >= FIRST_WITH_PARTS else _WHOLE
    cursor = await connection.execute(sql.SQL(_PUBLISHED).format(parts=sql.SQL(parts)), (name,))
    return {
        TableId(schema, table): Published(
            None if columns is None else frozenset(columns), row_filter, membership
        )
        for schema, table, membership, columns, row_filter in await cursor.fetchall()
    }


def column_list(
    table: Table, controls: TableSettings, server_version: int
) -> tuple[str, ...] | None:
    """Give the column list that keeps excluded columns from being sent; None: send all.

    `table` as captured. With REPLICA IDENTITY FULL a list would have to have every column, else
    the server refuses the source's UPDATE and DELETE: there the stream drops them.
    """
    if server_version < FIRST_WITH_PARTS or not controls.exclude_columns:
        return None
    if table.replica_identity == "f":
        return None
    return tuple(c.name for c in table.columns)


def column_lists(
    tables: Iterable[Table], settings: SourceSettings, server_version: int
) -> ColumnLists:
    """Give the column lists that these tables, as captured, are to have."""
    lists = {t.id: column_list(t, settings.controls(t.id), server_version) for t in tables}
    return {table: columns for table, columns in lists.items() if columns is not None}


def outdated(
    present: Mapping[TableId, Published], tables: Iterable[TableId], lists: ColumnLists
) -> set[TableId]:
    """Give those of these tables that have an entry of their own with another column list."""
    return {
        t
        for t in tables
        if t in present
        and present[t].membership is not None
        and present[t].columns != (frozenset(lists[t]) if t in lists else None)
    }


def only_inserts(table: Table, found: Published | None) -> str | None:
    """Say why the server refuses UPDATE and DELETE of this table once published; None if not.

    `table` as the catalog has it. Source: PostgreSQL, CheckCmdReplicaIdentity.
    """
    if not table.identity:
        return "no usable replica identity"
    if found is not None and found.columns is not None:
        hidden = [n for n in table.identity if n not in found.columns]
        if hidden:
            return f"its column list lacks {hidden[0]!r} of the replica identity"
    return None


def identify(table: Table, name: str = "", found: Published | None = None) -> str:
    """Write what gives the table an identity, or publication `name` the columns of it."""
    quoted = sql.Identifier(table.id.schema, table.id.name).as_string(None)
    if table.identity and found is not None and found.columns is not None:
        whole = "ALTER PUBLICATION {0} DROP TABLE {1}; ALTER PUBLICATION {0} ADD TABLE {1};"
        return whole.format(sql.Identifier(name).as_string(None), quoted)
    if table.replica_identity == "n" and table.key:
        return f"ALTER TABLE {quoted} REPLICA IDENTITY DEFAULT;"
    return f"add a primary key, or ALTER TABLE {quoted} REPLICA IDENTITY FULL;"


def unidentified(table: Table, found: Published | None, *, manage: bool) -> TableError | None:
    """Refuse a table that publishing would break, unless others publish it already.

    Then the harm is theirs, and only inserts and truncates can come: they are captured.
    """
    if table.identity or (found is not None and not (manage and found.membership is not None)):
        return None
    return TableError(
        table.id,
        "no usable replica identity: publishing it would make its own UPDATE and DELETE fail",
        remedy=identify(table),
    )


def create_statement(
    name: str, tables: Iterable[TableId], lists: ColumnLists = WHOLE
) -> sql.Composed:
    """Write the CREATE PUBLICATION for these tables, none included."""
    create = sql.SQL("CREATE PUBLICATION {}").format(sql.Identifier(name))
    listed = _table_list(tables, lists)
    if listed is not None:
        create = create + sql.SQL(" FOR TABLE ") + listed
    return create + sql.SQL(f" WITH ({_OPTIONS})")


def add_statement(
    name: str,
    tables: Iterable[TableId],
    lists: ColumnLists = WHOLE,
    filters: Mapping[TableId, str | None] = MappingProxyType({}),
) -> sql.Composed:
    """Write the ALTER PUBLICATION that adds these tables (at least one)."""
    listed = _table_list(tables, lists, filters)
    assert listed is not None
    return sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(sql.Identifier(name), listed)


async def keep_publication(
    connection: AsyncConnection[Any],
    name: str,
    tables: Sequence[TableId],
    lists: ColumnLists = WHOLE,
) -> None:
    """Create the publication or alter it until it publishes exactly these tables and columns.

    Idempotent, one transaction. `lists`: see `column_list`; a list that was set by hand and is not
    wanted is taken away, a row filter is kept. A table whose entry changes gets another
    `Published.membership`. A publication FOR ALL TABLES or by schema can have no lists and is left
    as it is: what it sends beyond `tables` and `lists` is ignored.
    """
    found = await find_publication(connection, name)
    async with connection.transaction():
        lists = await possible_lists(connection, name, lists)
        if found is None:
            statements = [create_statement(name, tables, lists)]
        else:
            statements = await _alterations(connection, name, found, set(tables), lists)
        for statement in statements:
            await connection.execute(statement)


async def possible_lists(
    connection: AsyncConnection[Any], name: str, lists: ColumnLists
) -> ColumnLists:
    """Leave out the lists that the server would refuse, or that would break the source's writes."""
    if not lists or connection.info.server_version < FIRST_WITH_PARTS:
        return WHOLE
    cursor = await connection.execute(_BY_SCHEMA, (name,))
    if await _is_true(cursor):
        return WHOLE
    possible = {}
    for table, columns in lists.items():
        quoted = sql.Identifier(table.schema, table.name).as_string(None)
        cursor = await connection.execute(_UNCOVERED, {"table": quoted, "columns": list(columns)})
        if not await _is_true(cursor):
            possible[table] = columns
    return possible


async def _is_true(cursor: AsyncCursor[Any]) -> bool:
    row = await cursor.fetchone()
    return bool(row and row[0])


async def _alterations(
    connection: AsyncConnection[Any],
    name: str,
    found: Publication,
    wanted: set[TableId],
    lists: ColumnLists,
) -> list[sql.Composed]:
    statements = []
    if not (found.all_operations and found.via_root):
        statements.append(
            sql.SQL("ALTER PUBLICATION {} SET (" + _OPTIONS + ")").format(sql.Identifier(name))
        )
    if found.all_tables:
        return statements
    present = await published(connection, name, connection.info.server_version)
    cursor = await connection.execute(_EXPLICIT, (name,))
    explicit = {TableId(*row) for row in await cursor.fetchall()}
    changed = outdated(present, explicit & wanted, lists)
    surplus = _table_list((explicit - wanted) | changed)
    if surplus is not None:
        statements.append(
            sql.SQL("ALTER PUBLICATION {} DROP TABLE {}").format(sql.Identifier(name), surplus)
        )
    missing = (wanted - present.keys()) | changed
    if missing:
        filters = {table: present[table].row_filter for table in changed}
        statements.append(add_statement(name, missing, lists, filters))
    return statements


def check_publication(
    name: str,
    found: Publication | None,
    tables: Sequence[TableId],
    lists: ColumnLists = WHOLE,
) -> OperatorError | None:
    """Say what is wrong with a publication that is not ours to alter (manage = false)."""
    if found is None:
        return OperatorError(
            f"publication {name!r} does not exist, and manage = false",
            remedy=create_statement(name, tables, lists).as_string(None) + ";",
        )
    if not (found.all_operations and found.via_root):
        alter = sql.SQL("ALTER PUBLICATION {} SET (" + _OPTIONS + ")").format(sql.Identifier(name))
        return OperatorError(
            f"publication {name!r} does not send everything that is needed",
            remedy=alter.as_string(None) + ";",
        )
    return None


def _table_list(
    tables: Iterable[TableId],
    lists: ColumnLists = WHOLE,
    filters: Mapping[TableId, str | None] = MappingProxyType({}),
) -> sql.Composed | None:
    entries = []
    for table in sorted(tables):
        entry: sql.Composable = sql.Identifier(table.schema, table.name)
        if table in lists:
            columns = sql.SQL(", ").join(map(sql.Identifier, lists[table]))
            entry = sql.SQL("{} ({})").format(entry, columns)
        row_filter = filters.get(table)
        if row_filter is not None:
            entry = sql.SQL("{} WHERE ({})").format(entry, sql.SQL(row_filter))
        entries.append(entry)
    return sql.SQL(", ").join(entries) if entries else None


async def owned_by_others(
    connection: AsyncConnection[Any], tables: Sequence[TableId]
) -> list[TableId]:
    """Give those of these tables that this role does not own and so can't publish."""
    cursor = await connection.execute(
        """
        SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
          JOIN unnest(%s::text[], %s::text[]) AS t(nspname, relname) USING (nspname, relname)
         WHERE NOT pg_has_role(c.relowner, 'USAGE')
        """,
        ([t.schema for t in tables], [t.name for t in tables]),
    )
    return [TableId(*row) for row in await cursor.fetchall()]


async def owners_statement(
    connection: AsyncConnection[Any],
    name: str,
    tables: Sequence[TableId],
    lists: ColumnLists = WHOLE,
) -> str:
    """Write what an owner of the tables must run so that the publication has them all."""
    if await find_publication(connection, name) is None:
        return create_statement(name, tables, lists).as_string(None) + ";"
    missing = set(tables) - await published_tables(connection, name)
    return add_statement(name, missing or tables, lists).as_string(None) + ";"
