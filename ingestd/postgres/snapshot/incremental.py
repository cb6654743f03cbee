"""Tables read in chunks, each at its own position (design section 8.9, way b).

A chunk is a range of blocks, read in a short transaction. `ingestd.pipeline.dedup_window` compares
it with what the stream sends meanwhile; docs/snapshots.md explains why the result is exact.
`incremental_choice` says which tables are read so. The config and the docs for users also say
"chunked".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.model.errors import TableReplacedError
from ingestd.model.keys import Key
from ingestd.model.lsn import Lsn
from ingestd.model.memory_shares import SNAPSHOT_PAGES, bytes_of
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.recorded import RecordError
from ingestd.model.row_checks import row_limit_bytes
from ingestd.model.schema import Table, TableId
from ingestd.ports import SnapshotItem, SnapshotPage, Split
from ingestd.postgres.catalog.partitions import leaves_of
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.session import connect
from ingestd.postgres.connection.wal_position import (
    advance_wal,
    insert_position,
    is_standby,
    own_position,
)
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.snapshot.ctid_splits import split_blocks
from ingestd.postgres.snapshot.earlier_transactions import await_earlier_writers, await_running
from ingestd.postgres.snapshot.errors import snapshot_error
from ingestd.postgres.snapshot.incremental_choice import can_be_incremental
from ingestd.postgres.snapshot.key_lookup import KeyedRelation
from ingestd.postgres.snapshot.read_view import LOCK_TIMEOUT_S, OwnView, current_pg_snapshot
from ingestd.postgres.snapshot.resume import SnapshotRemainder, remainder_text
from ingestd.postgres.snapshot.split_readers import SplitReaders
from ingestd.postgres.snapshot.table_pages import TablePages
from ingestd.postgres.snapshot.where import check_condition, joined

CHUNKS = 4096
LARGEST = 4
"""A table of more than CHUNKS chunks has chunks of up to LARGEST times the size."""

_NOW = "SELECT pg_catalog.clock_timestamp()"


@dataclass(frozen=True, slots=True)
class _Start:
    point: Lsn
    at: datetime
    pg_snapshot: PgSnapshot


class IncrementalSnapshot:
    """See `ingestd.ports.Snapshot`. Created by `start`."""

    is_incremental = True

    def __init__(
        self,
        connection: AsyncConnection[Any],
        tables: Sequence[Table],
        start: _Start,
        remainder: SnapshotRemainder | None,
        *,
        settings: WalSettings,
        memory_bytes: int,
        where: str | None = None,
    ) -> None:
        self._connection = connection
        self._dsn = dsn = settings.dsn.get_secret_value()
        self._chunk_bytes = settings.snapshot_chunk
        self._row_limit_bytes = row_limit_bytes(memory_bytes)
        self._start = start
        self._remainder = remainder
        self._where = where
        self._is_partial = where is not None
        self._lock = asyncio.Lock()
        self._tables = {t.id: t for t in tables}
        workers = settings.snapshot_workers
        hold_bytes = min(2 * self._chunk_bytes, bytes_of(SNAPSHOT_PAGES, memory_bytes) // workers)
        self._readers = SplitReaders(
            dsn,
            [_only(table, where) for table in tables],
            self._split,
            OwnView(self._own_position) if self._is_partial else OwnView(),
            workers=workers,
            hold_bytes=hold_bytes,
            row_limit_bytes=self._row_limit_bytes,
            floor=start.pg_snapshot,
        )

    @classmethod
    async def start(
        cls,
        settings: WalSettings,
        tables: Sequence[Table],
        *,
        live_since_xid: int,
        newly_published: bool = False,
        remainder: str = "",
        where: str | None = None,
        memory_bytes: int,
    ) -> IncrementalSnapshot:
        """Record where it begins; `live_since_xid`: the `next_xid` at the start of `changes`.

        Raises psycopg.Error, TableReplacedError; TableError for a `where` that is not a condition.
        """
        rest = _parse(remainder, tables[0]) if remainder else None
        dsn = settings.dsn.get_secret_value()
        if where is not None:
            await check_condition(dsn, tables, where)
        connection = await connect(dsn)
        try:
            await _refuse_standby(connection, tables[0])
            await advance_wal(connection)  # an earlier snapshot may have rows at the end of the WAL
            if newly_published:
                await await_running(connection)
            pg_snapshot = await current_pg_snapshot(connection)
            cursor = await connection.execute(_NOW)
            row = await cursor.fetchone()
            assert row is not None
            point = await insert_position(connection) if rest is None else rest.point
            await await_earlier_writers(connection, tables, live_since_xid)
        except BaseException:
            await connection.close()
            raise
        start = _Start(point, row[0], pg_snapshot)
        return cls(
            connection,
            tables,
            start,
            rest,
            settings=settings,
            memory_bytes=memory_bytes,
            where=where,
        )

    @property
    def point(self) -> Lsn:
        """Where it began, or where the earlier snapshot began whose remainder it reads."""
        return self._start.point

    @property
    def at(self) -> datetime:
        """The server's time when it began."""
        return self._start.at

    def items(self) -> AsyncGenerator[SnapshotItem, None]:
        """Yield the tables' rows; see the port."""
        return self._readers.items()

    async def rows_of(
        self, table: Table, keys: Collection[Key]
    ) -> AsyncGenerator[SnapshotPage, None]:
        """Yield the rows with these keys, read by the key's index."""
        try:
            async with self._lock:
                keyed = await KeyedRelation.find(self._connection, table, table.identifying)
        except psycopg.Error as error:
            raise classify(error, "snapshot", self._dsn) from error
        split = Split(_only(table, self._where), "", keyed.blocks.to_text(), 0)
        view = OwnView(self._own_position)  # a chunk may have one of these rows at the WAL's end
        source = TablePages(self._dsn, split, view, row_limit_bytes=self._row_limit_bytes)
        async with contextlib.aclosing(source.rows_of(keyed, keys)) as pages:
            async for page in pages:
                yield page

    def oldest(self) -> PgSnapshot | None:
        """Return the oldest snapshot of the chunks in flight."""
        return self._readers.oldest()

    def abandon(self, table: TableId) -> None:
        """Stop reading further chunks of a table."""
        self._readers.abandon(table)

    def ratio_read(self, table: TableId) -> float:
        """Return the fraction read, by the sizes of completed chunks, including earlier runs."""
        return self._readers.ratio_read(table)

    def remainder(self, table: TableId, done: Collection[str]) -> str:
        """See the port."""
        if self._is_partial:
            return ""
        nbytes, splits = self._readers.nbytes(table), self._readers.splits(table)
        return remainder_text(self._tables[table], self.point, nbytes, splits, done)

    async def advance_source(self) -> None:
        """Write a message to the WAL; pgoutput skips it, but the position passes it."""
        try:
            async with self._lock:
                await advance_wal(self._connection)
        except psycopg.Error as error:
            raise classify(error, "snapshot", self._dsn) from error

    @property
    def is_closed(self) -> bool:
        """True if it can no longer be read."""
        return self._connection.closed

    async def close(self) -> None:
        """Close its connection."""
        await self._connection.close()

    async def _own_position(self, _: AsyncConnection[Any]) -> Lsn:
        async with self._lock:
            return await own_position(self._connection)

    async def _split(self, table: Table) -> tuple[Sequence[Split], int]:
        try:
            async with await connect(
                self._dsn, lock_timeout_s=LOCK_TIMEOUT_S, reads_names=True
            ) as connection:
                leaves = await leaves_of(connection, table)
        except psycopg.Error as error:
            raise snapshot_error(error, table.id, self._dsn) from error
        if not all(leaf.is_splittable and not leaf.is_whole for leaf in leaves):
            raise TableReplacedError(table.id, "can no longer be read by blocks")
        if self._remainder is not None:
            splits = self._remainder.splits(table, leaves, self._sized(self._remainder.nbytes))
            return splits, max(0, self._remainder.nbytes - sum(s.estimated_bytes for s in splits))
        # Blocks added later are covered by the stream.
        size = self._sized(sum(leaf.nbytes for leaf in leaves))
        return [
            Split(table, "", blocks.to_text(), nbytes)
            for leaf in leaves
            for blocks, nbytes in split_blocks(leaf, 0, leaf.blocks, size)
        ], 0

    def _sized(self, nbytes: int) -> int:
        """Return the chunk size of a table: each chunk is recorded when it is durable."""
        return min(max(self._chunk_bytes, nbytes // CHUNKS), LARGEST * self._chunk_bytes)


def _only(table: Table, where: str | None) -> Table:
    """Return the table with an additional condition on its rows."""
    if where is None:
        return table
    return replace(table, row_filter=joined([c for c in (table.row_filter, where) if c]))


async def _refuse_standby(connection: AsyncConnection[Any], table: Table) -> None:
    """Raise TableReplacedError: the remainder may be from the primary, which is read in chunks."""
    if await is_standby(connection):
        raise TableReplacedError(table.id, "can't be read in chunks from a standby")


def _parse(text: str, table: Table) -> SnapshotRemainder:
    """Return the remainder of a table. Raises TableReplacedError if it can't be continued."""
    try:
        found = SnapshotRemainder.parse(text)
    except RecordError as error:
        raise TableReplacedError(table.id, "has no readable record of its snapshot") from error
    if found.key != table.identifying or not can_be_incremental(table):
        raise TableReplacedError(table.id, "has another replica identity than before")
    return found
