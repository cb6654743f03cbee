"""What one table's definition causes is the fault of that table, not of its source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from ingestd.model.errors import TableError
from ingestd.model.schema import TableId


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
