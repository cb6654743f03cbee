"""Alters the publication until it sends the captured tables, and finds which it refuses.

Source: PostgreSQL documentation, ALTER PUBLICATION.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import psycopg
from psycopg import AsyncConnection, AsyncCursor, sql

from ingestd.failpoints import reach_async
from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.publication import (
    FIRST_WITH_PARTS,
    Publication,
    find_publication,
    lists_schemas,
    published,
)
from ingestd.postgres.catalog.published_filters import read_row_filters
from ingestd.postgres.connection.errors import cut_off
from ingestd.postgres.connection.quoting import printed
from ingestd.postgres.connection.server_messages import loggable_message
from ingestd.postgres.wal.publication.statements import (
    WHOLE,
    ColumnLists,
    add_statement,
    complete_statement,
    create_statement,
    drop_statement,
    outdated,
)

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
ONE_LOCK_TIMEOUT = "500ms"
"""How long a change of one table waits for its lock."""


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
                        await connection.execute(drop_statement(name, [table]))
                    await connection.execute(add_statement(name, [table], lists, filters))
            except psycopg.Error as error:
                if connection.closed:
                    raise
                refused[table] = error
    return refused


async def why_refused(
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


async def possible_lists(
    connection: AsyncConnection[Any], name: str, lists: ColumnLists
) -> ColumnLists:
    """Drop the lists that the server would refuse, or that would break writes on the source."""
    if not lists or connection.info.server_version < FIRST_WITH_PARTS:
        return WHOLE
    if await lists_schemas(connection, name):
        return WHOLE
    possible = {}
    for table, columns in lists.items():
        quoted = printed(sql.Identifier(table.schema, table.name))
        cursor = await connection.execute(_UNCOVERED, {"table": quoted, "columns": list(columns)})
        if not await _is_true(cursor):
            possible[table] = columns
    return possible


async def _alterations(
    connection: AsyncConnection[Any],
    name: str,
    publication: Publication,
    wanted: set[TableId],
    lists: ColumnLists,
) -> list[sql.Composed]:
    statements: list[sql.Composed] = []
    if publication.all_tables:
        return statements
    present = await published(connection, name, connection.info.server_version)
    cursor = await connection.execute(_EXPLICIT, (name,))
    explicit = {TableId(*row) for row in await cursor.fetchall()}
    changed = outdated(present, explicit & wanted, lists)
    surplus = (explicit - wanted) | changed
    if surplus:
        statements.append(drop_statement(name, surplus))
    missing = (wanted - present.keys()) | changed
    if missing:
        own = {table: present[table] for table in changed}
        filters = await read_row_filters(connection, own)
        statements.append(add_statement(name, missing, lists, filters))
    return statements


async def _is_true(cursor: AsyncCursor[Any]) -> bool:
    """Return the result of a query for one boolean."""
    row = await cursor.fetchone()
    return bool(row and row[0])
