"""The lake's side of a verification: read-only, with or without a running daemon."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.digests.value_hashes import Hashes
from ingestd.lake.delta.append_log import AppendLog
from ingestd.lake.delta.log import TableLog
from ingestd.lake.delta.read import list_files, read_files
from ingestd.lake.delta.tail import File
from ingestd.lake.fold.plain import fold_rows
from ingestd.lake.lake_id import read_lake_id
from ingestd.lake.layout import Layout
from ingestd.lake.registry_table import SCHEMA as TABLES_SCHEMA
from ingestd.lake.registry_table import RegistryTable
from ingestd.lake.store.errors import table_fault
from ingestd.lake.store.store import open_store
from ingestd.lake.threads import WorkerThreads, prefetch
from ingestd.lake.verify.change_digests import (
    UNCHANGED,
    change_keys,
    digest_changes,
    lazy_columns,
    linked_keys,
    reached,
)
from ingestd.lake.verify.change_values import values_of_changes
from ingestd.lake.verify.columns import (
    Event,
    compared_columns,
    ensure_comparable,
    ensure_known_key,
    ensure_one_key,
    ensure_own_types,
)
from ingestd.lake.verify.visible_changes import (
    PLACE,
    POSITION,
    PinnedChanges,
    batches_of,
    counting,
    least_lsn,
    names_of,
)
from ingestd.model.changes import TRUNCATE
from ingestd.model.errors import FolderError, TableChangedError, TableError
from ingestd.model.lake_state import RegisteredTable, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table, TableId
from ingestd.ports.verify import Digested, Matrix, ValueRows, VerifyPoint

_RELEASED_EVERY = 8
"""Batches after which memory that was allocated for them and freed is returned to the system."""


class DeltaVerifiedLake:
    """See `ingestd.ports.verify.VerifiedLake`. Pinned files are kept until the next survey.

    `values`: returns the values of change rows.
    """

    def __init__(
        self,
        uri: str,
        source: str,
        *,
        storage_options: Mapping[str, str] | None = None,
        values: Callable[[pa.RecordBatch, Digested], ValueRows] = values_of_changes,
    ) -> None:
        self._values = values
        self._layout = Layout(source)
        self._store = open_store(uri, storage_options)
        self._epochs = TableLog(self._store, self._layout.epochs, self._layout.app_id())
        self._tables = AppendLog(self._store, self._layout.tables, self._layout.app_id())
        self._jobs = WorkerThreads(at_once=1)
        self._events: Mapping[str, Sequence[Event]] = {}
        self._read: tuple[int, Mapping[str, Sequence[Event]]] = (-1, {})
        self._pinned: dict[TableId, PinnedChanges] = {}

    async def known(self) -> Mapping[TableId, RegisteredTable]:
        """Return the recorded state of the tables, and remember it."""
        return await self._jobs.run(self._known)

    async def position(self) -> Lsn | None:
        """Return the app transaction of `_epochs`, which also advances while a source is idle."""
        return await self._jobs.run(self._position)

    async def describe(self, table: Table) -> Digested:
        """Describe a table from `_tables` and the row counts of its files."""
        return await self._jobs.run(self._describe, table)

    async def survey(
        self, described: Digested, point: VerifyPoint, *, most_linked: int
    ) -> Digested:
        """Pin the table's files, and read their changes once."""
        return await self._jobs.run(self._survey, described, point, most_linked)

    async def changes(self, digested: Digested) -> AsyncGenerator[Matrix, None]:
        """Read the relevant changes again."""
        async for found in prefetch(self._matrices(digested)):
            yield found

    async def rows_of(self, digested: Digested, keys: Collection[int]) -> ValueRows:
        """Fold the changes of these keys, row by row."""
        with self._faults_of(digested.table):
            return await self._jobs.run(self._rows_of, digested, keys)

    async def ensure_unchanged(self, table: Table) -> None:
        """Check `_tables` again."""
        await self._jobs.run(self._ensure_unchanged, table)

    async def close(self) -> None:
        """Wait until the current read has ended."""
        await self._jobs.settle()

    # --- the lake's own tables (blocking) ------------------------------------------------------

    def _position(self) -> Lsn | None:
        self._epochs.load()
        version = self._epochs.app_version()
        return None if version is None else Lsn(version)

    def _known(self) -> Mapping[TableId, RegisteredTable]:
        read_lake_id(self._store)
        registry = RegistryTable(self._tables, lambda _: None)
        registry.load()
        self._events = self._read_events()
        return {t.table: t for t in registry.tables().values()}

    def _read_events(self) -> Mapping[str, Sequence[Event]]:
        """Read `_tables` at the loaded version, unless that was read before."""
        if self._read[0] == self._tables.version:
            return self._read[1]
        found: dict[str, list[Event]] = defaultdict(list)
        if self._tables.exists:
            rows = read_files(
                self._tables.handle, self._store, self._tables.folder, schema=TABLES_SCHEMA
            )
            for row in sorted(rows.to_pylist(), key=lambda r: r["at"]):
                found[row["table"]].append(row)
        self._read = self._tables.version, found
        return found

    def _ensure_unchanged(self, table: Table) -> None:
        self._tables.load()
        now = self._read_events().get(str(table.id), ())
        since = now[len(self._pinned[table.id].events) :]
        if any(e["state"] != TableState.LIVE for e in since):
            raise TableChangedError(
                table.id,
                "was re-read, or stopped, while it was compared",
                remedy="compare it when it is live",
            )

    # --- a table's changes (blocking) ------------------------------------------------------------

    def _describe(self, table: Table) -> Digested:
        events = self._events.get(str(table.id), ())
        ensure_comparable(self._layout.source, table, events)
        found = _described(table, events)
        _, files = self._raw(table, events)
        rows = sum(statistics.get("numRecords") or 0 for _, statistics in files)
        return replace(found, changes=rows)

    def _survey(self, described: Digested, point: VerifyPoint, most_linked: int) -> Digested:
        table = described.table
        schema, files = self._raw(table, self._events[str(table.id)])
        files = [f for f in files if not point.is_exact or least_lsn(f) <= point.lsn]
        self._tables.load()
        events = self._read_events().get(str(table.id), ())
        before = self._events[str(table.id)]
        folder = self._layout.raw(table.id)
        pinned = PinnedChanges(self._store, folder, files, schema, before, point, (-1, -2))
        self._pinned[table.id] = pinned
        self._ensure_unchanged(table)
        now = _described(table, events)
        if _shape(now) != _shape(described):
            raise TableChangedError(
                table.id, "was altered while it was compared", remedy="compare it again"
            )
        with self._faults_of(table):
            found = self._survey_changes(pinned, now, most_linked)
        ensure_one_key(self._layout.source, table, events, self._pinned[table.id].void[0])
        return found

    def _raw(self, table: Table, events: Sequence[Event]) -> tuple[pa.Schema, list[File]]:
        """Return the raw table's schema and its files."""
        raw = TableLog(self._store, self._layout.raw(table.id), self._layout.app_id(table.id))
        with self._faults_of(table):
            raw.load()
            schema = raw.schema()
            if schema is None:
                return pa.schema([]), []
            raw.ensure_fields(POSITION)
            ensure_own_types(raw.uri, schema, events)
            return schema, [(f[0], f[1]) for f in list_files(raw.handle)]

    @contextmanager
    def _faults_of(self, table: Table) -> Iterator[None]:
        """Raise a fault of a raw table's folder as that table's."""
        try:
            yield
        except FolderError as error:
            uri = self._store.uri(self._layout.raw(table.id))
            raise table_fault(error, self._layout.source, table.id, uri) from error

    def _survey_changes(
        self, pinned: PinnedChanges, digested: Digested, most_linked: int
    ) -> Digested:
        void, lazy = pinned.void, set[int]()
        changes = 0
        for batch in batches_of(pinned, (*PLACE, UNCHANGED)):
            changes += batch.num_rows
            ops = batch.column("_cdc_op")
            marks = batch.filter(pc.equal(ops, TRUNCATE))
            for row in marks.select(["_cdc_lsn", "_cdc_seq"]).to_pylist():
                void = max(void, (row["_cdc_lsn"], row["_cdc_seq"]))
            if UNCHANGED in batch.schema.names:
                lazy |= lazy_columns(batch.column(UNCHANGED), digested.columns)
        pinned = replace(pinned, void=void)
        self._pinned[digested.table.id] = pinned
        if not digested.key:
            return replace(digested, changes=changes)
        found = replace(digested, lazy=tuple(sorted(lazy - set(digested.key))), changes=changes)
        pairs = self._links(found, most_linked)
        return replace(found, linked=np.unique(np.concatenate(pairs, axis=1))) if pairs else found

    def _links(self, digested: Digested, most: int | None = None) -> list[Hashes]:
        """Return the old and new keys of rows that kept unsent values; fail above `most`."""
        if not digested.lazy:
            return []
        names = names_of(digested, sorted({*digested.lazy, *digested.key}))
        found, count = list[Hashes](), 0
        for batch in batches_of(self._pinned[digested.table.id], names):
            pairs = linked_keys(counting(batch), digested.columns, digested.key)
            count += pairs.size
            if most is not None and count > most:
                raise TableError(
                    digested.table.id,
                    f"more than {most:,} keys are of rows whose key changed while values were not"
                    " sent: folding these does not fit into --memory",
                    remedy="raise --memory",
                )
            if pairs.size:
                found.append(pairs)
        return found

    def _matrices(self, digested: Digested) -> Generator[Matrix, None, None]:
        names = names_of(digested, range(len(digested.columns)))
        with self._faults_of(digested.table):
            for number, batch in enumerate(batches_of(self._pinned[digested.table.id], names), 1):
                rows = counting(batch)
                if rows.num_rows:
                    yield digest_changes(rows, digested)
                if number % _RELEASED_EVERY == 0:
                    pa.default_memory_pool().release_unused()

    def _rows_of(self, digested: Digested, keys: Collection[int]) -> ValueRows:
        wanted = np.fromiter(keys, np.uint64, len(keys))
        if len(digested.linked) and digested.is_linked(wanted).any():
            wanted = reached(wanted, np.concatenate(self._links(digested), axis=1))
        names = names_of(digested, range(len(digested.columns)))
        changes: ValueRows = []
        for batch in batches_of(self._pinned[digested.table.id], names):
            rows = counting(batch)
            if not rows.num_rows:
                continue
            flags = _touches(rows, digested, wanted)
            if flags.any():
                changes += self._values(rows.filter(pa.array(flags)), digested)
        columns = [c.name for c in digested.columns]
        return fold_rows(changes, columns, [columns[i] for i in digested.key])


def _described(table: Table, events: Sequence[Event]) -> Digested:
    ensure_known_key(table, events)
    columns, note = compared_columns(table, events)
    names = [c.name for c in columns]
    return Digested(table, columns, tuple(names.index(n) for n in table.identifying), note=note)


def _shape(digested: Digested) -> tuple[object, ...]:
    """Return what determines the comparison; a missing value as its hash, as NaN is not equal."""
    columns = ((replace(c, missing=None), c.missing_hash) for c in digested.columns)
    return digested.key, *columns


def _touches(
    batch: pa.RecordBatch, digested: Digested, wanted: NDArray[np.uint64]
) -> NDArray[np.bool_]:
    """Return which changes add or remove a row with one of these keys."""
    own, old = change_keys(batch, digested)
    found: NDArray[np.bool_] = np.isin(own, wanted) | np.isin(old, wanted)
    return found
