"""What one table's definition causes is the fault of that table, not of its source."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import psycopg
from psycopg import AsyncConnection

from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from ingestd.postgres.connection.errors import is_of_what_is_read, why_unsendable
from ingestd.postgres.connection.server_messages import loggable_message

V = TypeVar("V", bound=Hashable)

MOST_UNREADABLE = 8
"""Limit for the values of one table's definition of which each is found that can't be output."""


@contextmanager
def own_fault(table: TableId) -> Iterator[None]:
    """Describe, lock or judge a table. Raises TableError for what its depth or size causes.

    Only a net: each limit has its own check, which says what is too large.
    """
    try:
        yield
    except (RecursionError, MemoryError) as error:
        # Without its traceback, which holds all that did not fit.
        raise TableError(
            table,
            f"its definition is too deep or too large to be handled ({type(error).__name__})",
            remedy="simplify the types of its columns, the expressions of its indexes, statistics"
            " and partitions, or exclude it in `tables`",
        ) from None


@contextmanager
def own_lock(table: TableId) -> Iterator[None]:
    """Do the same; a lock on it or on its partitions that is not granted is its fault, too."""
    try:
        with own_fault(table):
            yield
    except psycopg.errors.LockNotAvailable as error:
        raise locked(table, "whether its rows were replaced can't be found out") from error


def locked(table: TableId, what: str) -> TableError:
    """Return the error for what can't be read because of a lock."""
    return TableError(
        table,
        f"{what}: another session holds a lock on it",
        remedy="end that session's transaction (SELECT * FROM pg_locks WHERE mode ="
        " 'AccessExclusiveLock'); it is retried at each check of the catalog",
    )


async def find_unreadable(
    connection: AsyncConnection[Any],
    values: Sequence[V],
    read: Callable[[Sequence[V]], Awaitable[object]],
) -> dict[V, str]:
    """Return which values of one table's definition the server can't output, and why.

    An output function may fail for a value each time, and with it the query of all values. After
    MOST_UNREADABLE of them the others are no longer tried. Raises psycopg.Error of the server's.
    """
    found: dict[V, str] = {}
    left = [values]
    while left:
        part = left.pop()
        try:
            async with savepoint(connection):
                await read(part)
        except psycopg.Error as error:
            if not is_of_what_is_read(error):
                raise
            if len(part) == 1 or len(found) >= MOST_UNREADABLE:
                found |= dict.fromkeys(part, why_unreadable(error))
            else:
                half = len(part) // 2
                left += [part[half:], part[:half]]
    return found


def savepoint(connection: AsyncConnection[Any]) -> AbstractAsyncContextManager[object]:
    """Return the block of a query that may fail.

    Outside a transaction none is begun: other tasks may use the connection meanwhile.
    """
    return nullcontext() if connection.autocommit else connection.transaction()


def why_unreadable(error: psycopg.Error) -> str:
    """Return why the server can't output what is read, with its message."""
    why, what = why_unsendable(error), loggable_message(error)
    return f"{why}: {what}" if why else what
