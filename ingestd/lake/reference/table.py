"""A reference table's current rows on Delta (ports.ReferenceSink)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import pyarrow as pa

from ingestd.lake.delta.arrow_types import conformed
from ingestd.lake.delta.data_files import open_parquet
from ingestd.lake.delta.file_statistics import has_statistics
from ingestd.lake.delta.read import conform, list_files
from ingestd.lake.lake_id import read_lake_id
from ingestd.lake.layout import Layout
from ingestd.lake.opening import never_refuse, refuse_foreign
from ingestd.lake.parquet_writer import FragmentSink, FragmentWriter
from ingestd.lake.reference.changes import ReferenceChanges
from ingestd.lake.reference.digest import ContentDigest
from ingestd.lake.reference.log import RETENTION, ReferenceLog
from ingestd.lake.store.errors import reference_fault, storage_faults, unreadable
from ingestd.lake.store.pending_calls import StorageCalls
from ingestd.lake.store.plain_files import Durability
from ingestd.lake.store.store import open_store
from ingestd.lake.threads import WorkerThreads
from ingestd.model.changes import RESERVED_PREFIX
from ingestd.model.errors import DamagedError, FolderError
from ingestd.model.schema import TableId, in_name_order, lake_type_name
from ingestd.ports import Fragment, ReferenceState

FILE_BYTES = 16 << 20
"""A change rewrites the file with its row, so files are smaller than those of raw tables."""
SMALL_BYTES = 1 << 20
SMALL_FILES = 16
"""When this many files are below SMALL_BYTES, the next merge joins them."""


def _continue(_step: str) -> None:
    """Do nothing at a step."""


class DeltaReferenceTable:
    """See `ingestd.ports.ReferenceSink`. `uri`: the lake's.

    It does not use deltalake's own merge, for three reasons: files become durable only after they
    can be read, a row whose key changed can't keep values of its old row, and names and types pass
    through SQL. Instead, files with a changed row are rewritten, row group by row group, and
    replaced in one commit.

    `step` is called in a worker thread with ``write``, ``commit`` and ``committed`` at these steps;
    if it raises, the call ends there. `is_claimed`: see `ingestd.lake.delta_lake.DeltaLake`.
    `retention`: how long removed files are kept (an interval of SQL); they are looked for every
    `vacuum_interval_s`. `needs_lake_id`, `calls`: see `ingestd.lake.store.store.Store`.
    """

    def __init__(
        self,
        uri: str,
        source: str,
        table: TableId,
        *,
        storage_options: Mapping[str, str] | None = None,
        buffer_bytes: int = 32 << 20,
        file_bytes: int = FILE_BYTES,
        retention: str = RETENTION,
        vacuum_interval_s: float = 3600.0,
        durability: Durability | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        step: Callable[[str], None] = _continue,
        is_claimed: bool = True,
        needs_lake_id: bool = False,
        calls: StorageCalls | None = None,
    ) -> None:
        self._is_claimed = is_claimed
        self._layout = Layout(source)
        self._table = table
        self._store = open_store(uri, storage_options, durability, calls)
        self._store.needs_lake_id = needs_lake_id
        self._buffer_bytes = buffer_bytes
        self._file_bytes = file_bytes
        self._retention = retention
        self._vacuum_interval_s = vacuum_interval_s
        self._monotonic = monotonic
        self._step = step
        self._jobs = WorkerThreads(at_once=1)
        self._vacuumed_s = monotonic()

    async def open(self) -> ReferenceState | None:
        """Read the newest version."""
        with self._own_faults():
            return await self._jobs.run(self._open)

    async def replace(
        self, batches: AsyncIterator[pa.RecordBatch], *, position: int | None = None
    ) -> ReferenceState:
        """Write all rows to new files, then replace all files if the rows differ."""
        with self._own_faults():
            return await self._replaced(batches, position)

    async def _replaced(
        self, batches: AsyncIterator[pa.RecordBatch], position: int | None
    ) -> ReferenceState:
        sink: FragmentSink | None = None
        digest = ContentDigest()
        schema = pa.schema([])
        try:
            async for batch in batches:
                if sink is None:
                    schema = _nullable(batch.schema)
                    await self._jobs.run(self._step, "write")
                    sink = FragmentSink(self._writer(schema), buffer_bytes=self._buffer_bytes)
                await self._jobs.run(digest.add_batch, _in_name_order(batch))
                await sink.append_rows(batch.cast(schema))
            fragments = [] if sink is None else await sink.finish()
        except BaseException:
            if sink is not None:
                await sink.abort()
            raise
        if sink is None:
            msg = "no batch, not even an empty one"
            raise ValueError(msg)
        # From here on the files may be part of a commit, even if an error is raised.
        state = await self._jobs.run(self._replace, schema, fragments, digest.text, position)
        if not state.is_new:
            await sink.abort()
        return state

    async def merge(
        self, changes: pa.RecordBatch, key: Sequence[str], *, position: int
    ) -> ReferenceState:
        """Rewrite the files that have a changed row, and write the new rows."""
        with self._own_faults():
            return await self._jobs.run(self._merge, changes, key, position)

    async def close(self) -> None:
        """Wait until the current write has ended."""
        await self._jobs.settle()

    @cached_property
    def _log(self) -> ReferenceLog:
        """The table's log. Raises TableError for a name that is too long."""
        folder, table = self._layout.reference(self._table), self._table
        log = ReferenceLog(self._store, folder, self._layout.reference_app_id(table))
        log.retention = self._retention
        return log

    @contextmanager
    def _own_faults(self) -> Iterator[None]:
        """Raise a fault of the table's folder as the table's own (I8)."""
        try:
            yield
        except FolderError as error:
            raise reference_fault(error, self._table, self._log.uri) from error

    # --- blocking ---------------------------------------------------------------------------

    def _open(self) -> ReferenceState | None:
        read_lake_id(self._store)
        with unreadable(self._log.uri):
            if self._is_claimed:
                # The source continues from `position`, or reads all rows.
                self._log.load(never_refuse)
                self._log.ensure_own()
                refuse_foreign(self._log)
                self._refuse_if_missing()
                self._log.settle()
            else:
                self._log.load()
            return self._state() if self._log.exists else None

    def _refuse_if_missing(self) -> None:
        """Raise DamagedError if a data file is missing or truncated, on a local file system.

        A merge reads only the files with changed rows. An object store would need a request each.
        """
        if not self._log.exists or not self._store.syncs:
            return
        for path, _, nbytes in list_files(self._log.handle):
            with storage_faults(self._log.uri):
                found = self._store.size(f"{self._log.folder}/{path}")
            if found != nbytes:
                is_missing = "is missing" if found is None else f"has {found} bytes of {nbytes}"
                raise DamagedError(f"lake table {self._log.uri}: the data file {path} {is_missing}")

    def _state(self, *, is_new: bool = False) -> ReferenceState:
        schema = self._log.schema()
        assert schema is not None
        with storage_faults(self._log.uri):
            rows = sum(found.get("numRecords") or 0 for _, found, _ in list_files(self._log.handle))
        version, position = self._log.version, self._log.app_version()
        return ReferenceState(version, rows, schema, position, is_new)

    def _writer(self, schema: pa.Schema) -> FragmentWriter:
        return FragmentWriter(
            self._store, self._log.folder, _bounded(schema), file_bytes=self._file_bytes
        )

    def _replace(
        self,
        schema: pa.Schema,
        fragments: Sequence[Fragment],
        content: str,
        position: int | None,
    ) -> ReferenceState:
        self._log.load()
        refuse_foreign(self._log)
        present = self._log.schema()
        is_same = present is not None and _same(present, schema)
        if is_same and position is None and self._log.content() == content:
            return self._state()
        self._step("commit")
        self._log.replace(schema, fragments, content=content, app_version=position)
        self._step("committed")
        self._vacuum_if_due()
        return self._state(is_new=True)

    def _merge(self, changes: pa.RecordBatch, key: Sequence[str], position: int) -> ReferenceState:
        present = self._log.schema()
        columns = [f for f in changes.schema if not f.name.startswith(RESERVED_PREFIX)]
        if present is None or not _same(present, pa.schema(columns)):
            msg = f"{self._log.uri}: the changes have other columns than the table"
            raise ValueError(msg)
        changes = _conformed(changes, present)
        done = self._log.app_version()
        if done is not None and position <= done:
            return self._state()
        writer = self._writer(present)
        try:
            removed = self._rewrite(ReferenceChanges(changes, key, self._log.uri), present, writer)
            fragments = writer.finish()
            self._step("commit")
        except BaseException:
            writer.abort()
            raise
        self._log.exchange(fragments, removed, position)
        self._step("committed")
        self._vacuum_if_due()
        return self._state(is_new=True)

    def _rewrite(
        self, changes: ReferenceChanges, schema: pa.Schema, writer: FragmentWriter
    ) -> list[str]:
        """Write the new files; return the files that they replace."""
        self._step("write")
        removed = []
        files = list_files(self._log.handle)
        small = {path for path, _, size in files if size < SMALL_BYTES}
        joined = small if len(small) >= SMALL_FILES else set()
        for path, statistics, _ in files:
            if path not in joined and not changes.may_be_in(statistics):
                continue
            if self._rewrite_file(path, changes, schema, writer, is_joined=path in joined):
                removed.append(path)
        rows = changes.rows()
        if rows.num_rows:
            writer.write([rows.select(schema.names).cast(schema)])
        return removed

    def _rewrite_file(
        self,
        path: str,
        changes: ReferenceChanges,
        schema: pa.Schema,
        writer: FragmentWriter,
        *,
        is_joined: bool,
    ) -> bool:
        """If a file has a changed row, rewrite its other rows; return whether it had one."""
        where = f"{self._log.folder}/{path}"
        with open_parquet(self._store, where) as file:
            wanted = [n for n in schema.names if n in file.schema.names]
            key_schema = pa.schema([schema.field(n) for n in changes.key])
            keys = file.batches([n for n in changes.key if n in wanted])
            found = [changes.find(conform(_table_of(batch), key_schema)) for batch in keys]
            numbers = np.concatenate([np.empty(0, np.int64), *found])
            if not is_joined and (numbers < 0).all():
                return False

            def left() -> Iterator[pa.Table]:
                start = 0
                for batch in file.batches(wanted):
                    rows = conform(_table_of(batch), schema)
                    own = numbers[start : start + rows.num_rows]
                    start += rows.num_rows
                    yield changes.without_changed(rows, own)

            writer.write(rows for rows in _ahead(left()) if rows.num_rows)
        return True

    def _vacuum_if_due(self) -> None:
        now = self._monotonic()
        if now - self._vacuumed_s >= self._vacuum_interval_s:
            self._vacuumed_s = now
            self._log.vacuum()


def _ahead(rows: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Yield items while the next one is computed in a thread."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, rows, None)
        while (found := coming.result()) is not None:
            coming = pool.submit(next, rows, None)
            yield found


def _table_of(batch: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([batch])


def _bounded(schema: pa.Schema) -> list[str]:
    return [f.name for f in schema if has_statistics(f.type)]


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([f.with_nullable(True).remove_metadata() for f in schema])  # noqa: FBT003


def _same(one: pa.Schema, other: pa.Schema) -> bool:
    """Return whether the columns are the same; a different order alone causes no commit."""
    columns, others = (
        {f.name: lake_type_name(in_name_order(f.type)) for f in schema} for schema in (one, other)
    )
    return columns == others


def _in_name_order(batch: pa.RecordBatch) -> pa.RecordBatch:
    batch = batch.select(sorted(batch.schema.names))
    return _conformed(batch, pa.schema([f.with_type(in_name_order(f.type)) for f in batch.schema]))


def _conformed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch with the schema's types for the columns that it has."""
    fields = [schema.field(f.name) if f.name in schema.names else f for f in batch.schema]
    arrays = [conformed(a, f.type) for a, f in zip(batch.columns, fields, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
