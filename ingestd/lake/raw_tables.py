"""The raw tables of a source, and which of them are damaged (I8)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ingestd.lake.delta.conflicts import AllegedTakeoverError
from ingestd.lake.epochs_table import EpochTable
from ingestd.lake.layout import Layout
from ingestd.lake.opening import notices_of, refuse_foreign, torn_commit_error
from ingestd.lake.raw_table import RawTable, RowRange
from ingestd.lake.registry_table import RegistryTable
from ingestd.lake.schema_evolution import type_text
from ingestd.lake.store.errors import storage_faults, table_fault, unreadable
from ingestd.lake.store.store import Store, linked
from ingestd.lake.table_folders import raw_tables
from ingestd.lake.threads import WorkerThreads
from ingestd.model.changes import RESERVED_PREFIX, TableInEpoch
from ingestd.model.errors import FolderError, TableError
from ingestd.model.lake_state import Notice, RegisteredColumn, RegisteredTable, TableState
from ingestd.model.lsn import LAST, ZERO, Lsn
from ingestd.model.schema import TableId

T = TypeVar("T")
OPENING_WORKERS = 16
"""Tables that are opened concurrently."""


class RawTables:
    """The raw tables that a lake has or is about to have.

    `loaded`: those that can be used. `damaged`: those that can't, each with its fault. `unlisted`:
    rows beyond the last epoch, which the next one must list. `epochs`, `registry`: the lake's own
    tables, loaded before these. `jobs`: threads for blocking work. `new_table`: builds a table that
    is not loaded. `ensure_not_taken_over`: raises if `_epochs` shows a takeover. `is_claimed`: see
    `ingestd.lake.delta_lake.DeltaLake`.
    """

    def __init__(
        self,
        store: Store,
        layout: Layout,
        epochs: EpochTable,
        registry: RegistryTable,
        *,
        jobs: WorkerThreads,
        new_table: Callable[[TableId], RawTable],
        ensure_not_taken_over: Callable[[], Awaitable[None]],
        is_claimed: bool,
    ) -> None:
        self._store = store
        self._layout = layout
        self._epochs = epochs
        self._registry = registry
        self._jobs = jobs
        self._new_table = new_table
        self._ensure_not_taken_over = ensure_not_taken_over
        self._is_claimed = is_claimed
        self._reading_lock = asyncio.Lock()
        self._ends: dict[TableId, Lsn] = {}
        self._first_epoch = 1
        self.loaded: dict[TableId, RawTable] = {}
        self.damaged: dict[TableId, TableError] = {}
        self.unlisted: dict[TableId, RowRange] = {}

    def raw_table(self, table: TableId) -> RawTable:
        """Return the raw table, which may not exist. Raise TableError if its name is too long."""
        if table not in self.loaded:
            self.loaded[table] = self._new_table(table)
        return self.loaded[table]

    async def reload_if_damaged(self, table: TableId) -> RawTable:
        """Return the raw table; if it was found damaged, re-read it first.

        Raise TableError if it still is damaged, or as `raw_table` does.
        """
        if table in self.damaged:
            async with self._reading_lock:  # one handle for a log
                if table in self.damaged:
                    found = self._new_table(table)
                    await self.of_table(table, self._jobs.run(self._reload, found))
                    self.loaded[table] = found
                    del self.damaged[table]
                    self._ends.pop(table, None)
        return self.raw_table(table)

    async def of_table(self, table: TableId, work: Awaitable[T]) -> T:
        """Await the work; raise a fault of the table's folder as the table's (I8).

        If the folder's log alleges a takeover, `_epochs` is asked first: raise as it does.
        """
        try:
            return await work
        except FolderError as error:
            if isinstance(error, AllegedTakeoverError):
                await self._ensure_not_taken_over()
            raise self.set_damaged(table, error) from error

    def set_damaged(self, table: TableId, fault: FolderError) -> TableError:
        """Return the fault as the table's; the table is re-read before its next use."""
        uri = self._store.uri(self._layout.raw(table))
        self.damaged[table] = table_fault(fault, self._layout.source, table, uri)
        return self.damaged[table]

    @contextmanager
    def faults_of(self, table: TableId) -> Iterator[None]:
        """Raise a fault of a raw table's folder as that table's fault (I8)."""
        try:
            with unreadable(self._store.uri(self._layout.raw(table))):
                yield
        except FolderError as error:
            raise self.set_damaged(table, error) from error

    def refuse_beyond(self, end: Lsn) -> Mapping[TableId, TableError]:
        """Treat tables with a position above `end` as damaged until they are replaced."""
        refused: dict[TableId, TableError] = {}
        for table, raw in list(self.loaded.items()):
            unlisted = self.unlisted.get(table)
            if _reach(raw, unlisted) > end:
                refused[table] = self.set_damaged(table, _beyond_server(raw, unlisted))
                self._ends[table] = end
                self.unlisted.pop(table, None)
                del self.loaded[table]
        return refused

    def note_removed(self, tables: Iterable[TableId]) -> None:
        """Mark existing tables whose newest commit is missing, so that they are re-read first."""
        for raw in [self.loaded[table] for table in tables if table in self.loaded]:
            try:
                has_newest = not raw.log.exists or raw.log.has_commit(raw.log.version)
            except FolderError as error:
                self.set_damaged(raw.id, error)
            else:
                if not has_newest:
                    what = f"lake table {raw.log.uri}: its newest commit is missing"
                    self.set_damaged(raw.id, FolderError(what))

    def add_unlisted(self, table: TableId, rows: RowRange) -> None:
        """Record rows that the next epoch must list."""
        before = self.unlisted.get(table)
        self.unlisted[table] = rows if before is None else before.with_more(rows)

    def with_unlisted(self, tables: Sequence[TableInEpoch]) -> tuple[TableInEpoch, ...]:
        """Return the tables of an epoch, with those whose rows the lake already held."""
        found = {t.table: t for t in tables}
        for table, unlisted in self.unlisted.items():
            if table in self.damaged:
                continue
            known = found.get(table)
            version = self.loaded[table].log.version if known is None else known.version
            found[table] = TableInEpoch(
                table, version, unlisted.rows + (known.rows if known else 0)
            )
        return tuple(sorted(found.values(), key=_id))

    # --- at a start -------------------------------------------------------------------------

    def load(self) -> None:
        """Read the tables that have a folder, in their newest version. Blocks."""
        self.damaged, self._ends = {}, {}
        self.loaded = {table: self._new_table(table) for table in self._list_raw_tables()}
        self._each_usable(self._load_raw)

    def judge_commits(self) -> list[Notice]:
        """Refuse tables that other programs changed; return what to report of the others. Blocks.

        From then on `loaded` has only tables that exist.
        """
        self._each_usable(lambda raw: refuse_foreign(raw.log))
        found = self._each_usable(lambda raw: notices_of(raw.log))
        self.loaded = {t: raw for t, raw in self.loaded.items() if raw.log.exists}
        return [notice for of_one in found.values() for notice in of_one]

    def find_unlisted(self) -> None:
        """Find rows of the next epoch, in tables that are complete up to the last one's end."""
        end = self._epochs.end_lsn
        self._first_epoch = self._epochs.last_epoch + 1

        def unlisted(raw: RawTable) -> RowRange | None:
            is_beyond = raw.watermark is not None and (end is None or raw.watermark >= end)
            return raw.rows_of_epoch(self._first_epoch) if is_beyond else None

        found = self._each_usable(unlisted)
        self.unlisted = {t: rows for t, rows in found.items() if rows is not None}

    def fence(self) -> None:
        """Fence all tables, also those created since `load`, which show up as folders. Blocks."""
        made = set(self._list_raw_tables()) - self.loaded.keys() - self.damaged.keys()
        self.loaded |= {table: self._new_table(table) for table in made}
        self._each_usable(_fence_raw)
        self.loaded = {t: raw for t, raw in self.loaded.items() if t not in made or raw.log.exists}

    def missing(self) -> frozenset[TableId]:
        """Return the tables whose raw table is missing; one that never had a row has none."""
        entries = self._registry.tables().values()
        absent = [
            entry.table
            for entry in entries
            if entry.table not in self.loaded
            and entry.table not in self.damaged
            and (entry.state is TableState.LIVE or entry.progress)
        ]
        listed = self._epochs.listed() if absent else {}
        return frozenset(table for table in absent if str(table) in listed)

    def with_lake_columns(self, entry: RegisteredTable) -> RegisteredTable:
        """Return the entry with its raw table's data: where to resume, and its column types.

        `_tables` may be ahead of what was written: it may have a column's new type, when the table
        stopped because of just that type.
        """
        raw = self.loaded.get(entry.table)
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

    def _each_usable(self, work: Callable[[RawTable], T]) -> dict[TableId, T]:
        """Do a piece of work with each raw table; leave out those whose folder fails (I8)."""

        def attempt(raw: RawTable) -> T | FolderError:
            try:
                with unreadable(raw.log.uri):
                    return work(raw)
            except FolderError as error:
                return error

        raws = [raw for table, raw in self.loaded.items() if table not in self.damaged]
        with ThreadPoolExecutor(OPENING_WORKERS) as pool:
            found = list(pool.map(attempt, raws))
        results: dict[TableId, T] = {}
        for raw, result in zip(raws, found, strict=True):
            if isinstance(result, FolderError):
                self.set_damaged(raw.id, result)
                del self.loaded[raw.id]
            else:
                results[raw.id] = result
        return results

    def _reload(self, raw: RawTable) -> None:
        with unreadable(raw.log.uri):
            self._load_raw(raw)
            refuse_foreign(raw.log)  # a new snapshot does not override other programs' rows
            if raw.log.exists:
                unlisted = raw.rows_of_epoch(self._first_epoch)
                if _reach(raw, unlisted) > self._ends.get(raw.id, LAST):
                    raise _beyond_server(raw, unlisted)
                raw.log.fence()

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
            found.remedy = table_fault(found, self._layout.source, raw.id, raw.log.uri).remedy
            raise found

    def _accept_torn_commit(self, raw: RawTable, version: int) -> None:
        """Raise if an epoch lists the incomplete commit: its rows were acknowledged."""
        if self._epochs.listed().get(str(raw.id), -1) >= version:
            raise torn_commit_error(raw.log, version)

    def _list_raw_tables(self) -> list[TableId]:
        """Return the raw tables by their folders.

        `_epochs` and `_tables` are not enough: if a kill followed a table's first commit, it may be
        in neither, and its watermark counts. Listings are consistent on local file systems and on
        S3, GCS and Azure. ingestd never makes a folder that is a link. A linked folder counts as a
        table only if `_tables` lists it; if another user made the link, that is the table's fault.
        """
        root = self._layout.root
        with storage_faults(self._store.uri(root)):
            known = {entry.table for entry in self._registry.tables().values()}
            return [
                table
                for table in raw_tables(self._store, self._layout, known)
                if table in known or linked(self._store, self._layout.raw(table)) is None
            ]


def _fence_raw(raw: RawTable) -> None:
    """Fence a raw table; raise TransientError if a writer came between, once for each table."""
    is_known = raw.log.exists
    with raw.reread_once():
        if not is_known:
            raw.load()
        if raw.log.exists and not is_known:
            raise AllegedTakeoverError(
                f"lake table {raw.log.uri}: another ingestd created it since the lake was read",
                remedy="nothing to do: the lake is re-read",
            )
        raw.log.fence()


def _reach(raw: RawTable, unlisted: RowRange | None) -> Lsn:
    """Return the highest position that a raw table's log says it has."""
    return max(raw.watermark or ZERO, ZERO if unlisted is None else unlisted.reach)


def _beyond_server(raw: RawTable, unlisted: RowRange | None) -> FolderError:
    return FolderError(
        f"lake table {raw.log.uri}: it has changes up to {_reach(raw, unlisted)}, which the server"
        " has not reached: something else wrote there, or the server was restored from an older"
        " backup"
    )


def _id(entry: TableInEpoch) -> TableId:
    return entry.table
