"""A source at a consistent point L: its tables, and an exported snapshot of that point.

The snapshot is that of a temporary logical slot: it sees every transaction with commit_lsn < L and
none with commit_lsn >= L. It needs a free slot and a walsender, and it holds back vacuum on the
source while it is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Self, TypeVar

import psycopg

from ingestd.app.connectors import FACTORIES
from ingestd.model.errors import ConfigError, TableChangedError, TransientError
from ingestd.model.lake_state import RegisteredTable
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table, TableId
from ingestd.ports import Coverage, Split
from ingestd.postgres.catalog.partitions import leaves_of
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.session import connect
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.snapshot.errors import read_error
from ingestd.postgres.wal.slots.create import ExportedPoint, temporary_point
from spark_jobs.source.split_frame import SnapshotRows

T = TypeVar("T")

SLOT_LIMIT_S = 120.0
"""How long creating the slot may wait for older transactions."""

_Files = frozenset[tuple[int, int]]
"""A table's relations that hold rows, and the file of each."""


class SourcePoint:
    """Opens the point on entry and closes it on exit. Blocks; a thread does the I/O.

    `known`: the tables that are registered in the lake. Raises ConfigError (a source without
    replication), OperatorError, TransientError.
    """

    def __init__(
        self,
        source: str,
        settings: object,
        known: Mapping[TableId, RegisteredTable],
        *,
        slot_limit_s: float = SLOT_LIMIT_S,
    ) -> None:
        if not isinstance(settings, WalSettings):
            raise ConfigError(
                f"sources.{source}: only a source of kind wal has a position to compare at"
            )
        self._source = source
        self._settings = settings
        self._dsn = settings.dsn.get_secret_value()
        self._known = known
        self._slot_limit_s = slot_limit_s
        self._connector = FACTORIES[settings.kind].create(source, settings, memory_bytes=0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="ingestd-source-point", daemon=True
        )
        self._exported: ExportedPoint | None = None
        self._files: dict[TableId, _Files] = {}
        self.coverage = Coverage((), ())

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._run(self._open())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def lsn(self) -> Lsn:
        """L: the snapshot sees everything that committed below it, and nothing else."""
        assert self._exported is not None
        return self._exported.point

    @property
    def tables(self) -> Mapping[TableId, Table]:
        """The captured tables, as they are described now."""
        return {table.id: table for table in self.coverage.tables}

    def rows(self, table: Table, split_bytes: int) -> SnapshotRows:
        """Return a table's rows in the snapshot, in splits. Raises TableError, TransientError."""
        splits = self._run(self._splits(table, split_bytes))
        return SnapshotRows.from_splits(
            self._source, self._settings, self._settings.kind, table, splits
        )

    def ensure_unreplaced(self, table: Table) -> None:
        """Check that the rows read from the table were those at the point.

        TRUNCATE and rewrites empty a table for older snapshots, too. Raises TableChangedError.
        """
        if self._run(self._files_of(table)) != self._files.get(table.id):
            raise TableChangedError(
                table.id,
                "was truncated, rewritten or given other partitions while it was compared",
                remedy="compare it again",
            )

    def close(self) -> None:
        """End the snapshot and its slot. May be called twice."""
        if not self._thread.is_alive():
            return
        exported, self._exported = self._exported, None
        if exported is not None:
            with contextlib.suppress(psycopg.Error):
                self._run(exported.close())
        self._run(self._connector.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return done.result()
        except BaseException:
            done.cancel()
            raise

    async def _open(self) -> None:
        where = f"source {self._source}"
        self.coverage = await self._connector.coverage(self._known)
        if self.coverage.faults:
            raise self.coverage.faults[0]
        # Before the point, so that a file replaced between here and the end of reading is detected.
        for table in self.coverage.tables:
            self._files[table.id] = await self._files_of(table)
        try:
            async with asyncio.timeout(self._slot_limit_s):
                self._exported = await temporary_point(self._settings)
        except TimeoutError as error:
            raise TransientError(
                f"{where}: no snapshot within {self._slot_limit_s:g} s: creating its temporary slot"
                " waits for all transactions that began before",
                reason="slot_waits",
                remedy="end the oldest: SELECT pid, xact_start, state, query FROM "
                "pg_catalog.pg_stat_activity"
                " WHERE backend_xid IS NOT NULL ORDER BY xact_start;",
            ) from error
        except psycopg.Error as error:
            raise classify(error, f"{where}, temporary slot", self._dsn) from error

    async def _files_of(self, table: Table) -> _Files:
        try:
            async with await connect(self._dsn) as connection:
                return frozenset((r.oid, r.file) for r in await leaves_of(connection, table))
        except psycopg.Error as error:
            raise read_error(error, table.id, self._dsn) from error

    async def _splits(self, table: Table, split_bytes: int) -> Sequence[Split]:
        assert self._exported is not None
        snapshot = self._exported.snapshot
        return await self._connector.splits().splits(table, snapshot, split_bytes)
