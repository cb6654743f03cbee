"""The lake of one source (ports.Sink): opening, loading and everything outside a single epoch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

import pyarrow as pa

from ingestd.lake.delta.append_log import AppendLog, ClaimedTakeoverError
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
    refuse_foreign,
    torn_commit_error,
)
from ingestd.lake.raw_table import RawTable, RowRange, raw_schema
from ingestd.lake.registry_table import RegistryTable
from ingestd.lake.schema_evolution import type_text
from ingestd.lake.store.errors import storage_faults, table_fault, unreadable
from ingestd.lake.store.pending_calls import StorageCalls
from ingestd.lake.store.plain_files import Durability
from ingestd.lake.store.store import Store, linked, open_store
from ingestd.lake.table_folders import raw_tables
from ingestd.lake.threads import WorkerThreads, prefetch
from ingestd.model.changes import RESERVED_PREFIX, CommittedEpoch, EpochSummary, TableInEpoch
from ingestd.model.errors import FolderError, OperatorError, TableError
from ingestd.model.lake_state import (
    RAW_TABLE_MISSING,
    LakeState,
    Notice,
    RegisteredColumn,
    RegisteredTable,
    TableEvent,
    TableState,
    UnlistedRows,
)
from ingestd.model.lsn import LAST, ZERO, Lsn
from ingestd.model.schema import Table, TableId
from ingestd.ports import EpochWriter, Fragment
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
OPENING_WORKERS = 16
LOCAL_CHECK_S, REMOTE_CHECK_S = 5.0, 60.0
"""How often an idle source reads the lake's id: in an object store this takes a request."""


def _utc_now() -> datetime:
    return datetime.now(UTC)


def _do_nothing(_step: str) -> None:
    """Do nothing before a commit."""


class DeltaLake:
    """One source's raw tables, `_epochs` and `_tables` below `uri` (design sections 2 and 8.7).

    `uri`: a local path, file://, or any URI that deltalake reaches with `storage_options`.
    `buffer_bytes`: Arrow bytes of the epoch being filled that are buffered before row groups are
    written. `trimming`: the process's. `durability`: how local files are made durable. `now`: the
    clock of `committed_at`. `before_commit`: called in a worker thread with "schema.table",
    "_epochs" or "_tables" before each Delta commit with rows or a position; if it raises, the
    commit is not made. `writer`: the process, the same for all lakes that it opens in turn.
    `is_claimed`: whether the caller holds the source's claim; otherwise the lake is read-only, and
    `open` repairs nothing after a power failure. `calls`: records the calls to the storage.
    `store`: the files at `uri`, if they are open already.
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
        now: Callable[[], datetime] = _utc_now,
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
        self._own_logs = tuple(
            AppendLog(
                self.store,
                folder,
                self.layout.app_id(),
                self._checkpoint_in_background,
                writer=self._writer,
            )
            for folder in (self.layout.epochs, self.layout.tables)
        )
        self._epochs = EpochTable(self._own_logs[0], before_commit)
        self._registry = RegistryTable(self._own_logs[1], before_commit)
        self._epochs_lock = asyncio.Lock()
        self._reading_lock = asyncio.Lock()
        self._registry_lock = asyncio.Lock()
        self._raw: dict[TableId, RawTable] = {}
        self._damaged: dict[TableId, TableError] = {}
        self._unlisted: dict[TableId, RowRange] = {}
        self._ends: dict[TableId, Lsn] = {}
        self._first_epoch = 1
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
        refused: dict[TableId, TableError] = {}
        for table, raw in list(self._raw.items()):
            unlisted = self._unlisted.get(table)
            if _reach(raw, unlisted) > end:
                refused[table] = self.set_damaged(table, _beyond_server(raw, unlisted))
                self._ends[table] = end
                self._unlisted.pop(table, None)
                del self._raw[table]
        return refused

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
            before = set(self._damaged)
            await self.jobs.run(self._fence)
        return {table: error for table, error in self._damaged.items() if table not in before}

    async def adopt(self, origin: str) -> None:
        """Record the server that the rows come from; create `_epochs` and `_tables`."""
        async with self._epochs_lock:
            await self.jobs.run(self._epochs.adopt, origin)
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
            known = [self._raw[t] for t in begun & self._raw.keys() if str(t) not in being_read]
            await self.jobs.run(self._note_removed, known)
            await self.jobs.run(self._registry.record, events)

    async def unsent(self, table: Table, since: Lsn) -> Sequence[pa.RecordBatch]:
        """Search the raw table as it was when last read or committed."""
        raw = await self.reload_if_damaged(table.id)
        with self._faults_of(table.id):
            return await self.jobs.run(raw.unsent, table, since)

    async def has_marker(self, table: Table, point: Lsn) -> bool:
        """Search the raw table as `unsent` does."""
        raw = await self.reload_if_damaged(table.id)
        with self._faults_of(table.id):
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
        with self._faults_of(table):
            async with aclosing(prefetch(rows)) as batches:
                async for batch in batches:
                    yield batch

    async def last_claim(self) -> str | None:
        """Return the last writer's claim, as `WriterIdentity.other_claim`. Read only `_epochs`.

        Raise OperatorError, TransientError.
        """
        await self.jobs.run(self._epochs.load)
        return self._writer.other_claim(await self.jobs.run(self._own_logs[0].newest_writer))

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
        raw = self.raw_table(table.id)
        schema = raw.plan_schema_for(raw_schema(table))
        loading = self.jobs.run(self._load_table, raw, table, schema, fragments, watermark)
        await self.of_table(table.id, loading)
        before = self._unlisted.get(table.id)
        self._unlisted[table.id] = unlisted if before is None else before.with_more(unlisted)

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
        raw = self._raw.get(table)
        return frozenset() if raw is None else await self.jobs.run(raw.files)

    # --- for the epoch writer ---------------------------------------------------------------

    @property
    def has_unlisted(self) -> bool:
        """Return whether there are rows beyond the last epoch, which the next one must list."""
        return bool(self._unlisted)

    def raw_table(self, table: TableId) -> RawTable:
        """Return the raw table, which may not exist. Raise TableError if its name is too long."""
        if table not in self._raw:
            self._raw[table] = self._new_raw(table)
        return self._raw[table]

    def _new_raw(self, table: TableId) -> RawTable:
        folder, app_id = self.layout.raw(table), self.layout.app_id(table)
        log = AppendLog(
            self.store,
            folder,
            app_id,
            self._checkpoint_in_background,
            writer=self._writer,
            decides=False,
        )
        return RawTable(table, log)

    async def reload_if_damaged(self, table: TableId) -> RawTable:
        """Return the raw table; if it was found damaged, re-read it first.

        Raise TableError if it still is damaged, or as `raw_table` does.
        """
        if table in self._damaged:
            async with self._reading_lock:  # one handle for a log
                if table in self._damaged:
                    found = self._new_raw(table)
                    await self.of_table(table, self.jobs.run(self._reload, found))
                    self._raw[table] = found
                    del self._damaged[table]
                    self._ends.pop(table, None)
        return self.raw_table(table)

    async def of_table(self, table: TableId, work: Awaitable[T]) -> T:
        """Await the work; raise a fault of the table's folder as the table's (I8).

        If the folder's log claims a takeover, `_epochs` is asked first: raise as it does.
        """
        try:
            return await work
        except FolderError as error:
            if isinstance(error, ClaimedTakeoverError):
                async with self._epochs_lock:
                    await self.jobs.run(self._epochs.ensure_not_taken_over)
            raise self.set_damaged(table, error) from error

    def set_damaged(self, table: TableId, fault: FolderError) -> TableError:
        """Return the fault as the table's; the table is re-read before its next use."""
        uri = self.store.uri(self.layout.raw(table))
        self._damaged[table] = table_fault(fault, self.layout.source, table, uri)
        return self._damaged[table]

    @contextmanager
    def _faults_of(self, table: TableId) -> Iterator[None]:
        """Raise a fault of a raw table's folder as that table's fault (I8)."""
        try:
            with unreadable(self.store.uri(self.layout.raw(table))):
                yield
        except FolderError as error:
            raise self.set_damaged(table, error) from error

    async def ensure_not_fenced(self) -> None:
        """Commit to `_epochs` without a row: this fails if another process has taken over."""
        async with self._epochs_lock:
            await self.jobs.run(self._epochs.ensure_not_fenced)

    async def close_epoch(self, epoch: CommittedEpoch) -> CommittedEpoch:
        """Append the epoch's row; list also the tables whose rows the lake already held."""
        tables = {t.table: t for t in epoch.tables}
        for table, unlisted in self._unlisted.items():
            if table in self._damaged:
                continue
            known = tables.get(table)
            version = self._raw[table].log.version if known is None else known.version
            tables[table] = TableInEpoch(
                table, version, unlisted.rows + (known.rows if known else 0)
            )
        complete = CommittedEpoch(
            epoch.epoch,
            epoch.summary,
            epoch.committed_at,
            tuple(sorted(tables.values(), key=_id)),
        )
        async with self._epochs_lock:
            await self.jobs.run(self._epochs.append_epoch, complete)
        self._unlisted = {}
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
        self._damaged, self._ends = {}, {}
        self._raw = {table: self._new_raw(table) for table in self._list_raw_tables()}
        self._each_usable(self._load_raw)
        with ThreadPoolExecutor(OPENING_WORKERS) as pool:
            pending = [pool.submit(notices_of, log) for log in self._own_logs]
        notices = [notice for of_one in pending for notice in of_one.result()]
        self._each_usable(lambda raw: refuse_foreign(raw.log))
        for of_table in self._each_usable(lambda raw: notices_of(raw.log)).values():
            notices += of_table
        self._raw = {t: raw for t, raw in self._raw.items() if raw.log.exists}
        self._refuse_if_missing()
        missing = self._missing_tables()
        self._unlisted = self._rows_of_next_epoch()
        watermarks = {t: r.watermark for t, r in self._raw.items() if r.watermark is not None}
        if repairs:
            for log in self._own_logs:
                log.settle()
        has_something = self._epochs.exists or self._registry.exists or self._raw
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
                else self._with_lake_columns(entry)
                for entry in self._registry.tables().values()
            },
            origin=self._epochs.origin,
            unlisted={t: UnlistedRows(r.first, r.reach, r.at) for t, r in self._unlisted.items()},
            missing=missing,
            damaged=dict(self._damaged),
            notices=tuple(notices if taken is None else [taken, *notices]),
            lake_id=self._lake_id,
        )

    def _each_usable(self, work: Callable[[RawTable], T]) -> dict[TableId, T]:
        """Do a piece of work with each raw table; leave out those whose folder fails (I8)."""

        def attempt(raw: RawTable) -> T | FolderError:
            try:
                with unreadable(raw.log.uri):
                    return work(raw)
            except FolderError as error:
                return error

        raws = [raw for table, raw in self._raw.items() if table not in self._damaged]
        with ThreadPoolExecutor(OPENING_WORKERS) as pool:
            found = list(pool.map(attempt, raws))
        results: dict[TableId, T] = {}
        for raw, result in zip(raws, found, strict=True):
            if isinstance(result, FolderError):
                self.set_damaged(raw.id, result)
                del self._raw[raw.id]
            else:
                results[raw.id] = result
        return results

    def _note_removed(self, tables: Sequence[RawTable]) -> None:
        """Mark existing tables whose newest commit is missing, so that they are re-read first."""
        for raw in tables:
            try:
                has_newest = not raw.log.exists or raw.log.has_commit(raw.log.version)
            except FolderError as error:
                self.set_damaged(raw.id, error)
            else:
                if not has_newest:
                    what = f"lake table {raw.log.uri}: its newest commit is missing"
                    self.set_damaged(raw.id, FolderError(what))

    def _reload(self, raw: RawTable) -> None:
        with unreadable(raw.log.uri):
            self._load_raw(raw)
            refuse_foreign(raw.log)  # a new snapshot does not override other programs' rows
            if raw.log.exists:
                unlisted = raw.rows_of_epoch(self._first_epoch)
                if _reach(raw, unlisted) > self._ends.get(raw.id, LAST):
                    raise _beyond_server(raw, unlisted)
                raw.log.fence()

    def _taken_over(self) -> Notice | None:
        """Return a notice if another wrote last. Raise OperatorError if it took over from us."""
        signed = self._own_logs[0].newest_writer() if self._is_claimed else None
        self._writer.forget_claims_after(signed)
        self._writer.refuse_if_taken_over(signed, self.store.uri(""))
        return self._writer.takes_over(signed, self.store.uri(""))

    def _load_raw(self, raw: RawTable) -> None:
        if self._is_claimed:
            raw.load(partial(self._accept_torn_commit, raw))
            raw.log.settle()
        else:
            raw.load()
        raw.log.ensure_own()
        self._refuse_older(raw)

    def _refuse_older(self, raw: RawTable) -> None:
        """Raise FolderError for an older copy of a raw table: it lacks acknowledged rows."""
        entry = self._registry.table(raw.id)
        listed = self._epochs.newest.get(str(raw.id), -1)
        # A table whose snapshot is not done may have been re-created.
        is_in_use = entry is not None and (entry.state is TableState.LIVE or entry.progress)
        if is_in_use and raw.log.exists and raw.log.version < listed:
            found = FolderError(
                f"lake table {raw.log.uri}: it is an older copy: it ends at version"
                f" {raw.log.version}, but an epoch lists version {listed}"
            )
            found.remedy = table_fault(found, self.layout.source, raw.id, raw.log.uri).remedy
            raise found

    def _fence(self) -> None:
        """Fence `_epochs` first: from then on no other writer completes an epoch.

        Nor can it add rows to a table created after that. Tables created before show up as folders.
        """
        for log in self._own_logs:
            log.fence()
        made = set(self._list_raw_tables()) - self._raw.keys() - self._damaged.keys()
        self._raw |= {table: self._new_raw(table) for table in made}
        self._each_usable(_fence_raw)
        self._raw = {t: raw for t, raw in self._raw.items() if t not in made or raw.log.exists}
        self._epochs.ensure_not_taken_over()  # a claim of a takeover is believed of it alone
        self._writer.has_fenced = True

    # --- what is missing at a start ---------------------------------------------------------

    def _accept_torn_registry(self, version: int) -> None:
        """Raise if later commits may depend on the incomplete commit of `_tables`."""
        if self._epochs.position is not None:
            raise torn_commit_error(self._own_logs[1], version)

    def _accept_torn_commit(self, raw: RawTable, version: int) -> None:
        """Raise if an epoch lists the incomplete commit: its rows were acknowledged."""
        if self._epochs.listed().get(str(raw.id), -1) >= version:
            raise torn_commit_error(raw.log, version)

    def _refuse_if_missing(self) -> None:
        """Raise if a lake lacks `_epochs` or `_tables`, which are created before all others."""
        if not self._epochs.exists and (self._raw or self._damaged or self._registry.exists):
            raise self._missing_error(self.layout.epochs)
        has_rows = self._raw or self._damaged or self._epochs.position is not None
        if not self._registry.exists and has_rows:
            raise self._missing_error(self.layout.tables)

    def _missing_error(self, folder: str) -> OperatorError:
        return missing_error(self.store.uri(folder), self.store.uri(self.layout.root))

    def _missing_tables(self) -> frozenset[TableId]:
        """Return the tables whose raw table is missing; one that never had a row has none."""
        entries = self._registry.tables().values()
        absent = [
            entry.table
            for entry in entries
            if entry.table not in self._raw
            and entry.table not in self._damaged
            and (entry.state is TableState.LIVE or entry.progress)
        ]
        listed = self._epochs.listed() if absent else {}
        return frozenset(table for table in absent if str(table) in listed)

    def _rows_of_next_epoch(self) -> dict[TableId, RowRange]:
        """Return rows of the next epoch, in tables that are complete up to the last one's end."""
        end = self._epochs.end_lsn
        self._first_epoch = self._epochs.last_epoch + 1

        def unlisted(raw: RawTable) -> RowRange | None:
            is_beyond = raw.watermark is not None and (end is None or raw.watermark >= end)
            return raw.rows_of_epoch(self._first_epoch) if is_beyond else None

        return {t: found for t, found in self._each_usable(unlisted).items() if found is not None}

    def _with_lake_columns(self, entry: RegisteredTable) -> RegisteredTable:
        """Return the entry with its raw table's data: where to resume, and its column types.

        `_tables` may be ahead of what was written: it may have a column's new type, when the table
        stopped because of just that type.
        """
        raw = self._raw.get(entry.table)
        if raw is None or raw.planned_schema is None:
            return entry
        columns = dict(entry.lake_columns)
        for field in raw.planned_schema:
            if not field.name.startswith(RESERVED_PREFIX):
                type_ = type_text(field.type)
                known = columns.get(field.name)
                columns[field.name] = (
                    RegisteredColumn(field.name, field.name, 0, -1, type_)
                    if known is None
                    else replace(known, lake_type=type_)
                )
        return replace(entry, lake_columns=columns, resume=raw.resume)

    def _list_raw_tables(self) -> list[TableId]:
        """Return the raw tables by their folders.

        `_epochs` and `_tables` are not enough: if a kill followed a table's first commit, it may be
        in neither, and its watermark counts. Listings are consistent on local file systems and on
        S3, GCS and Azure. ingestd never makes a folder that is a link. A linked folder counts as a
        table only if `_tables` lists it; if another user made the link, that is the table's fault.
        """
        root = self.layout.root
        with storage_faults(self.store.uri(root)):
            known = {entry.table for entry in self._registry.tables().values()}
            return [
                table
                for table in raw_tables(self.store, self.layout, known)
                if table in known or linked(self.store, self.layout.raw(table)) is None
            ]


def _fence_raw(raw: RawTable) -> None:
    """Fence a raw table; raise TransientError if a writer came between, once for each table."""
    is_known = raw.log.exists
    with raw.reread_once():
        if not is_known:
            raw.load()
        if raw.log.exists and not is_known:
            raise ClaimedTakeoverError(
                f"lake table {raw.log.uri}: another ingestd created it since the lake was read",
                remedy="nothing to do: the lake is re-read",
            )
        raw.log.fence()


def _reach(raw: RawTable, unlisted: RowRange | None) -> Lsn:
    """Return the highest position that a raw table claims to have."""
    return max(raw.watermark or ZERO, ZERO if unlisted is None else unlisted.reach)


def _beyond_server(raw: RawTable, unlisted: RowRange | None) -> FolderError:
    return FolderError(
        f"lake table {raw.log.uri}: it has changes up to {_reach(raw, unlisted)}, which the server"
        " has not reached: something else wrote there, or the server was restored from an older"
        " backup"
    )


def _id(entry: TableInEpoch) -> TableId:
    return entry.table
