"""The one snapshot that all readers of a Spark query share, and when it ends.

Spark plans a Python data source in a process that ends at once, keeps the partitions for as long as
the DataFrame lives, and runs them any number of times: by every action anew, twice where it sorts,
partly where it shows some rows, never where it only explains. Nobody tells Python when a query
ends. So a snapshot can't belong to the plan. It belongs to an execution:

- Planning registers a `ReadPlan` with a keeper, a process beside the driver's JVM
  (`spark_jobs.snapshot_keeper`), and leaves nothing open in the database.
- The first task of an execution (Spark tells each its number) has the keeper take a snapshot; all
  other tasks of that execution get the same, whatever table they read: a join is of one point.
- The table is cut under that snapshot, so a plan that runs later knows partitions, rewrites and
  growth of the meantime.
- While a task reads, it holds a lease: its connection to the keeper. The snapshot ends when
  nobody has had a lease for `WHOLE_IDLE_S` and all partitions of the tables begun were read, else
  after `PARTLY_IDLE_S` (a query that failed, or wanted some rows only); and at last after the
  option `snapshot_limit`.
- A task that comes after that (its executor was lost late) gets an error, never another snapshot.
- The keeper ends with the JVM. If it is killed, the server sees its connections close; if its
  machine vanishes or it is frozen, the server ends the transaction itself, because nothing came for
  `SERVER_PATIENCE_S`.

A table is locked (ACCESS SHARE) only while a task reads it: a lock for the whole query would make
whoever alters the table wait, and everybody else behind him. No snapshot shields from TRUNCATE and
rewrites, so after a task has read, and before Spark takes its word for it, the keeper looks whether
the files are still those of the snapshot; if not, the query fails.

Source: PostgreSQL documentation, "Snapshot Synchronization Functions", "SET TRANSACTION", "Client
Connection Defaults" (idle_in_transaction_session_timeout).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.capture.session import classify, connect
from ingestd.capture.splits import read_error
from ingestd.errors import TableChangedError, TransientError
from ingestd.ports import Split
from ingestd.schema import Table, TableId
from spark_jobs.source_table import SourceTable
from spark_jobs.split_packing import Bins, packed

WHOLE_IDLE_S = 10.0
"""After all was read: a sort reads its input twice, the second time at once."""
PARTLY_IDLE_S = 60.0
"""With partitions left: their tasks may wait for cores that others have."""
HEARTBEAT_S = 15.0
SERVER_PATIENCE_S = 60

# pg_class as the snapshot sees it, against the function, which sees the present.
_REPLACED = """
WITH RECURSIVE tree AS (
  SELECT %s::oid AS oid
  UNION ALL
  SELECT i.inhrelid FROM tree t
    JOIN pg_catalog.pg_class p ON p.oid = t.oid AND p.relkind = 'p'
    JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid)
SELECT count(*) FROM tree JOIN pg_catalog.pg_class c ON c.oid = tree.oid
 WHERE c.relkind = 'r' AND c.relfilenode IS DISTINCT FROM pg_catalog.pg_relation_filenode(c.oid)
"""
_COLUMNS = """
SELECT a.attname::text, a.atttypid::int8, a.atttypmod FROM pg_catalog.pg_attribute a
  JOIN pg_catalog.pg_class c ON c.oid = a.attrelid
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = %s AND n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
"""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """How a table is to be read: planned once, executed any number of times. Picklable.

    `partitions`: how many, None for as many as `split_bytes` asks for. `idle_s`: None for the
    defaults above. `load`: which `load()` it is of; `filters`: names those that Spark handed over,
    empty without any.
    """

    source: SourceTable
    partitions: int | None
    split_bytes: int
    resumable: bool
    idle_s: float | None
    limit_s: float
    load: str = ""
    filters: str = ""


@dataclass(frozen=True, slots=True)
class Granted:
    """What a task reads: splits, in this order, under the snapshot that they name."""

    splits: Sequence[Split]


@dataclass(slots=True)
class _Begun:
    """A table that an execution has begun to read: who reads what, and what is unread."""

    bins: Bins
    unread: set[int]


@dataclass(slots=True)
class HeldSnapshot:
    """A snapshot of one execution on one database. All methods from one event loop."""

    dsn: str
    idle_s: float | None
    limit_s: float
    leases: int = 0
    _begun: dict[str, _Begun] = field(default_factory=dict)
    _connection: AsyncConnection[Any] | None = None
    _name: str = ""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _is_over: bool = False

    @property
    def plans(self) -> Sequence[str]:
        """The plans that were begun under it."""
        return tuple(self._begun)

    async def grant(self, plan_id: str, plan: ReadPlan, count: int, partition: int) -> Granted:
        """Give what a partition reads; the caller has a lease. Raises IngestdError."""
        async with self._turn:
            begun = self._begun.get(plan_id)
            if begun is None:
                begun = await self._begin(plan, count)
                self._begun[plan_id] = begun
        return Granted(begun.bins[partition])

    async def ensure_unreplaced(self, plan: ReadPlan) -> None:
        """See to it that what was read until now was read from the snapshot's files.

        Raises TableChangedError, or TransientError if it can't be told any more.
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
        """Take back a lease; `is_read`: the partition was read to its end."""
        self.leases -= 1
        if is_read and plan_id in self._begun:
            self._begun[plan_id].unread.discard(partition)
        self._changed.set()

    async def until_over(self) -> None:
        """Return when nobody wants it any more, or it is lost; the caller closes it then."""
        loop = asyncio.get_running_loop()
        idle_from = loop.time()
        ends_at = idle_from + self.limit_s
        try:
            while True:
                until = ends_at if self.leases else min(ends_at, idle_from + self._idle_s)
                left = until - loop.time()
                if left <= 0:
                    return
                await self._pause(min(left, HEARTBEAT_S))
                if self._changed.is_set():
                    self._changed.clear()
                    idle_from = loop.time()
                await self._beat()
        except psycopg.Error:
            return  # whoever asks for it is told
        finally:
            self._is_over = True

    async def close(self) -> None:
        """End the transaction. Twice is fine."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(psycopg.Error):
                await connection.close()

    @property
    def _idle_s(self) -> float:
        if self.idle_s is not None:
            return self.idle_s
        is_whole = self._begun and not any(begun.unread for begun in self._begun.values())
        return WHOLE_IDLE_S if is_whole else PARTLY_IDLE_S

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _beat(self) -> None:
        """Tell the server that we are there. Raises psycopg.Error if it is not."""
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
            await _ensure_described(self._connection, table)
        except psycopg.Error as error:
            raise read_error(error, table.id, self.dsn) from error
        return _Begun(await cut(plan, self._name, count), set(range(count)))


async def export(dsn: str) -> tuple[AsyncConnection[Any], str]:
    """Begin a transaction; give it with its snapshot's name. Raises psycopg.Error."""
    connection = await connect(dsn, autocommit=False)
    try:
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await connection.execute(
            f"SET idle_in_transaction_session_timeout = '{SERVER_PATIENCE_S}s'"
        )
        cursor = await connection.execute("SELECT pg_catalog.pg_export_snapshot()")
        row = await cursor.fetchone()
    except BaseException:
        await connection.close()
        raise
    assert row is not None
    return connection, row[0]


async def cut(plan: ReadPlan, snapshot: str, count: int) -> Bins:
    """Cut the plan's table as the snapshot has it, for `count` readers."""
    connector = plan.source.connector()
    try:
        manager = connector.splits(resumable=plan.resumable)
        table = plan.source.table
        whole = await manager.splits(table, snapshot, 1 << 62)
        target = -(-sum(split.estimated_bytes for split in whole) // count)
        splits = whole if count == 1 else await manager.splits(table, snapshot, max(1, target))
    finally:
        await connector.close()
    return packed(splits, count)


async def count_partitions(plan: ReadPlan, dsn: str) -> int:
    """Say how many readers the plan is for, by the table's present size; leaves nothing open."""
    if plan.partitions is not None:
        return plan.partitions
    table = plan.source.table
    try:
        connection, snapshot = await export(dsn)
    except psycopg.Error as error:
        raise read_error(error, table.id, dsn) from error
    async with connection:
        [splits] = await cut(plan, snapshot, 1)
    return max(1, -(-sum(split.estimated_bytes for split in splits) // plan.split_bytes))


async def _ensure_described(connection: AsyncConnection[Any], table: Table) -> None:
    """See to it that the columns are those that `load()` found. Raises TableChangedError.

    A column that came since is none of this DataFrame's.
    """
    cursor = await connection.execute(_COLUMNS, (table.oid, table.id.schema, table.id.name))
    found = {name: (type_oid, typmod) for name, type_oid, typmod in await cursor.fetchall()}
    for column in table.columns:
        if found.get(column.name) != (column.type_oid, column.typmod):
            raise TableChangedError(
                table.id,
                f"column {column.name!r} is gone or another than when the table was loaded",
                remedy="load() the table again",
            )


def _lost(table: TableId) -> TransientError:
    return TransientError(
        f"table {table}: the snapshot that this query read is over",
        reason="snapshot_gone",
        remedy="run the query again",
    )


def source_error(error: psycopg.Error, plan: ReadPlan, dsn: str) -> Exception:
    """Say what it means that the plan's source can't be asked."""
    return classify(error, f"source {plan.source.source}", dsn)
