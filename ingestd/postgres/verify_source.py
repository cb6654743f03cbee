"""A source at a consistent point, for comparison with the lake.

The rows are read at an ordinary read-only snapshot that one session holds; SELECT is enough. Every
transaction visible to it has its commit below the WAL's end, which is read right after the snapshot
is taken. The reverse does not hold: a commit is in the WAL for a moment before other sessions see
it, so a transaction with a commit below that position may be invisible. Transactions that waited
for the locks of such a transaction are invisible, too. So the point consists of a position and
transaction ids. On a standby, transactions become visible as their commits are replayed, and a
snapshot does not list the running ones. There the point is that of a temporary slot, as in a
consistent snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Self

import psycopg
import pyarrow as pa
from psycopg import AsyncConnection

from ingestd.model.errors import TableChangedError, TableError, TransientError
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import Table
from ingestd.ports import Split
from ingestd.ports.verify import VerifyPoint
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.session import connect
from ingestd.postgres.connection.wal_position import insert_position, is_standby
from ingestd.postgres.polling.polled_table import PolledTable
from ingestd.postgres.polling.queries import is_deleted
from ingestd.postgres.rewrites.fingerprint_queries import read_files
from ingestd.postgres.settings import PollingSettings, PostgresSettings, WalSettings
from ingestd.postgres.snapshot.ctid_splits import split_table
from ingestd.postgres.snapshot.errors import read_error
from ingestd.postgres.snapshot.read_view import (
    LOCK_TIMEOUT_S,
    ExportedView,
    ReadPoint,
    enter_snapshot,
)
from ingestd.postgres.snapshot.table_pages import TablePages
from ingestd.postgres.wal.slots.create import ExportedPoint, temporary_point

SLOT_LIMIT_S = 120.0
"""How long a standby's slot may wait for transactions that began before it."""
_SNAPSHOT = (
    "SELECT pg_catalog.pg_current_snapshot()::text, pg_catalog.pg_export_snapshot(),"
    " pg_catalog.clock_timestamp()"
)
FilesByOid = Mapping[int, Mapping[int, int]]
"""The files of tables and of their partitions, by table OID."""


class ReadThrottle:
    """Limits reading to a number of bytes per second; None: unlimited."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def throttle(self, nbytes: int) -> None:
        """Record that `nbytes` were read; return when more may be read."""
        if self._bytes_per_s is None:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + nbytes / self._bytes_per_s
        await asyncio.sleep(self._free_at - now)


class SourceAtPoint:
    """See `ingestd.ports.verify.VerifiedSource`. Create it with `open`; always `close` it.

    `lock_timeout_s`: how long a read may wait for another session's lock on a table.
    """

    lock_timeout_s = LOCK_TIMEOUT_S

    def __init__(  # noqa: PLR0917 - all are fields
        self,
        settings: PostgresSettings,
        held: AsyncConnection[Any] | ExportedPoint,
        exported: str,
        point: VerifyPoint,
        at: datetime,
        files: FilesByOid,
        pace: ReadThrottle,
        row_limit_bytes: int,
    ) -> None:
        self._settings = settings
        self._dsn = settings.dsn.get_secret_value()
        self._held = held
        self._exported = exported
        self.point = point
        self._at = at
        self._files = files
        self._pace = pace
        self._row_limit_bytes = row_limit_bytes

    @classmethod
    async def open(
        cls,
        where: str,
        settings: PostgresSettings,
        tables: Sequence[Table],
        pace: ReadThrottle,
        *,
        row_limit_bytes: int,
    ) -> Self:
        """Take the snapshot. `where` begins an error's text. A row over the limit is a TableError.

        Raises OperatorError, TransientError.
        """
        dsn = settings.dsn.get_secret_value()
        try:
            async with await connect(dsn, lock_timeout_s=cls.lock_timeout_s) as connection:
                # Before the snapshot: files replaced from here to the end of reading are noticed.
                files, _ = await read_files(connection, [t.oid for t in tables])
                takes_slot = isinstance(settings, WalSettings) and await is_standby(connection)
            if takes_slot:
                assert isinstance(settings, WalSettings)
                slot = await _slot(where, settings)
                point = VerifyPoint(slot.point)
                return cls(
                    settings, slot, slot.snapshot, point, slot.at, files, pace, row_limit_bytes
                )
            return await cls._at_snapshot(settings, files, pace, row_limit_bytes)
        except psycopg.Error as error:
            raise classify(error, f"{where}, snapshot", dsn) from error

    @classmethod
    async def _at_snapshot(
        cls, settings: PostgresSettings, files: FilesByOid, pace: ReadThrottle, row_limit_bytes: int
    ) -> Self:
        keeper = await connect(settings.dsn.get_secret_value(), autocommit=False)
        try:
            await keeper.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            row = await (await keeper.execute(_SNAPSHOT)).fetchone()
            assert row is not None
            seen, exported, at = row
            lsn = await insert_position(keeper)  # after the snapshot: all it sees is below
        except BaseException:
            await keeper.close()
            raise
        is_exact = not isinstance(settings, PollingSettings)
        point = VerifyPoint(lsn, PgSnapshot.parse(seen) if is_exact else None, is_exact)
        return cls(settings, keeper, exported, point, at, files, pace, row_limit_bytes)

    async def splits(self, table: Table) -> Sequence[Split]:
        """Return a table's splits, by blocks, as of the snapshot."""
        nbytes = self._settings.snapshot_chunk
        try:
            async with await connect(
                self._dsn, autocommit=False, lock_timeout_s=self.lock_timeout_s
            ) as connection:
                await enter_snapshot(connection, self._exported)
                return await split_table(
                    connection, self._without_deleted(table), self._exported, nbytes
                )
        except psycopg.errors.LockNotAvailable as error:
            raise self._locked(table) from error
        except psycopg.Error as error:
            raise read_error(error, table.id, self._dsn) from error

    async def batches(self, split: Split) -> AsyncGenerator[pa.RecordBatch, None]:
        """Read a split by COPY."""
        view = ExportedView(self._dsn, self._exported, ReadPoint(self.point.lsn, self._at))
        rows = TablePages(
            self._dsn,
            split,
            view,
            row_limit_bytes=self._row_limit_bytes,
            lock_timeout_s=self.lock_timeout_s,
        )
        async with contextlib.aclosing(rows.pages()) as pages:
            try:
                async for page in pages:
                    yield page.batch.rows
                    await self._pace.throttle(page.batch.nbytes)
            except TableChangedError as error:
                if isinstance(error.__cause__, psycopg.errors.LockNotAvailable):
                    raise self._locked(split.table) from error
                raise

    async def ensure_unreplaced(self, table: Table) -> None:
        """Compare the files. TRUNCATE and rewrites empty a table for older snapshots, too."""
        try:
            async with await connect(self._dsn, lock_timeout_s=self.lock_timeout_s) as connection:
                now, _ = await read_files(connection, [table.oid])
        except psycopg.errors.LockNotAvailable as error:
            raise self._locked(table) from error
        except psycopg.Error as error:
            raise read_error(error, table.id, self._dsn) from error
        if now.get(table.oid) != self._files.get(table.oid):
            raise TableChangedError(
                table.id,
                "was truncated, rewritten or repartitioned during the comparison",
                remedy="compare it again",
            )

    async def close(self) -> None:
        """Release the snapshot."""
        await self._held.close()

    def _locked(self, table: Table) -> TableError:
        limit = f"{self.lock_timeout_s:g} s"
        return TableError(
            table.id,
            f"could not be read within {limit}: another session holds a lock on it",
            remedy="compare it again once that session ends; see pg_locks and pg_stat_activity",
        )

    def _without_deleted(self, table: Table) -> Table:
        """Return the table without the rows that count as deleted."""
        if not isinstance(self._settings, PollingSettings):
            return table
        deleted = self._settings.controls(table.id).deleted
        if deleted is None:
            return table
        polled = PolledTable(table, None, deleted, 0.0, None)
        return replace(table, row_filter=f"NOT {is_deleted(polled).as_string(None)}")


async def _slot(where: str, settings: WalSettings) -> ExportedPoint:
    try:
        async with asyncio.timeout(SLOT_LIMIT_S):
            return await temporary_point(settings)
    except TimeoutError as error:
        raise TransientError(
            f"{where}: no snapshot within {SLOT_LIMIT_S:g} s: creating its temporary slot waits for"
            " all transactions that began before",
            reason="slot_waits",
            remedy="end the oldest: SELECT pid, xact_start, state, query FROM "
            "pg_catalog.pg_stat_activity"
            " WHERE backend_xid IS NOT NULL ORDER BY xact_start;",
        ) from error
