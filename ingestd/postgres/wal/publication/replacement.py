"""Replaces the publication by one without the tables that must no longer be sent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql

from ingestd.failpoints import reach_async
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.publication import WITH_GENERATED, lists_schemas, published
from ingestd.postgres.catalog.published_filters import read_row_filters
from ingestd.postgres.connection.errors import cut_off
from ingestd.postgres.wal.publication.alteration import (
    ONE_LOCK_TIMEOUT,
    is_locked,
    possible_lists,
)
from ingestd.postgres.wal.publication.statements import (
    WHOLE,
    ColumnLists,
    add_statement,
    create_statement,
)

_SENDS_GENERATED = (
    "SELECT EXISTS (SELECT FROM pg_publication WHERE pubname = %s AND pubgencols <> 'n')"
)
_NEXT_LOCK_TIMEOUT = "10ms"
"""Once one table was locked: those that are ready are locked themselves until the end."""
# The first minor versions that apply a change of a publication to transactions in progress. Others
# would lack what a transaction that began before writes first to a table after it: it is not in the
# old publication's. Source: PostgreSQL's release notes, "Prevent data loss when DDL operations that
# don't take a strong lock"; one version later than these, which had a defect of memory.
_REPLACES_FROM = {14: 140019, 15: 150014, 16: 160010, 17: 170006}


async def must_be_replaced(
    connection: AsyncConnection[Any], name: str, tables: Collection[TableId]
) -> bool:
    """Return whether the publication lists other tables than these, and may be replaced.

    Not one with what the statements here don't re-create: a schema, generated columns.
    """
    version = connection.info.server_version
    if version < _REPLACES_FROM.get(version // 10000, 0):
        return False
    if await lists_schemas(connection, name):
        return False
    if version >= WITH_GENERATED and await _sends_generated(connection, name):
        return False
    present = await published(connection, name, version)
    is_own = all(each.membership is not None for each in present.values())
    return is_own and not present.keys() <= set(tables)


async def _sends_generated(connection: AsyncConnection[Any], name: str) -> bool:
    row = await (await connection.execute(_SENDS_GENERATED, (name,))).fetchone()
    return bool(row and row[0])


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
