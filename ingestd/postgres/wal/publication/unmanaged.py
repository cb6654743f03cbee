"""A publication that this role may not alter: its faults, and what an owner must run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from psycopg import AsyncConnection, sql

from ingestd.model.errors import OperatorError
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.publication import Publication, find_publication, published
from ingestd.postgres.connection.quoting import printed
from ingestd.postgres.wal.publication.statements import (
    WHOLE,
    ColumnLists,
    add_statement,
    complete_statement,
    create_statement,
)

_PARTITIONED = """
SELECT n.nspname::text, c.relname::text FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'p' AND NOT c.relispartition
"""


def check_publication(
    name: str,
    publication: Publication | None,
    tables: Sequence[TableId],
    lists: ColumnLists = WHOLE,
    partitioned: Sequence[TableId] = (),
) -> OperatorError | None:
    """Return the fault of a publication that ingestd may not alter (manage = false).

    `partitioned`: the partitioned ones of the tables.
    """
    if publication is None:
        return OperatorError(
            f"publication {name!r} does not exist, and manage = false",
            remedy=printed(create_statement(name, tables, lists)) + ";",
        )
    lacks = []
    if not publication.all_operations:
        lacks.append("only some of insert, update, delete and truncate")
    if partitioned and not publication.via_root:
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
