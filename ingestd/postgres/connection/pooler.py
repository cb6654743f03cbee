"""Poolers between ingestd and the server: whether a connection has a server session to itself.

In session mode it has, and all works as without. In transaction (or statement) mode the pooler
gives the server's session to another client whenever no transaction is open: settings, advisory
locks and exported snapshots do not live there, and what we set would reach other clients.

Source: PgBouncer documentation, "SQL feature map for pooling modes".
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.model.errors import OperatorError
from ingestd.postgres.connection.server_messages import server_text

WAIT_S = 2.0
"""How long to wait for a second session: in session mode it may have to be a free one."""
TRIES = 3

# A pid may be another process's by now; and several servers may have one address. As a number: the
# text of a time depends on settings. They are not pinned here, so all of it is qualified.
_PROCESS = """
SELECT pid, (pg_catalog.date_part('epoch', backend_start) OPERATOR(pg_catalog.*)
             1000000::pg_catalog.float8)::pg_catalog.int8
  FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid())
"""
_NO_TRANSACTIONS = "transaction blocks not allowed"
"""What PgBouncer says in statement mode."""
_REFUSED = re.compile(r"unsupported (options )?startup (parameter|option)|command-line options")


def refuses_options(error: psycopg.Error) -> bool:
    """Whether connecting failed because a pooler takes no `options` in the startup message."""
    return _REFUSED.search(server_text(error)) is not None


def pooled() -> OperatorError:
    """Say what is wrong with a pooler that gives a session to several clients."""
    return OperatorError(
        "the connection has no server session to itself: a pooler in transaction (or statement) "
        "mode is between, where session settings, snapshots and locks do not live",
        remedy="give the server's own address in `dsn`, or set pool_mode = session for this "
        "database in the pooler",
    )


async def shares_sessions(first: AsyncConnection[Any], parameters: Mapping[str, Any]) -> bool:
    """Return whether the session of `first`, idle and in autocommit, serves other clients by turns.

    Another client with the same parameters takes a session for a transaction: it gets that of the
    first one, or the first one has to go on with another. Sets nothing. False as well where there
    is no second session to be had: then the first has its own. Raises psycopg.Error.
    """
    try:
        async with asyncio.timeout(WAIT_S):
            second = await AsyncConnection.connect(**parameters, prepare_threshold=None)
    except TimeoutError:
        return False
    try:
        for _ in range(TRIES):
            mine = await _process(first)
            theirs = await _process_soon(second)
            is_shared = theirs is not None and (mine == theirs or await _process(first) != mine)
            if theirs is None or is_shared:
                return is_shared
            await second.rollback()
    except psycopg.errors.ProtocolViolation as error:
        if _NO_TRANSACTIONS not in server_text(error):
            raise
        return True
    finally:
        await _end(second)
    return False


async def _process(connection: AsyncConnection[Any]) -> Any:  # noqa: ANN401 - a row
    """Return the server process that answers."""
    return await (await connection.execute(_PROCESS)).fetchone()


async def _process_soon(connection: AsyncConnection[Any]) -> Any:  # noqa: ANN401 - a row
    """Return the server process that answers, None if none does for long; then it is closed."""
    asking = asyncio.create_task(_process(connection))
    try:
        done, _ = await asyncio.wait({asking}, timeout=WAIT_S)
        return asking.result() if done else None
    finally:
        if not asking.done():
            await connection.close()  # first: a query that waits for a session is slow to cancel
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


async def _end(connection: AsyncConnection[Any]) -> None:
    """Close, and leave the pooler a session that it can give to others."""
    with contextlib.suppress(psycopg.Error):
        if not connection.closed:
            await connection.rollback()
    await connection.close()
