"""The lag of polling, by the cursors."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.model.errors import TableError
from ingestd.model.lsn import Lsn
from ingestd.postgres.polling.poll import latest_cursor
from ingestd.postgres.polling.table_state import PolledState

_OF_ONE_TABLE = (
    psycopg.errors.SyntaxErrorOrAccessRuleViolation,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.QueryCanceled,
    psycopg.errors.ObjectNotInPrerequisiteState,
    TableError,
)


async def seconds_behind(
    connection: AsyncConnection[Any], states: Iterable[PolledState], current: Lsn
) -> float | None:
    """Return the age of the oldest last poll of a table that may have changed since; 0 if none has.

    A table's newest cursor decides if an index has it, otherwise whether the server, now at
    `current`, has written anything. A table that is locked or missing may have changed. None
    without tables. `connection` is in autocommit mode. Raises psycopg.Error.
    """
    known: list[float] = []
    for state in states:
        try:
            latest = await latest_cursor(connection, state.polled)
        except _OF_ONE_TABLE:
            may_have_changed = True
        else:
            seen = 0 if state.progress is None else state.progress.lsn
            may_have_changed = current > seen if latest is None else latest != state.peak
        known.append(time.monotonic() - state.polled_at if may_have_changed else 0.0)
    return max(known, default=None)
