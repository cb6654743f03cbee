"""How far behind polling is, by the cursors."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.capture.polling.poll import latest_cursor
from ingestd.capture.polling.polls import PolledState

_OF_ONE_TABLE = (
    psycopg.errors.SyntaxErrorOrAccessRuleViolation,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.QueryCanceled,
)


async def seconds_behind(
    connection: AsyncConnection[Any], states: Iterable[PolledState]
) -> float | None:
    """Give the age of the oldest poll that has not seen its table's newest cursor.

    0 where every cursor has been seen; None where no table has one with an index: then nobody
    knows without a poll. `connection` commits by itself. Raises psycopg.Error, but for a table that
    can't be looked at: its poll tells.
    """
    known: list[float] = []
    for state in states:
        seen_at = state.polled_at
        if state.polled.cursor is None or seen_at is None:
            continue
        try:
            latest = await latest_cursor(connection, state.polled)
        except _OF_ONE_TABLE:
            continue
        if latest is not None:
            known.append(0.0 if latest == state.peak else time.monotonic() - seen_at)
    return max(known, default=None)
