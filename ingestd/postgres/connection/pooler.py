"""Detection of poolers in front of the server that share server sessions between clients.

In session mode a connection has its own server session, and everything works as without a pooler.
In transaction (or statement) mode the pooler passes the session to another client whenever no
transaction is open. Settings, advisory locks and exported snapshots do not last then, and our
settings would reach other clients.

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
from ingestd.postgres.connection.answer_size import LimitedConnection
from ingestd.postgres.connection.server_messages import server_text
from ingestd.process.tasks import cancel_all

WAIT_S = 2.0
"""How long to wait for a second session, which in session mode must be a free one."""
TRIES = 3

# The pid may belong to another process by now, and several servers may share an address. A number,
# because a time's text depends on settings. They are not pinned here, so all names are qualified.
_PROCESS = """
SELECT pid, (pg_catalog.date_part('epoch', backend_start) OPERATOR(pg_catalog.*)
             1000000::pg_catalog.float8)::pg_catalog.int8
  FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid())
"""
_NO_TRANSACTIONS = "transaction blocks not allowed"
"""PgBouncer's message in statement mode."""
_REFUSED = re.compile(r"unsupported (options )?startup (parameter|option)|command-line options")


def refuses_options(error: psycopg.Error) -> bool:
    """Return whether connecting failed because a pooler accepts no `options` at startup."""
    return _REFUSED.search(server_text(error)) is not None


def pooled() -> OperatorError:
    """Return the error for a pooler that shares a session between clients."""
    return OperatorError(
        "the connection has no server session to itself: it goes through a pooler in transaction "
        "(or statement) mode, where session settings, snapshots and locks do not last",
        remedy="use the server's own address in `dsn`, or set pool_mode = session for this "
        "database in the pooler",
    )


async def shares_sessions(first: AsyncConnection[Any], parameters: Mapping[str, Any]) -> bool:
    """Return whether the session of `first`, idle and in autocommit, is shared with other clients.

    A second client with the same parameters opens a transaction. In transaction mode it gets the
    session of `first`, or `first` is moved to another one. Sets nothing. Also False if no second
    session is available: then `first` has its own. Raises psycopg.Error.
    """
    try:
        async with asyncio.timeout(WAIT_S):
            second = await LimitedConnection.connect(**parameters, prepare_threshold=None)
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
    """Return the server process that answers; None after a timeout, and close the connection."""
    asking = asyncio.create_task(_process(connection))
    try:
        done, _ = await asyncio.wait({asking}, timeout=WAIT_S)
        return asking.result() if done else None
    finally:
        if not asking.done():
            await connection.close()  # first: a query that waits for a session is slow to cancel
            await cancel_all(asking)


async def _end(connection: AsyncConnection[Any]) -> None:
    """Close the connection, and leave the pooler a reusable session."""
    with contextlib.suppress(psycopg.Error):
        if not connection.closed:
            await connection.rollback()
    await connection.close()
