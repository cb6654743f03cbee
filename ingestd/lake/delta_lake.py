"""The lake of one source (ports.Sink): opening, loading and everything outside a single epoch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

import pyarrow as pa

from ingestd.lake.delta.append_log import AppendLog
from ingestd.lake.delta.read import read_batches
from ingestd.lake.epoch_writer import DeltaEpochWriter
from ingestd.lake.epochs_table import EpochTable
from ingestd.lake.fencing import WriterIdentity
from ingestd.lake.lake_id import note_source, read_lake_id, removed, require_lake_id, write_lake_id
from ingestd.lake.layout import Layout
from ingestd.lake.opening import (
    missing_error,
    never_refuse,
    notices_of,
    torn_commit_error,
)
from ingestd.lake.raw_table import RawTable, RowRange, raw_schema
from ingestd.lake.raw_tables import OPENING_WORKERS, RawTables
from ingestd.lake.registry_table import RegistryTable
from ingestd.lake.store.pending_calls import StorageCalls
from ingestd.lake.store.plain_files import Durability
from ingestd.lake.store.store import Store, open_store
from ingestd.lake.threads import WorkerThreads, prefetch
from ingestd.model.changes import CommittedEpoch, EpochSummary
from ingestd.model.errors import OperatorError, TableError
from ingestd.model.lake_state import (
    RAW_TABLE_MISSING,
    LakeState,
    Notice,
    TableEvent,
    TableState,
    UnlistedRows,
)
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table, TableId
from ingestd.ports import EpochWriter, Fragment
from ingestd.process.clock import utc_now
from ingestd.process.memory import Trimming

T = TypeVar("T")
WORKERS = 4
"""Tables committed concurrently on a disk."""
FILE_WORKERS = min(32, (os.cpu_count() or 1) + 4)
"""Tables whose files are written concurrently on a disk: mostly they wait for fsync."""
STORE_WORKERS = 32
"""The same two limits for an object store, where all the time is spent on requests."""
CHECKPOINT_WORKERS, STORE_CHECKPOINT_WORKERS = 1, 2
"""Concurrent checkpoints: each holds a table's log in memory and takes about 90 requests."""
LOCAL_CHECK_S, REMOTE_CHECK_S = 5.0, 60.0
"""How often an idle source reads the lake's id: in an object store this takes a request."""


def _do_nothing(_step: str) -> None:
    """Do nothing before a commit."""


class DeltaLake:
    """One source's raw tables, `_epochs` and `_tables` below `uri` (design sections 2 and 8.7).

    `uri`: a local path, file://, or any URI that deltalake reaches with `storage_options`.
    `buffer_bytes`: Arrow bytes of the epoch being filled that are buffered before row groups are
    written. `trimming`: the process's. `durability`: how local files are made durable. `now`: the
    clock of `committed_at`, and of how long a log was quiet. `before_commit`: called in a worker
    thread with "schema.table", "_epochs" or "_tables" before each Delta commit with rows or a
    position; if it raises, the commit is not made. `writer`: the process, the same for all lakes
    that it opens in turn. `is_claimed`: whether the caller holds the source's claim; otherwise the
    lake is read-only, and `open` repairs nothing after a power failure. `calls`: records the calls
    to the storage. `store`: the files at `uri`, if they are open already.
    """

    def __init__(
        self,
        uri: str,
        source: str,
        *,
        storage_options: Mapping[str, str] | None = None,
        buffer_bytes: int = 64 << 20,
        trimming: Trimming | None = None,
        durability: Durability | None = None,
        now: Callable[[], datetime] = utc_now,
        before_commit: Callable[[str], None] = _do_nothing,
        writer: WriterIdentity | None = None,
        is_claimed: bool = True,
        calls: StorageCalls | None = None,
        store: Store | None = None,
    ) -> None:
        self.uri = uri
        self.layout = Layout(source)
        self.store = store or open_store(uri, storage_options, durability, calls)
        self.buffer_bytes = buffer_bytes
        self.trimming = trimming or Trimming()
        self.now = now
        self.before_commit = before_commit
        is_remote = not self.store.syncs
        self.check_interval_s = REMOTE_CHECK_S if is_remote else LOCAL_CHECK_S
        self.jobs = WorkerThreads(at_once=STORE_WORKERS if is_remote else WORKERS)
        self.file_jobs = WorkerThreads(at_once=STORE_WORKERS if is_remote else FILE_WORKERS)
        self._checkpoints = self._checkpoint_threads()
        self._writer = writer or WriterIdentity()
        self._is_claimed = is_claimed
        self._epochs_log, self._tables_log = self._own_logs = tuple(
            AppendLog(
                self.store,
                folder,
                self.layout.app_id(),
                self._checkpoint_in_background,
                writer=self._writer,
                now=now,
            )
            for folder in (self.layout.epochs, self.layout.tables)
        )
        self._epochs = EpochTable(self._epochs_log, before_commit)
        self._registry = RegistryTable(self._tables_log, before_commit)
        self._epochs_lock = asyncio.Lock()
        self._registry_lock = asyncio.Lock()
        self.raw_tables = RawTables(
            self.store,
            self.layout,
            self._epochs,
            self._registry,
            jobs=self.jobs,
            new_table=self._new_raw,
            ensure_not_taken_over=self._ensure_not_taken_over,
            writer=self._writer,
            is_claimed=is_claimed,
        )
        self._writers: list[DeltaEpochWriter] = []
        self._is_open = False
        self._lake_id: str | None = None

    # --- the port ---------------------------------------------------------------------------

    async def open(self) -> LakeState:
        """Read what the lake holds; discard everything uncommitted. Create nothing.

        Raise OperatorError or TransientError (storage). Raise OperatorError too if another process
        that may still be running took over.
        """
        await self._forget()
        committed = await self.jobs.run(self._load)
        self._is_open = True
        return committed

    def refuse_beyond(self, end: Lsn) -> Mapping[TableId, TableError]:
        """Treat tables with a position above `end` as damaged until they are replaced."""
        return self.raw_tables.refuse_beyond(end)

    async def write_lake_id(self, lake_id: str | None = None) -> str:
        """Write the lake's id if it has none. Return its id."""
        self._lake_id = await self.jobs.run(write_lake_id, self.store, lake_id)
        self.store.needs_lake_id = True
        return self._lake_id

    async def ensure_exists(self) -> None:
        """Read the lake's id, and the newest commit of `_epochs`."""
        await self.jobs.run(require_lake_id, self.store, self._lake_id)
        await self.ensure_unreplaced()

    async def ensure_unreplaced(self) -> None:
        """Raise LakeLostError if `_epochs` is not the one that was read or written last."""
        async with self._epochs_lock:
            await self.jobs.run(self._epochs.ensure_unreplaced)

    async def fence(self) -> Mapping[TableId, TableError]:
        """Fence out all processes that opened the lake before: their commits fail (I5).

        Raise TransientError if one of them committed since `open`.
        """
        async with self._epochs_lock, self._registry_lock:
            before = set(self.raw_tables.damaged)
            await self.jobs.run(self._fence)
        damaged = self.raw_tables.damaged.items()
        return {table: error for table, error in damaged if table not in before}

    async def adopt(self, server_id: str) -> None:
        """Record the server that the rows come from; create `_epochs` and `_tables`."""
        async with self._epochs_lock:
            await self.jobs.run(self._epochs.adopt, server_id)
        async with self._registry_lock:
            await self.jobs.run(self._registry.adopt)
        await self.jobs.run(note_source, self.store, self.layout.root)

    def begin_epoch(self) -> EpochWriter:
        """Begin the next epoch, numbered after the last one that is durable or being committed.

        Raise RuntimeError before `open` and while another epoch is being filled.
        """
        if not self._is_open:
            msg = "the sink is not open"
            raise RuntimeError(msg)
        pending = [w for w in self._writers if not w.is_over]
        if any(not w.is_committing for w in pending):
            msg = "the epoch before is still being filled"
            raise RuntimeError(msg)
        previous = pending[-1] if pending else None
        number = self._epochs.last_epoch + 1 if previous is None else previous.number + 1
        writer = DeltaEpochWriter(self, number, previous)
        self._writers = [*pending, writer]
        return writer

    async def record(self, events: Sequence[TableEvent]) -> None:
        """Append to `_tables`, durably, one row an event, in the order of calls.

        A table whose snapshot begins is re-created if its folder was moved away since.
        """
        if not events:
            return
        async with self._registry_lock:  # held from the first await on: events keep their order
            last = self._registry.tables()
            being_read = {n for n, t in last.items() if t.state is TableState.SNAPSHOTTING}
            begun = {e.table.id for e in events if e.state is TableState.SNAPSHOTTING}
            new = [table for table in begun if str(table) not in being_read]
            await self.jobs.run(self.raw_tables.note_removed, new)
            await self.jobs.run(self._registry.record, events)

    async def unsent(self, table: Table, since: Lsn) -> Sequence[pa.RecordBatch]:
        """Search the raw table as it was when last read or committed."""
        raw = await self.raw_tables.reload_if_damaged(table.id)
        with self.raw_tables.faults_of(table.id):
            return await self.jobs.run(raw.unsent, table, since)

    async def has_marker(self, table: Table, point: Lsn) -> bool:
        """Search the raw table as `unsent` does."""
        raw = await self.raw_tables.reload_if_damaged(table.id)
        with self.raw_tables.faults_of(table.id):
            return await self.jobs.run(raw.has_marker, point)

    async def advance(self, position: Lsn) -> None:
        """Record, durably, that nothing captured lies between the last epoch and `position`."""
        async with self._epochs_lock:
            await self.jobs.run(self._epochs.advance, position)

    async def changes(
        self, table: TableId, columns: Sequence[str]
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Read the newest version through a separate handle, one batch ahead of the caller.

        The version is fixed when the first batch is requested.
        """
        rows = read_batches(self.store, self.layout.raw(table), columns)
        with self.raw_tables.faults_of(table):
            async with aclosing(prefetch(rows)) as batches:
                async for batch in batches:
                    yield batch

    async def last_claim(self) -> str | None:
        """Return the last writer's claim, as `WriterIdentity.other_claim`. Read only `_epochs`.

        Raise OperatorError, TransientError.
        """
        await self.jobs.run(self._epochs.load)
        return self._writer.other_claim(await self.jobs.run(self._epochs_log.newest_writer))

    async def close(self) -> None:
        """Release all resources. May be called at any time, also twice."""
        await self._forget()

    # --- loading ----------------------------------------------------------------------------

    async def append_files(
        self, table: Table, fragments: Sequence[Fragment], watermark: Lsn, unlisted: RowRange
    ) -> None:
        """Append rows that other processes wrote, in one commit.

        They belong to the next epoch and follow the last one's end, as after a crash between two
        commits. `close_loaded`, or the first epoch after the next `open`, lists them. No epoch may
        be filling. `watermark`: the app transaction, at or after the last epoch's end; the table's
        changes from there on are still to come. `unlisted`: the rows in the fragments. Raise as
        `EpochWriter.commit` does.
        """
        raw = self.raw_tables.raw_table(table.id)
        schema = raw.plan_schema_for(raw_schema(table))
        loading = self.jobs.run(self._load_table, raw, table, schema, fragments, watermark)
        await self.raw_tables.of_table(table.id, loading)
        self.raw_tables.add_unlisted(table.id, unlisted)

    def _load_table(
        self,
        raw: RawTable,
        table: Table,
        schema: pa.Schema,
        fragments: Sequence[Fragment],
        watermark: Lsn,
    ) -> None:
        self.before_commit(str(table.id))
        raw.commit(table, schema, fragments, watermark)

    async def close_loaded(self, summary: EpochSummary) -> CommittedEpoch:
        """Write the next epoch with all loaded rows: everything its tables hold at its end_lsn."""
        number = self._epochs.last_epoch + 1
        return await self.close_epoch(CommittedEpoch(number, summary, self.now(), ()))

    async def files_of(self, table: TableId) -> frozenset[str]:
        """Return the paths of a raw table's data files; none if the table does not exist.

        The state is that of the last read or commit.
        """
        raw = self.raw_tables.loaded.get(table)
        if raw is None:
            return frozenset()
        return await self.raw_tables.of_table(table, self.jobs.run(raw.files))

    # --- for the raw tables -----------------------------------------------------------------

    def _new_raw(self, table: TableId) -> RawTable:
        folder, app_id = self.layout.raw(table), self.layout.app_id(table)
        log = AppendLog(
            self.store,
            folder,
            app_id,
            self._checkpoint_in_background,
            writer=self._writer,
            decides=False,
            now=self.now,
        )
        return RawTable(table, log)

    async def _ensure_not_taken_over(self) -> None:
        async with self._epochs_lock:
            await self.jobs.run(self._epochs.ensure_not_taken_over)

    # --- for the epoch writer ---------------------------------------------------------------

    async def ensure_not_fenced(self) -> None:
        """Commit to `_epochs` without a row: this fails if another process has taken over."""
        async with self._epochs_lock:
            await self.jobs.run(self._epochs.ensure_not_fenced)

    async def close_epoch(self, epoch: CommittedEpoch) -> CommittedEpoch:
        """Append the epoch's row; list also the tables whose rows the lake already held."""
        complete = replace(epoch, tables=self.raw_tables.with_unlisted(epoch.tables))
        async with self._epochs_lock:
            await self.jobs.run(self._epochs.append_epoch, complete)
        self.raw_tables.unlisted = {}
        return complete

    # --- opening ----------------------------------------------------------------------------

    async def _forget(self) -> None:
        self._is_open = False
        writers, self._writers = self._writers, []
        for writer in writers:
            if not writer.is_over:
                await writer.abort()
        await self.file_jobs.settle()
        await self.jobs.settle()  # no checkpoint is requested after that
        await self.jobs.run(self._end_checkpoints)
        await self.jobs.settle()

    def _checkpoint_in_background(self, checkpoint: Callable[[], None]) -> Future[None]:
        return self._checkpoints.submit(checkpoint)

    def _end_checkpoints(self) -> None:
        """Wait for running checkpoints; drop queued ones, which only save readers time."""
        self._checkpoints.shutdown(cancel_futures=True)
        self._checkpoints = self._checkpoint_threads()

    def _checkpoint_threads(self) -> ThreadPoolExecutor:
        at_once = CHECKPOINT_WORKERS if self.store.syncs else STORE_CHECKPOINT_WORKERS
        return ThreadPoolExecutor(at_once, "checkpoint")

    def _load(self) -> LakeState:
        repairs = self._is_claimed
        self._lake_id = read_lake_id(self.store)
        self.store.needs_lake_id = self._lake_id is not None
        self._epochs.load(never_refuse if repairs else None)
        taken = self._taken_over()
        self._registry.load(self._accept_torn_registry if repairs else None)
        for log in self._own_logs:
            log.ensure_writable()
        self.raw_tables.load()
        with ThreadPoolExecutor(OPENING_WORKERS) as pool:
            pending = [pool.submit(notices_of, log) for log in self._own_logs]
        notices = [notice for of_one in pending for notice in of_one.result()]
        notices += self.raw_tables.judge_commits()
        self._refuse_if_missing()
        missing = self.raw_tables.missing()
        self.raw_tables.find_unlisted()
        loaded, unlisted = self.raw_tables.loaded, self.raw_tables.unlisted
        watermarks = {t: r.watermark for t, r in loaded.items() if r.watermark is not None}
        if repairs:
            for log in self._own_logs:
                log.settle()
        has_something = self._epochs.exists or self._registry.exists or loaded
        return LakeState(
            removed=None if has_something else removed(self.store, self.layout.root, self._lake_id),
            epoch=self._epochs.last_epoch,
            position=self._epochs.position,
            watermarks=watermarks,
            tables={
                entry.table: replace(
                    entry, state=TableState.STOPPED, reason=RAW_TABLE_MISSING, progress=""
                )
                if entry.table in missing
                else self.raw_tables.with_lake_columns(entry)
                for entry in self._registry.tables().values()
            },
            server_id=self._epochs.server_id,
            unlisted={t: UnlistedRows(r.first, r.reach, r.at) for t, r in unlisted.items()},
            missing=missing,
            damaged=dict(self.raw_tables.damaged),
            notices=tuple(notices if taken is None else [taken, *notices]),
            lake_id=self._lake_id,
        )

    def _taken_over(self) -> Notice | None:
        """Return a notice if another wrote last. Raise OperatorError if it took over from us."""
        signed = self._epochs_log.newest_writer() if self._is_claimed else None
        self._writer.forget_allegations_after(signed)
        self._writer.refuse_if_taken_over(signed, self.store.uri(""))
        return self._writer.takes_over(signed, self.store.uri(""))

    def _fence(self) -> None:
        """Fence `_epochs` first: from then on no other writer completes an epoch.

        Nor can it add rows to a table created after that. Tables created before show up as folders.
        """
        for log in self._own_logs:
            log.fence()
        self.raw_tables.fence()
        self._epochs.ensure_not_taken_over()  # only it decides about an alleged takeover
        self._writer.has_fenced = True

    # --- what is missing at a start ---------------------------------------------------------

    def _accept_torn_registry(self, version: int) -> None:
        """Raise if later commits may depend on the incomplete commit of `_tables`."""
        if self._epochs.position is not None:
            raise torn_commit_error(self._tables_log, version)

    def _refuse_if_missing(self) -> None:
        """Raise if a lake lacks `_epochs` or `_tables`, which are created before all others."""
        has_raw = bool(self.raw_tables.loaded or self.raw_tables.damaged)
        if not self._epochs.exists and (has_raw or self._registry.exists):
            raise self._missing_error(self.layout.epochs)
        has_rows = has_raw or self._epochs.position is not None
        if not self._registry.exists and has_rows:
            raise self._missing_error(self.layout.tables)

    def _missing_error(self, folder: str) -> OperatorError:
        return missing_error(self.store.uri(folder), self.store.uri(self.layout.root))
