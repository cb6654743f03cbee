"""One poll: scans tables in one repeatable-read, read-only transaction.

`cursors.py` says which columns can be a table's cursor; this module reads by the chosen one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
from psycopg import AsyncConnection, sql

from ingestd.decode.copy.rows import CopyRows
from ingestd.model.errors import TableChangedError, TableError
from ingestd.model.lsn import Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.row_checks import refuse_too_large
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.partitions import leaves_of
from ingestd.postgres.catalog.relation_lock import lock_table
from ingestd.postgres.connection.liveness import LivenessCheckedConnection
from ingestd.postgres.connection.pooler import pooled
from ingestd.postgres.connection.session import sent_encoding
from ingestd.postgres.connection.wal_position import insert_position, replayed_position
from ingestd.postgres.polling.polled_table import PolledTable
from ingestd.postgres.polling.progress import (
    MAX_AGE,
    MAX_SEEN,
    FullXids,
    PollProgress,
    PollXids,
    SeenXids,
)
from ingestd.postgres.polling.queries import (
    NearRows,
    PolledShape,
    peak_query,
    scan_query,
    xids_query,
)
from ingestd.postgres.polling.rows import FoundRows
from ingestd.postgres.snapshot.read_view import ensure_described
from ingestd.postgres.transport.copy_out import copying

PAGE_BLOCKS = 16_384
"""The blocks that a full scan reads at a time: 128 MB of the table."""
_XIDS = 1 << 32

# age() counts back from the next transaction id, which is fixed for the transaction; 3 is the first
# ordinary id.
_SNAPSHOT = """
SELECT pg_catalog.pg_current_snapshot()::text, pg_catalog.clock_timestamp(),
       pg_catalog.age('3'::pg_catalog.xid)::int8 + 3, pg_catalog.pg_backend_pid()
"""
_SHAPE = """
SELECT c.relkind = 'p', coalesce(a.atttypid, 0)::int8,
       EXISTS (SELECT FROM pg_catalog.pg_index i
                 JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid
                 JOIN pg_catalog.pg_am m ON m.oid = x.relam
                WHERE i.indrelid = c.oid AND i.indkey[0] = a.attnum AND i.indisvalid
                  AND i.indpred IS NULL AND m.amname = 'btree')
  FROM pg_catalog.pg_class c
  LEFT JOIN pg_catalog.pg_attribute a
    ON a.attrelid = c.oid AND a.attname = %s AND NOT a.attisdropped
 WHERE c.oid = %s::oid
"""


@dataclass(frozen=True, slots=True)
class PollPoint:
    """The snapshot of a poll: its transaction ids, time and position.

    `at`: the server's clock, aware; all that the snapshot sees is below `lsn`.
    """

    ids: PollXids
    at: datetime
    lsn: Lsn


@dataclass(slots=True)
class TablePoll:
    """One table in a poll: how to scan it, and, once that has ended, the new progress.

    `is_whole`: a full scan, else a near one, from the floor on. `progress`: before, then after.
    `peak`: the highest cursor, if an index has it. `limit_s`: how long the server may send nothing;
    longer raises QueryCanceled. A row of more than `row_limit_bytes` raises TableError.
    """

    polled: PolledTable
    progress: PollProgress
    is_whole: bool
    page_rows: int
    row_limit_bytes: int
    limit_s: float | None = None
    found_xids: list[FullXids] = field(default_factory=list)
    peak: str | None = None

    def saw(self, rows: FoundRows) -> FoundRows:
        """Record rows that are delivered."""
        self.found_xids.append(np.unique(rows.xids))
        return rows


async def begin_poll(connection: AsyncConnection[Any], backend: int) -> PollPoint:
    """Begin a transaction on a connection that is in none, and take its snapshot.

    `backend`: the pid of the connection's first server process. Raises psycopg.Error;
    OperatorError if a pooler has switched the connection to another one.
    """
    await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
    row = await (await connection.execute(_SNAPSHOT)).fetchone()
    assert row is not None
    seen = PgSnapshot.parse(row[0])
    if row[3] != backend:
        raise pooled()
    return PollPoint(poll_xids(seen, row[2]), row[1], await insert_position(connection))


async def backend_of(connection: AsyncConnection[Any]) -> int:
    """Return the pid of the server process of a connection that is in no transaction."""
    row = await (await connection.execute("SELECT pg_catalog.pg_backend_pid()")).fetchone()
    await connection.rollback()
    assert row is not None
    pid: int = row[0]
    return pid


def poll_xids(seen: PgSnapshot, next_xid: int) -> PollXids:
    """Return the ids of a poll's snapshot; `next_xid`: the low 32 bits of the next id."""
    return PollXids(seen.xmin, seen.xmax, seen.xmax + (next_xid - seen.xmax) % _XIDS)


async def scan_table(
    connection: LivenessCheckedConnection, scan: TablePoll, now: PollPoint
) -> AsyncGenerator[FoundRows, None]:
    """Yield the rows of a scan; afterwards the `progress` of `scan` is the new one.

    Raises psycopg.Error, TableChangedError (the columns differ from the description), TableError.
    """
    polled, ids = scan.polled, now.ids
    if ids.next - scan.progress.below > MAX_AGE:
        raise TableError(
            polled.table.id,
            "more than 2 billion transactions have passed since it was polled",
            remedy="nothing to do: it is re-read in a minute",
        )
    shape = await _locked_shape(connection, polled)
    await ensure_described(connection, polled.table)
    if scan.is_whole or not shape.is_indexed or scan.progress.floor is None:
        scan.is_whole = True
        async with aclosing(_whole(connection, scan, ids)) as found:
            async for rows in found:
                yield scan.saw(rows)
        scan.peak = await _peak(connection, polled, shape)
        scan.progress = scan.progress.after_whole(ids, _all(scan.found_xids), scan.peak)
    else:
        async with aclosing(_near(connection, scan, ids, shape)) as found:
            async for rows in found:
                yield scan.saw(rows)
        scan.peak = await _peak(connection, polled, shape)
        scan.progress = scan.progress.after_near(ids, _all(scan.found_xids))
    scan.progress = replace(scan.progress, lsn=await _shown(connection, now))
    _ensure_short(polled, scan.progress)


async def first_progress(
    connection: AsyncConnection[Any], polled: PolledTable, now: PollPoint
) -> PollProgress:
    """Return the progress once all rows that this snapshot sees have been delivered elsewhere.

    Raises psycopg.Error.
    """
    shape = await _locked_shape(connection, polled)
    recent = SeenXids(now.ids.oldest).unseen(now.ids)
    cursor = await connection.execute(xids_query(polled, shape, recent))
    ages = [age for (age,) in await cursor.fetchall()]
    peak = await _peak(connection, polled, shape)
    xids = now.ids.next - np.array(ages, np.int64)
    progress = PollProgress.initial(now.ids, xids, peak, polled)
    progress = replace(progress, lsn=await _shown(connection, now))
    _ensure_short(polled, progress)
    return progress


async def _shown(connection: AsyncConnection[Any], now: PollPoint) -> Lsn:
    """Return the position that a server must have reached to show what was seen.

    On a standby, that is what it has replayed by now, which is not before its earlier snapshot.
    """
    replayed = await replayed_position(connection)
    return now.lsn if replayed is None else replayed


def _ensure_short(polled: PolledTable, progress: PollProgress) -> None:
    if progress.is_too_long:
        raise TableError(
            polled.table.id,
            f"more than {MAX_SEEN:,} transactions have written it since the oldest running one "
            f"began (id {progress.last.below}): polling can't keep track of them",
            remedy="end that one: SELECT pid, xact_start, query FROM pg_catalog.pg_stat_activity "
            "ORDER BY pg_catalog.age(backend_xid) DESC NULLS LAST LIMIT 1; or SELECT gid "
            "FROM pg_catalog.pg_prepared_xacts; the "
            "table is then re-read",
        )


async def latest_cursor(connection: AsyncConnection[Any], polled: PolledTable) -> str | None:
    """Return the text of the highest cursor; None without an index. Raises psycopg.Error."""
    async with connection.transaction():
        return await _peak(connection, polled, await _locked_shape(connection, polled))


# --- scans -----------------------------------------------------------------------------------


async def _whole(
    connection: LivenessCheckedConnection, scan: TablePoll, ids: PollXids
) -> AsyncGenerator[FoundRows, None]:
    """Scan the blocks of the table and its partitions, a range at a time."""
    if scan.progress.is_current(ids):
        return
    column = None if scan.polled.by is None else sql.Identifier(scan.polled.by)
    condition = scan.progress.whole_condition(column, ids)
    for leaf in await leaves_of(connection, scan.polled.table):
        if leaf.is_whole:
            ranges = [BlockRange(leaf.schema, leaf.name, is_whole=True, oid=leaf.oid)]
        elif not leaf.is_splittable:
            ranges = [BlockRange(leaf.schema, leaf.name, oid=leaf.oid)]
        else:
            starts = range(0, max(1, leaf.blocks), PAGE_BLOCKS)
            ends: list[int | None] = [*starts[1:], None]
            ranges = [
                BlockRange(leaf.schema, leaf.name, s, e, oid=leaf.oid)
                for s, e in zip(starts, ends, strict=True)
            ]
        if leaf.oid != scan.polled.table.oid:
            await lock_table(connection, scan.polled.table, ranges[0], scan.polled.others)
        for blocks in ranges:
            query = scan_query(scan.polled, condition, blocks.relation, bounds=blocks.bounds)
            async with aclosing(_copy(connection, scan, query, ids)) as found:
                async for rows in found:
                    yield rows


async def _near(
    connection: LivenessCheckedConnection, scan: TablePoll, ids: PollXids, shape: PolledShape
) -> AsyncGenerator[FoundRows, None]:
    """Scan the index from the floor on, a page at a time."""
    assert scan.polled.by is not None
    column = sql.Identifier(scan.polled.by)
    condition = scan.progress.near_condition(column, ids)
    after: str | None = None
    while True:
        near = NearRows(scan.page_rows, after)
        query = scan_query(scan.polled, condition, shape.relation_of(scan.polled), near=near)
        count = 0
        async with aclosing(_copy(connection, scan, query, ids, is_near=True)) as found:
            async for rows in found:
                count += rows.rows.count
                after = rows.last_cursor
                yield rows
        if count < scan.page_rows:
            return


async def _copy(
    connection: LivenessCheckedConnection,
    scan: TablePoll,
    query: sql.Composed,
    ids: PollXids,
    *,
    is_near: bool = False,
) -> AsyncGenerator[FoundRows, None]:
    polled, limit_bytes = scan.polled, scan.row_limit_bytes
    columns = len(polled.table.columns) + 2 + is_near
    cutter = CopyRows(str(polled.table.id), columns, sent_encoding(connection))
    copied = copying(connection, query, limit_bytes=limit_bytes, limit_s=scan.limit_s)
    async with copied as blocks:
        async for block in blocks:
            refuse_too_large(polled.table.id, block.largest_bytes, limit_bytes)
            rows = cutter.feed(block.buffer, block.starts, block.ends)
            if rows is not None:
                yield FoundRows.from_copy(polled, rows, ids.next)
    cutter.finish()


async def _locked_shape(connection: AsyncConnection[Any], polled: PolledTable) -> PolledShape:
    """Lock the table, read its shape. Raises TableChangedError if the table does not exist."""
    found = await connection.execute(_SHAPE, (polled.by, polled.table.oid))
    row = await found.fetchone()
    if row is None:
        raise TableChangedError(polled.table.id, "does not exist")
    shape = PolledShape(*row)
    await lock_table(connection, polled.table, shape.blocks_of(polled), polled.others)
    return shape


async def _peak(
    connection: AsyncConnection[Any], polled: PolledTable, shape: PolledShape
) -> str | None:
    if not shape.is_indexed:
        return None
    row = await (await connection.execute(peak_query(polled, shape))).fetchone()
    return None if row is None else row[0]


def _all(xids: Sequence[FullXids]) -> FullXids:
    return np.unique(np.concatenate(xids)) if xids else np.empty(0, np.int64)
