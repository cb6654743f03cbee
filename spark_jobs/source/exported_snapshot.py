"""The snapshot that all readers of a Spark query share, and its lifetime.

Spark plans a Python data source in a short-lived process, and keeps the partitions as long as the
DataFrame lives. It runs them any number of times: again for every action, twice for a sort, partly
to show some rows, never for an EXPLAIN. Python is not notified of the end of a query. So a snapshot
can't belong to the plan. It belongs to an execution:

- Planning registers a `ReadPlan` with a keeper, a process next to the driver's JVM
  (`spark_jobs.source.keeper`), and leaves nothing open in the database.
- The first task of an execution (each task knows its execution's number) makes the keeper take a
  snapshot. All other tasks of the execution share it, whatever table they read, so a join sees one
  consistent point.
- The table is split under that snapshot. So a plan that runs later sees the partitions, rewrites
  and growth since planning.
- A task that reads holds a lease: its connection to the keeper. Between two stages of a query there
  may be none for a while: Spark sorts, builds a hash table, starts a worker. So the snapshot ends
  when there was no lease for `IdlePolicy.idle_s`, and at the latest after the option
  `snapshot_limit`. Many short queries must not take all connections of the source: while more than
  `IdlePolicy.most` are held, one whose tables were all read ends after `IdlePolicy.crowded_s`.
- A task that comes later (because its executor was lost) gets an error, never another snapshot.
- The keeper ends with the JVM. If it is killed, the server sees its connections close. If its
  machine vanishes or freezes, the server ends the transaction after
  `spark_jobs.source.read_plan.SERVER_PATIENCE_S` without a message.

A table is locked (ACCESS SHARE) only while a task reads it: a lock for the whole query would block
an ALTER TABLE, and every session behind that. No snapshot protects against TRUNCATE and rewrites.
So after a task has read, and before Spark accepts its result, the keeper checks that the files are
still those of the snapshot; if not, the query fails.

Source: PostgreSQL documentation, "Snapshot Synchronization Functions", "SET TRANSACTION", "Client
Connection Defaults" (idle_in_transaction_session_timeout).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.model.errors import TableChangedError, TransientError
from ingestd.model.schema import TableId
from ingestd.ports import Split
from ingestd.postgres.snapshot.errors import read_error
from spark_jobs.source.read_plan import ReadPlan, cut, ensure_as_loaded, export
from spark_jobs.source.split_packing import Bins

HEARTBEAT_S = 15.0

# pg_class as the snapshot sees it, compared with the function, which sees the present.
_REPLACED = """
WITH RECURSIVE tree AS (
  SELECT %s::oid AS oid
  UNION ALL
  SELECT i.inhrelid FROM tree t
    JOIN pg_catalog.pg_class p ON p.oid = t.oid AND p.relkind = 'p'
    JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid AND NOT i.inhdetachpending)
SELECT count(*) FROM tree JOIN pg_catalog.pg_class c ON c.oid = tree.oid
 WHERE c.relkind = 'r' AND c.relfilenode IS DISTINCT FROM pg_catalog.pg_relation_filenode(c.oid)
"""


@dataclass(frozen=True, slots=True)
class IdlePolicy:
    """When a snapshot ends that no task reads: see the module's docstring."""

    idle_s: float = 60.0
    crowded_s: float = 10.0
    most: int = 8


@dataclass(frozen=True, slots=True)
class Granted:
    """The splits that a task reads, in this order, under the snapshot that they name."""

    splits: Sequence[Split]


@dataclass(slots=True)
class _Begun:
    """A table that an execution is reading: the splits per partition, and the unread partitions."""

    bins: Bins
    unread: set[int]


@dataclass(slots=True)
class HeldSnapshot:
    """A snapshot of one execution on one database. Call all methods from one event loop.

    `idle_s`: the option of that name; None: `policy` decides. `is_crowded`: returns whether more
    snapshots are held than it allows.
    """

    dsn: str
    idle_s: float | None
    limit_s: float
    is_crowded: Callable[[], bool]
    policy: IdlePolicy
    leases: int = 0
    _begun: dict[str, _Begun] = field(default_factory=dict)
    _connection: AsyncConnection[Any] | None = None
    _name: str = ""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _is_over: bool = False

    @property
    def plans(self) -> Sequence[str]:
        """The plans that are read under the snapshot."""
        return tuple(self._begun)

    async def grant(self, plan_id: str, plan: ReadPlan, count: int, partition: int) -> Granted:
        """Return what a partition reads; the caller has a lease. Raises IngestdError."""
        async with self._turn:
            begun = self._begun.get(plan_id)
            if begun is None:
                begun = await self._begin(plan, count)
                self._begun[plan_id] = begun
        return Granted(begun.bins[partition])

    async def ensure_unreplaced(self, plan: ReadPlan) -> None:
        """Check that all reads until now used the snapshot's files.

        Raises TableChangedError, or TransientError if that can't be determined any more.
        """
        table = plan.source.table
        async with self._turn:
            if self._connection is None:
                raise _lost(table.id)
            try:
                cursor = await self._connection.execute(_REPLACED, (table.oid,))
                row = await cursor.fetchone()
            except psycopg.Error as error:
                raise _lost(table.id) from error
        if row is None or row[0]:
            raise TableChangedError(
                table.id,
                "was truncated or rewritten (TRUNCATE, ALTER TABLE, VACUUM FULL, CLUSTER) while it "
                "was read",
                remedy="run the query again",
            )

    def released(self, plan_id: str, partition: int, *, is_read: bool) -> None:
        """End a lease. `is_read`: the partition was read to its end."""
        self.leases -= 1
        if is_read and plan_id in self._begun:
            self._begun[plan_id].unread.discard(partition)
        self._changed.set()

    async def until_over(self) -> None:
        """Return when the snapshot is no longer needed or is lost; the caller then closes it."""
        loop = asyncio.get_running_loop()
        idle_from = loop.time()
        ends_at = idle_from + self.limit_s
        try:
            while True:
                until = ends_at if self.leases else min(ends_at, idle_from + self._idle_s)
                left = until - loop.time()
                if left <= 0:
                    return
                await self._pause(min(left, HEARTBEAT_S, self.policy.crowded_s))
                if self._changed.is_set():
                    self._changed.clear()
                    idle_from = loop.time()
                await self._beat()
        except psycopg.Error:
            return  # the next caller gets an error
        finally:
            self._is_over = True

    async def close(self) -> None:
        """End the transaction. May be called twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                await connection.close()

    @property
    def _idle_s(self) -> float:
        if self.idle_s is not None:
            return self.idle_s
        is_all_read = self._begun and not any(begun.unread for begun in self._begun.values())
        is_short = is_all_read and self.is_crowded()
        return self.policy.crowded_s if is_short else self.policy.idle_s

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _beat(self) -> None:
        """Send the server a sign of life. Raises psycopg.Error if the connection is lost."""
        async with self._turn:
            if self._connection is not None:
                await self._connection.execute("SELECT")

    async def _begin(self, plan: ReadPlan, count: int) -> _Begun:
        table = plan.source.table
        try:
            if self._is_over:
                raise _lost(table.id)
            if self._connection is None:
                self._connection, self._name = await export(self.dsn)
            await ensure_as_loaded(self._connection, table)
            bins = await cut(plan, self._connection, self._name, count)
        except psycopg.Error as error:
            raise read_error(error, table.id, self.dsn) from error
        return _Begun(bins, set(range(count)))


def _lost(table: TableId) -> TransientError:
    return TransientError(
        f"table {table}: the snapshot that this query read has ended",
        reason="snapshot_gone",
        remedy="run the query again",
    )
