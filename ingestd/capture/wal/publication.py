"""The publication: which tables the server sends.

Source: PostgreSQL documentation, CREATE PUBLICATION and ALTER PUBLICATION.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import AsyncConnection, sql
from psycopg.rows import class_row

from ingestd.errors import OperatorError, TableError
from ingestd.schema import TableId

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
_OPTIONS = "publish = 'insert, update, delete, truncate', publish_via_partition_root = true"


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication's flags. `owned`: this role may alter it."""

    all_tables: bool
    via_root: bool
    all_operations: bool
    owned: bool


async def find_publication(connection: AsyncConnection[Any], name: str) -> Publication | None:
    """Read the publication; None if there is none."""
    async with connection.cursor(row_factory=class_row(Publication)) as cursor:
        await cursor.execute(_PUBLICATION, (name,))
        return await cursor.fetchone()


async def published_tables(connection: AsyncConnection[Any], name: str) -> set[TableId]:
    """Give every table it publishes, however it came to (list, schema, all tables)."""
    cursor = await connection.execute(_TABLES, (name,))
    return {TableId(*row) for row in await cursor.fetchall()}


def create_statement(name: str, tables: Iterable[TableId]) -> sql.Composed:
    """Write the CREATE PUBLICATION for these tables, none included."""
    create = sql.SQL("CREATE PUBLICATION {}").format(sql.Identifier(name))
    listed = _table_list(tables)
    if listed is not None:
        create = create + sql.SQL(" FOR TABLE ") + listed
    return create + sql.SQL(f" WITH ({_OPTIONS})")


def add_statement(name: str, tables: Iterable[TableId]) -> sql.Composed:
    """Write the ALTER PUBLICATION that adds these tables (at least one)."""
    listed = _table_list(tables)
    assert listed is not None
    return sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(sql.Identifier(name), listed)


async def keep_publication(
    connection: AsyncConnection[Any], name: str, tables: Sequence[TableId]
) -> None:
    """Create the publication or alter it until it publishes exactly these tables.

    Idempotent. A publication FOR ALL TABLES or by schema is left as it is:
    what it sends beyond `tables` is ignored.
    """
    found = await find_publication(connection, name)
    if found is None:
        statements = [create_statement(name, tables)]
    else:
        statements = await _alterations(connection, name, found, set(tables))
    for statement in statements:
        await connection.execute(statement)


async def _alterations(
    connection: AsyncConnection[Any], name: str, found: Publication, wanted: set[TableId]
) -> list[sql.Composed]:
    statements = []
    if not (found.all_operations and found.via_root):
        statements.append(
            sql.SQL("ALTER PUBLICATION {} SET (" + _OPTIONS + ")").format(sql.Identifier(name))
        )
    if found.all_tables:
        return statements
    cursor = await connection.execute(_EXPLICIT, (name,))
    explicit = {TableId(*row) for row in await cursor.fetchall()}
    surplus = _table_list(explicit - wanted)
    if surplus is not None:
        statements.append(
            sql.SQL("ALTER PUBLICATION {} DROP TABLE {}").format(sql.Identifier(name), surplus)
        )
    missing = wanted - await published_tables(connection, name)
    if missing:
        statements.append(add_statement(name, missing))
    return statements


def check_publication(
    name: str, found: Publication | None, tables: Sequence[TableId]
) -> OperatorError | None:
    """Say what is wrong with a publication that is not ours to alter (manage = false)."""
    if found is None:
        return OperatorError(
            f"publication {name!r} does not exist, and manage = false",
            remedy=create_statement(name, tables).as_string(None) + ";",
        )
    if not (found.all_operations and found.via_root):
        alter = sql.SQL("ALTER PUBLICATION {} SET (" + _OPTIONS + ")").format(sql.Identifier(name))
        return OperatorError(
            f"publication {name!r} does not send everything that is needed",
            remedy=alter.as_string(None) + ";",
        )
    return None


def _table_list(tables: Iterable[TableId]) -> sql.Composed | None:
    ordered = sorted(tables)
    if not ordered:
        return None
    return sql.SQL(", ").join(sql.Identifier(t.schema, t.name) for t in ordered)


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


async def partial_tables(
    connection: AsyncConnection[Any], name: str, server_version: int
) -> dict[TableId, TableError]:
    """Give the tables that it publishes in part only: with a column list or a row filter (15+)."""
    if server_version < FIRST_WITH_PARTS:
        return {}
    cursor = await connection.execute(
        """
        SELECT n.nspname, c.relname FROM pg_publication p
          JOIN pg_publication_rel r ON r.prpubid = p.oid JOIN pg_class c ON c.oid = r.prrelid
          JOIN pg_namespace n ON n.oid = c.relnamespace
         WHERE p.pubname = %s AND (r.prattrs IS NOT NULL OR r.prqual IS NOT NULL)
        """,
        (name,),
    )
    tables = [TableId(*row) for row in await cursor.fetchall()]
    return {table: _partial(name, table) for table in tables}


def _partial(name: str, table: TableId) -> TableError:
    whole = sql.SQL("ALTER PUBLICATION {0} DROP TABLE {1}; ALTER PUBLICATION {0} ADD TABLE {1};")
    statement = whole.format(sql.Identifier(name), sql.Identifier(table.schema, table.name))
    return TableError(
        table,
        f"publication {name!r} sends only some of its columns or rows",
        remedy=statement.as_string(None),
    )


async def owners_statement(
    connection: AsyncConnection[Any], name: str, tables: Sequence[TableId]
) -> str:
    """Write what an owner of the tables must run so that the publication has them all."""
    if await find_publication(connection, name) is None:
        return create_statement(name, tables).as_string(None) + ";"
    missing = set(tables) - await published_tables(connection, name)
    return add_statement(name, missing or tables).as_string(None) + ";"
