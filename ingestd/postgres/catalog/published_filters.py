"""The row filters of a publication, as SQL.

Writing one as SQL locks its table, so a locked table must not keep the others' from being read.

Source: PostgreSQL, src/backend/utils/adt/ruleutils.c (pg_get_expr_worker).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.bounded_text import at_most
from ingestd.postgres.catalog.publication import Published
from ingestd.postgres.catalog.table_faults import locked, why_unreadable
from ingestd.postgres.connection.errors import is_of_what_is_read

NONE: Mapping[TableId, Published] = MappingProxyType({})
"""Nothing published."""
MOST_BYTES = 1 << 18
"""Limit for a row filter."""
_FILTERS = f"""
SELECT oid::int8, {at_most(MOST_BYTES, "condition", total="pg_catalog.octet_length(condition)")}
  FROM (SELECT r.oid, pg_catalog.pg_get_expr(r.prqual, r.prrelid) AS condition
          FROM pg_catalog.pg_publication_rel r WHERE r.oid = ANY(%s::oid[]) OFFSET 0) AS found
"""  # noqa: S608 - constants
_ONE_LOCK_TIMEOUT = "SET LOCAL lock_timeout = '100ms'"
_LOCKED = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.QueryCanceled,
)


async def read_row_filters(
    connection: AsyncConnection[Any], published: Mapping[TableId, Published]
) -> dict[TableId, str]:
    """Return the filters of those of these tables that have one.

    Raises psycopg.Error, ProgramLimitExceeded if one is too large. Locks the tables.
    """
    entries = {t: how.membership for t, how in published.items() if how.filter_digest is not None}
    if not entries:
        return {}
    cursor = await connection.execute(_FILTERS, (list(entries.values()),))
    found: dict[int, str | None] = dict(await cursor.fetchall())
    filters = {}
    for table, membership in entries.items():
        text = found.get(membership or 0)
        if text is None:
            most = f"{MOST_BYTES >> 10} kB"
            raise psycopg.errors.ProgramLimitExceeded(
                f"the row filter of {table} has more than {most}, or was just removed"
            )
        filters[table] = text
    return filters


async def with_row_filters(
    connection: AsyncConnection[Any],
    published: Mapping[TableId, Published],
    last: Mapping[TableId, Published] = NONE,
) -> dict[TableId, Published]:
    """Return it with the row filters, or with why a table's can't be read (`filter_fault`).

    Within a transaction. Of a locked table `last` counts, if its filter is still the same. The
    usual case is one query and a savepoint, if there are any filters. Raises psycopg.Error.
    """
    found = dict(published)
    filtered = {t: how for t, how in published.items() if how.filter_digest is not None}
    if not filtered:
        return found
    try:
        async with connection.transaction():
            texts = await read_row_filters(connection, filtered)
    except psycopg.Error as error:
        if not isinstance(error, _LOCKED) and not is_of_what_is_read(error):
            raise
        for table, how in filtered.items():
            found[table] = await _with_row_filter(connection, table, how, last.get(table))
        return found
    return found | {t: replace(filtered[t], row_filter=text) for t, text in texts.items()}


async def _with_row_filter(
    connection: AsyncConnection[Any], table: TableId, how: Published, last: Published | None
) -> Published:
    try:
        async with connection.transaction():
            await connection.execute(_ONE_LOCK_TIMEOUT)
            texts = await read_row_filters(connection, {table: how})
    except _LOCKED:
        if last is not None and last.row_filter is not None and how.has_filter_of(last):
            return replace(how, row_filter=last.row_filter)
        return replace(how, filter_fault=locked(table, "its row filter can't be read"))
    except psycopg.errors.ProgramLimitExceeded as error:
        fault = TableError(table, str(error), remedy="publish it with a shorter row filter")
        return replace(how, filter_fault=fault)
    except psycopg.Error as error:
        if not is_of_what_is_read(error):
            raise
        what = f"its row filter can't be read: {why_unreadable(error)}"
        fault = TableError(table, what, remedy="publish it with a simpler row filter")
        return replace(how, filter_fault=fault)
    return replace(how, row_filter=texts[table])
