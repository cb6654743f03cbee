"""Waits for transactions that began before an incremental read, and may commit unseen by it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from psycopg import AsyncConnection

from ingestd.model.pg_snapshot import is_before
from ingestd.model.schema import Table
from ingestd.postgres.connection.wal_position import is_standby
from ingestd.postgres.snapshot.read_view import current_pg_snapshot

COMMITS_PATIENCE_S = 0.05

# A transaction keeps its locks until others see it, whatever it waits for after its commit is in
# the WAL. Every role can see them, and those of prepared transactions.
_WRITERS = """
WITH RECURSIVE tree AS (
  SELECT unnest(%s::oid[]) AS oid
  UNION ALL
  SELECT i.inhrelid FROM tree t JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid)
SELECT DISTINCT l.virtualtransaction, coalesce(l.pid, 0)::int8, x.transactionid::text::int8
  FROM pg_catalog.pg_locks l
  JOIN pg_catalog.pg_locks x ON x.virtualtransaction = l.virtualtransaction
       AND x.locktype = 'transactionid' AND x.mode = 'ExclusiveLock' AND x.granted
 WHERE l.locktype = 'relation' AND l.granted AND l.relation IN (SELECT oid FROM tree)
   AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
   AND l.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock',
                  'AccessExclusiveLock')
"""
# Queried after the locks: a session that is idle now has not committed what its locks are for.
_IDLE = "SELECT pid::int8 FROM pg_catalog.pg_stat_activity WHERE state = 'idle in transaction'"


async def await_running(connection: AsyncConnection[Any]) -> None:
    """Wait for the transactions that are running now, as creating a slot does."""
    until = await next_xid(connection)
    while (await current_pg_snapshot(connection)).xmin < until:  # noqa: ASYNC110 - the server sends no notice
        await asyncio.sleep(COMMITS_PATIENCE_S)


async def next_xid(connection: AsyncConnection[Any]) -> int:
    """Return an id above those of all running transactions, on a connection that is in none.

    It assigns an id: a snapshot's xmax is only above those that have ended. Returns 0 on a standby,
    where no id can be assigned and none is needed.
    """
    if await is_standby(connection):
        return 0
    cursor = await connection.execute("SELECT pg_catalog.pg_current_xact_id()::text")
    row = await cursor.fetchone()
    assert row is not None
    return int(row[0])


async def await_earlier_writers(
    connection: AsyncConnection[Any], tables: Sequence[Table], live_since_xid: int
) -> None:
    """Wait for transactions that wrote to these tables before the stream, except idle ones.

    Their commits may be in the WAL and not visible yet (while a synchronous standby is waited for).
    An earlier run may have received them from the stream; this run would not know.
    `live_since_xid`: the `next_xid` when the stream began, above their ids.
    """
    waiting = await _earlier_writers(connection, tables, live_since_xid)
    while waiting:
        await asyncio.sleep(COMMITS_PATIENCE_S)
        waiting &= await _earlier_writers(connection, tables, live_since_xid)


async def _earlier_writers(
    connection: AsyncConnection[Any], tables: Sequence[Table], live_since_xid: int
) -> set[str]:
    cursor = await connection.execute(_WRITERS, ([t.oid for t in tables],))
    writers = await cursor.fetchall()
    cursor = await connection.execute(_IDLE)
    idle = {pid for (pid,) in await cursor.fetchall()}
    return {
        transaction
        for transaction, pid, xid in writers
        if pid not in idle and is_before(xid, live_since_xid)
    }
