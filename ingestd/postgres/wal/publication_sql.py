"""Creates, alters and checks the publication: the tables and columns that the server sends.

Source: PostgreSQL documentation, CREATE PUBLICATION and ALTER PUBLICATION, "Column Lists".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncConnection, AsyncCursor, sql

from ingestd.config import SourceSettings, TableSettings
from ingestd.failpoints import reach_async
from ingestd.model.errors import OperatorError, TableError
from ingestd.model.schema import Table, TableId
from ingestd.postgres.catalog.publication import (
    FIRST_WITH_PARTS,
    Publication,
    Published,
    find_publication,
    published,
)
from ingestd.postgres.catalog.published_filters import read_row_filters
from ingestd.postgres.connection.errors import cut_off
from ingestd.postgres.connection.quoting import printed
from ingestd.postgres.connection.server_messages import loggable_message

_EXPLICIT = """
SELECT n.nspname, c.relname
  FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
  JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE p.pubname = %s
"""
# For a partition the server uses its own replica identity, not the root's. (pg_partition_tree would
# lock the partitions.)
_UNCOVERED = """
WITH RECURSIVE tree AS (
  SELECT to_regclass(%(table)s)::oid AS relid
  UNION
  SELECT i.inhrelid FROM tree t JOIN pg_class c ON c.oid = t.relid AND c.relkind = 'p'
    JOIN pg_inherits i ON i.inhparent = t.relid)
SELECT EXISTS (
  SELECT FROM tree
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
_PARTITIONED = """
SELECT n.nspname::text, c.relname::text FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'p' AND NOT c.relispartition
"""
_SENDS_GENERATED = (
    "SELECT EXISTS (SELECT FROM pg_publication WHERE pubname = %s AND pubgencols <> 'n')"
)
_SINCE: dict[LiteralString, int] = {_BY_SCHEMA: FIRST_WITH_PARTS, _SENDS_GENERATED: 180000}
ONE_LOCK_TIMEOUT = "500ms"
_NEXT_LOCK_TIMEOUT = "10ms"
"""Once one table was locked: those that are ready are locked themselves until the end."""
# The first minor versions that apply a change of a publication to transactions in progress. Others
# would lack what a transaction that began before writes first to a table after it: it is not in the
# old publication's. Source: PostgreSQL's release notes, "Prevent data loss when DDL operations that
# don't take a strong lock"; one version later than these, which had a defect of memory.
_REPLACES_FROM = {14: 140019, 15: 150014, 16: 160010, 17: 170006}
_OPTIONS = "publish = 'insert, update, delete, truncate', publish_via_partition_root = true"

ColumnLists = Mapping[TableId, Sequence[str]]
"""The wanted column lists; a table without an entry is published with all columns."""
WHOLE: ColumnLists = MappingProxyType({})


def column_list(
    table: Table, controls: TableSettings, server_version: int
) -> tuple[str, ...] | None:
    """Return the column list that keeps excluded columns from being sent; None: send all.

    `table` as captured. With REPLICA IDENTITY FULL a list must have every column, or the server
    rejects UPDATE and DELETE on the source: there the stream drops the columns instead.
    """
    if server_version < FIRST_WITH_PARTS or not controls.exclude_columns:
        return None
    if table.replica_identity == "f":
        return None
    return tuple(c.name for c in table.columns)


def column_lists(
    tables: Iterable[Table], settings: SourceSettings, server_version: int
) -> ColumnLists:
    """Return the column lists that these captured tables need."""
    lists = {t.id: column_list(t, settings.controls(t.id), server_version) for t in tables}
    return {table: columns for table, columns in lists.items() if columns is not None}


def outdated(
    present: Mapping[TableId, Published], tables: Iterable[TableId], lists: ColumnLists
) -> set[TableId]:
    """Return those of these tables whose own entry has another column list."""
    return {
        t
        for t in tables
        if t in present
        and present[t].membership is not None
        and present[t].columns != (frozenset(lists[t]) if t in lists else None)
    }


def create_statement(
    name: str, tables: Iterable[TableId], lists: ColumnLists = WHOLE
) -> sql.Composed:
    """Return the CREATE PUBLICATION for these tables, which may be none."""
    create = sql.SQL("CREATE PUBLICATION {}").format(sql.Identifier(name))
    listed = _table_list(tables, lists)
    if listed is not None:
        create = create + sql.SQL(" FOR TABLE ") + listed
    return create + sql.SQL(f" WITH ({_OPTIONS})")


def add_statement(
    name: str,
    tables: Iterable[TableId],
    lists: ColumnLists = WHOLE,
    filters: Mapping[TableId, str] = MappingProxyType({}),
) -> sql.Composed:
    """Return the ALTER PUBLICATION that adds these tables (at least one)."""
    listed = _table_list(tables, lists, filters)
    assert listed is not None
    return sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(sql.Identifier(name), listed)


async def keep_publication(
    connection: AsyncConnection[Any],
    name: str,
    tables: Sequence[TableId],
    lists: ColumnLists = WHOLE,
) -> None:
    """Create or alter the publication until it publishes exactly these tables and columns.

    Idempotent, one transaction. `lists`: see `column_list`; a list that was set by hand and is not
    wanted is removed, a row filter is kept. A table whose entry changes gets another
    `Published.membership`. A publication FOR ALL TABLES or by schema can have no lists and is left
    unchanged: what it sends beyond `tables` and `lists` is ignored.
    """
    found = await find_publication(connection, name)
    async with connection.transaction():
        lists = await possible_lists(connection, name, lists)
        if found is None:
            statements = [create_statement(name, tables, lists)]
        else:
            if not found.is_complete:
                # First: no table is added while the publication sends partitions separately.
                await connection.execute(complete_statement(name))
            statements = await _alterations(connection, name, found, set(tables), lists)
        if statements:
            await reach_async("capture.publication.before", cut_off)
        for statement in statements:
            await connection.execute(statement)
    if statements:
        await reach_async("capture.publication.after", cut_off)


async def keep_each(
    connection: AsyncConnection[Any],
    name: str,
    tables: Sequence[TableId],
    lists: ColumnLists = WHOLE,
    *,
    is_trial: bool = False,
) -> dict[TableId, psycopg.Error]:
    """Add tables one by one after the server refused them together; return which fail, and why.

    A table that is locked (while an index is built, say) is refused only for now. Entries of the
    refused tables stay as they are, and so do tables that are no longer wanted. `is_trial`: change
    nothing, roll everything back.
    """
    async with connection.transaction(force_rollback=True) if is_trial else nullcontext():
        await connection.execute(f"SET lock_timeout = '{ONE_LOCK_TIMEOUT}'")
        found = await find_publication(connection, name)
        if found is None:
            await connection.execute(create_statement(name, ()))
        elif not found.is_complete:
            await connection.execute(complete_statement(name))
        present = await published(connection, name, connection.info.server_version)
        lists = await possible_lists(connection, name, lists)
        stale = outdated(present, tables, lists)
        refused: dict[TableId, psycopg.Error] = {}
        for table in tables:
            if table in present and table not in stale:
                continue
            own = {table: present[table]} if table in present else {}
            try:
                async with connection.transaction(force_rollback=is_trial):
                    filters = await read_row_filters(connection, own)
                    if table in stale:
                        await connection.execute(_drop_statement(name, [table]))
                    await connection.execute(add_statement(name, [table], lists, filters))
            except psycopg.Error as error:
                if connection.closed:
                    raise
                refused[table] = error
    return refused


async def must_be_replaced(
    connection: AsyncConnection[Any], name: str, tables: Collection[TableId]
) -> bool:
    """Return whether the publication lists other tables than these, and may be replaced.

    Not one with what the statements here don't re-create: a schema, generated columns.
    """
    version = connection.info.server_version
    if version < _REPLACES_FROM.get(version // 10000, 0):
        return False
    for has_more in (_BY_SCHEMA, _SENDS_GENERATED):
        since = _SINCE[has_more]
        if version >= since and await _is_true(await connection.execute(has_more, (name,))):
            return False
    present = await published(connection, name, version)
    is_own = all(each.membership is not None for each in present.values())
    return is_own and not present.keys() <= set(tables)


async def replace_publication(
    connection: AsyncConnection[Any],
    name: str,
    tables: Sequence[TableId],
    lists: ColumnLists = WHOLE,
) -> dict[TableId, psycopg.Error]:
    """Drop and re-create the publication with these tables; return those that fail, and why.

    In one transaction, so the WAL always has one of the two: nothing is lost, also of transactions
    in progress (`_REPLACES_FROM`). Unlike a table that is dropped from a publication, one that is
    not in the new one need not be locked, so its owner's lock does not keep it published. Row
    filters are kept. Raises psycopg.Error.
    """
    refused: dict[TableId, psycopg.Error] = {}
    filters: dict[TableId, str] = {}

    async def try_each(do: Callable[[TableId], Awaitable[None]], each: Iterable[TableId]) -> None:
        for table in each:
            try:
                async with connection.transaction():
                    await do(table)
            except psycopg.Error as error:
                if connection.closed:
                    raise
                if is_locked(error):
                    await connection.execute(f"SET LOCAL lock_timeout = '{_NEXT_LOCK_TIMEOUT}'")
                elif table in present:  # it stays published: another owner's can't be added again
                    raise
                refused[table] = error

    async def read_filter(table: TableId) -> None:
        filters.update(await read_row_filters(connection, {table: present[table]}))

    async def add(table: TableId) -> None:
        await connection.execute(add_statement(name, [table], lists, filters))

    async with connection.transaction():
        await connection.execute(f"SET LOCAL lock_timeout = '{ONE_LOCK_TIMEOUT}'")
        lists = await possible_lists(connection, name, lists)
        present = await published(connection, name, connection.info.server_version)
        await try_each(read_filter, [t for t in tables if t in present])
        drop = sql.SQL("DROP PUBLICATION {}").format(sql.Identifier(name))
        await reach_async("capture.publication.before", cut_off)
        await connection.execute(drop)
        await connection.execute(create_statement(name, ()))
        await try_each(add, [t for t in tables if t not in refused])
    await reach_async("capture.publication.after", cut_off)
    return refused


async def kept_out(
    connection: AsyncConnection[Any],
    name: str,
    tables: Sequence[TableId],
    lists: ColumnLists = WHOLE,
) -> dict[TableId, TableError]:
    """Return why the server refuses to publish which of these tables; change nothing.

    Without locked tables, which can be published later; empty if the publication is locked. Raises
    psycopg.Error if the publication itself can't be created or altered.
    """
    if not tables:
        return {}
    try:
        refused = await keep_each(connection, name, tables, lists, is_trial=True)
    except psycopg.errors.LockNotAvailable:
        return {}
    return {
        table: TableError(
            table,
            f"the server refuses to add it to publication {name!r}: {loggable_message(error)}",
            remedy=f"{printed(add_statement(name, [table], lists))};  -- as a superuser, or "
            "after fixing what the server reports; retried every minute",
        )
        for table, error in refused.items()
        if not is_locked(error)
    }


async def refused_by_trigger(connection: AsyncConnection[Any], error: psycopg.Error) -> str | None:
    """Return the statements that disable the event triggers that refuse the change, or None."""
    if not (error.sqlstate or "").startswith("P0"):  # what PL/pgSQL raises
        return None
    cursor = await connection.execute(
        """
        SELECT evtname FROM pg_catalog.pg_event_trigger
         WHERE evtevent IN ('ddl_command_start', 'ddl_command_end') AND evtenabled <> 'D'
           AND (evttags IS NULL OR evttags && '{CREATE PUBLICATION,ALTER PUBLICATION}')
         ORDER BY 1
        """
    )
    disable = sql.SQL("ALTER EVENT TRIGGER {} DISABLE;")
    names = [sql.Identifier(name) for (name,) in await cursor.fetchall()]
    statements = " ".join(printed(disable.format(name)) for name in names)
    return f"{statements}  -- or let the trigger allow the publication" if statements else None


def is_locked(error: psycopg.Error) -> bool:
    """Return whether the server refused a table only because it is locked."""
    return isinstance(
        error,
        psycopg.errors.LockNotAvailable
        | psycopg.errors.DeadlockDetected
        | psycopg.errors.QueryCanceled,
    )


def complete_statement(name: str) -> sql.Composed:
    """Return the ALTER PUBLICATION that sends all operations, and partitions as their root."""
    return sql.SQL("ALTER PUBLICATION {} SET (" + _OPTIONS + ")").format(sql.Identifier(name))


def _drop_statement(name: str, tables: Iterable[TableId]) -> sql.Composed:
    """Return the ALTER PUBLICATION that drops these tables (at least one)."""
    listed = _table_list(tables)
    assert listed is not None
    return sql.SQL("ALTER PUBLICATION {} DROP TABLE {}").format(sql.Identifier(name), listed)


async def possible_lists(
    connection: AsyncConnection[Any], name: str, lists: ColumnLists
) -> ColumnLists:
    """Drop the lists that the server would refuse, or that would break writes on the source."""
    if not lists or connection.info.server_version < FIRST_WITH_PARTS:
        return WHOLE
    cursor = await connection.execute(_BY_SCHEMA, (name,))
    if await _is_true(cursor):
        return WHOLE
    possible = {}
    for table, columns in lists.items():
        quoted = printed(sql.Identifier(table.schema, table.name))
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
    statements: list[sql.Composed] = []
    if found.all_tables:
        return statements
    present = await published(connection, name, connection.info.server_version)
    cursor = await connection.execute(_EXPLICIT, (name,))
    explicit = {TableId(*row) for row in await cursor.fetchall()}
    changed = outdated(present, explicit & wanted, lists)
    surplus = (explicit - wanted) | changed
    if surplus:
        statements.append(_drop_statement(name, surplus))
    missing = (wanted - present.keys()) | changed
    if missing:
        own = {table: present[table] for table in changed}
        filters = await read_row_filters(connection, own)
        statements.append(add_statement(name, missing, lists, filters))
    return statements


def check_publication(
    name: str,
    found: Publication | None,
    tables: Sequence[TableId],
    lists: ColumnLists = WHOLE,
    partitioned: Sequence[TableId] = (),
) -> OperatorError | None:
    """Return the fault of a publication that ingestd may not alter (manage = false).

    `partitioned`: the partitioned ones of the tables.
    """
    if found is None:
        return OperatorError(
            f"publication {name!r} does not exist, and manage = false",
            remedy=printed(create_statement(name, tables, lists)) + ";",
        )
    lacks = []
    if not found.all_operations:
        lacks.append("only some of insert, update, delete and truncate")
    if partitioned and not found.via_root:
        lacks.append(f"changes of {partitioned[0]} under its partitions' names")
    if lacks:
        return OperatorError(
            f"publication {name!r} sends {' and '.join(lacks)}",
            remedy=printed(complete_statement(name)) + ";",
        )
    return None


async def partitioned_of(
    connection: AsyncConnection[Any], tables: Iterable[TableId]
) -> list[TableId]:
    """Return those of these tables that are partitioned."""
    cursor = await connection.execute(_PARTITIONED)
    present = {TableId(*row) for row in await cursor.fetchall()}
    return [t for t in tables if t in present]


def _table_list(
    tables: Iterable[TableId],
    lists: ColumnLists = WHOLE,
    filters: Mapping[TableId, str] = MappingProxyType({}),
) -> sql.Composed | None:
    """List tables for a publication; with ONLY, as a child table is a table in its own right."""
    entries = []
    for table in sorted(tables):
        entry: sql.Composable = sql.SQL("ONLY {}").format(sql.Identifier(table.schema, table.name))
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
    """Return those of these tables that this role does not own and so can't publish."""
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
    """Return the statement that an owner of the tables must run to publish them all.

    Without tables: the statement by which the publication's owner passes it to this role.
    """
    if await find_publication(connection, name) is None:
        return printed(create_statement(name, tables, lists)) + ";"
    if not tables:
        statement = sql.SQL("ALTER PUBLICATION {} OWNER TO {};")
        role = sql.Identifier(connection.info.user)
        return printed(statement.format(sql.Identifier(name), role))
    sent = await published(connection, name, connection.info.server_version)
    missing = set(tables) - sent.keys()
    return printed(add_statement(name, missing or tables, lists)) + ";"
