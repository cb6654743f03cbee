"""What the lake has of a source, for a verification: read only, beside a running daemon or not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ingestd.changes import TRUNCATE
from ingestd.errors import TableChangedError
from ingestd.positions import Lsn
from ingestd.recorded import RegisteredTable, TableState
from ingestd.row_digests import OF_BEFORE, RawTexts, given_by, values_of
from ingestd.schema import Table, TableId
from ingestd.sink.append_log import AppendLog
from ingestd.sink.change_digests import (
    BEFORE,
    UNCHANGED,
    change_keys,
    digest_changes,
    lazy_columns,
    linked_keys,
)
from ingestd.sink.commit_tail import File
from ingestd.sink.faults import storage_faults
from ingestd.sink.fold import fold_rows
from ingestd.sink.jobs import Jobs, ahead
from ingestd.sink.paths import Layout
from ingestd.sink.read import list_files, read_files
from ingestd.sink.registry import SCHEMA as TABLES_SCHEMA
from ingestd.sink.registry import RegistryTable
from ingestd.sink.store import Store, open_store
from ingestd.sink.verified_columns import (
    Event,
    compared_columns,
    ensure_comparable,
    ensure_known_key,
    ensure_one_key,
)
from ingestd.verification import Digested, Matrix, Point, Rows

BATCH_ROWS = 1 << 16
_BATCH_BYTES = 32 << 20
"""Of a file's rows as they are stored: fewer are read at a time where they are large."""
_BUFFER_BYTES = 1 << 20
_PLACE = ("_cdc_op", "_cdc_lsn", "_cdc_seq", "_cdc_xid")
_RELEASED_EVERY = 8
"""Batches: what was allocated for them and freed elsewhere is given back to the system."""


@dataclass(frozen=True, slots=True)
class _Looked:
    """A table's raw files, pinned; the events of `_tables` then; what of the rows counts."""

    store: Store
    folder: str
    files: Sequence[File]
    events: Sequence[Event]
    point: Point
    void: tuple[int, int]


class DeltaVerifiedLake:
    """See `ingestd.verification.VerifiedLake`. What a survey pinned is kept until the next one."""

    def __init__(
        self, uri: str, source: str, *, storage_options: Mapping[str, str] | None = None
    ) -> None:
        self._layout = Layout(source)
        self._store = open_store(uri, storage_options)
        self._epochs = AppendLog(self._store, self._layout.epochs, self._layout.app_id())
        self._tables = AppendLog(self._store, self._layout.tables, self._layout.app_id())
        self._jobs = Jobs(at_once=1)
        self._events: Mapping[str, Sequence[Event]] = {}
        self._read: tuple[int, Mapping[str, Sequence[Event]]] = (-1, {})
        self._looked: dict[TableId, _Looked] = {}

    async def known(self) -> Mapping[TableId, RegisteredTable]:
        """Give what the lake has of the tables, and remember how they stood."""
        return await self._jobs.run(self._known)

    async def position(self) -> Lsn | None:
        """Ask the app transaction of `_epochs`, which an idle source's daemon moves too."""
        return await self._jobs.run(self._position)

    async def describe(self, table: Table) -> Digested:
        """Go by `_tables`, and by how many rows the files have."""
        return await self._jobs.run(self._describe, table)

    async def survey(self, described: Digested, point: Point) -> Digested:
        """Pin the table's files, and go through their changes once."""
        return await self._jobs.run(self._survey, described, point)

    async def changes(self, digested: Digested) -> AsyncGenerator[Matrix, None]:
        """Go through the changes that count once more."""
        async for found in ahead(self._matrices(digested)):
            yield found

    async def rows_of(self, digested: Digested, keys: Collection[int]) -> Rows:
        """Fold the changes of these keys row by row."""
        return await self._jobs.run(self._rows_of, digested, keys)

    async def ensure_whole(self, table: Table) -> None:
        """Look at `_tables` again."""
        await self._jobs.run(self._ensure_whole, table)

    async def close(self) -> None:
        """Wait for what is being read."""
        await self._jobs.settle()

    # --- what the lake says of itself (blocking) -----------------------------------------------

    def _position(self) -> Lsn | None:
        self._epochs.load()
        version = self._epochs.app_version()
        return None if version is None else Lsn(version)

    def _known(self) -> Mapping[TableId, RegisteredTable]:
        registry = RegistryTable(self._tables, lambda _: None)
        registry.load()
        self._events = self._read_events()
        return {t.table: t for t in registry.tables().values()}

    def _read_events(self) -> Mapping[str, Sequence[Event]]:
        """Read `_tables` at the version that was loaded, if it is another than the last."""
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

    def _ensure_whole(self, table: Table) -> None:
        self._tables.load()
        now = self._read_events().get(str(table.id), ())
        since = now[len(self._looked[table.id].events) :]
        if any(e["state"] != TableState.LIVE for e in since):
            raise TableChangedError(
                table.id,
                "was read anew, or stopped, while it was compared",
                remedy="compare it when it is live",
            )

    # --- a table's changes (blocking) ------------------------------------------------------------

    def _describe(self, table: Table) -> Digested:
        events = self._events.get(str(table.id), ())
        ensure_comparable(table, events)
        found = _described(table, events)
        rows = sum(statistics.get("numRecords") or 0 for _, statistics in self._files(table))
        return replace(found, changes=rows)

    def _survey(self, described: Digested, point: Point) -> Digested:
        table = described.table
        files = self._files(table)
        files = [f for f in files if not point.is_exact or _least(f) <= point.lsn]
        self._tables.load()
        events = self._read_events().get(str(table.id), ())
        before = self._events[str(table.id)]
        folder = self._layout.raw(table.id)
        looked = _Looked(self._store, folder, files, before, point, (-1, -2))
        self._looked[table.id] = looked
        self._ensure_whole(table)
        now = _described(table, events)
        if (now.columns, now.key) != (described.columns, described.key):
            raise TableChangedError(
                table.id, "was altered while it was compared", remedy="compare it again"
            )
        found = self._gone_through(looked, now)
        ensure_one_key(table, events, self._looked[table.id].void[0])
        return found

    def _files(self, table: Table) -> list[File]:
        raw = AppendLog(self._store, self._layout.raw(table.id), self._layout.app_id(table.id))
        raw.load()
        return [(f[0], f[1]) for f in list_files(raw.handle)] if raw.exists else []

    def _gone_through(self, looked: _Looked, digested: Digested) -> Digested:
        void, lazy, linked = looked.void, set[int](), [digested.linked]
        changes = 0
        for batch in _batches(looked, (*_PLACE, UNCHANGED)):
            changes += batch.num_rows
            ops = batch.column("_cdc_op")
            marks = batch.filter(pc.equal(ops, TRUNCATE))
            for row in marks.select(["_cdc_lsn", "_cdc_seq"]).to_pylist():
                void = max(void, (row["_cdc_lsn"], row["_cdc_seq"]))
            if UNCHANGED in batch.schema.names:
                lazy |= lazy_columns(batch.column(UNCHANGED), digested.columns)
        looked = replace(looked, void=void)
        self._looked[digested.table.id] = looked
        if not digested.key:
            return replace(digested, changes=changes)
        lazy -= set(digested.key)
        if lazy:
            names = _names(digested, sorted({*lazy, *digested.key}))
            batches = map(_counting, _batches(looked, names))
            linked += [linked_keys(b, digested.columns, digested.key) for b in batches]
        return replace(
            digested,
            lazy=tuple(sorted(lazy)),
            linked=np.unique(np.concatenate(linked)),
            changes=changes,
        )

    def _matrices(self, digested: Digested) -> Generator[Matrix, None, None]:
        names = _names(digested, range(len(digested.columns)))
        for number, batch in enumerate(_batches(self._looked[digested.table.id], names), 1):
            counting = _counting(batch)
            if counting.num_rows:
                yield digest_changes(counting, digested)
            if number % _RELEASED_EVERY == 0:
                pa.default_memory_pool().release_unused()

    def _rows_of(self, digested: Digested, keys: Collection[int]) -> Rows:
        wanted = np.fromiter(keys, np.uint64, len(keys))
        if len(digested.linked) and digested.is_linked(wanted).any():
            wanted = np.concatenate([wanted, digested.linked])
        names = _names(digested, range(len(digested.columns)))
        changes: Rows = []
        for batch in _batches(self._looked[digested.table.id], names):
            counting = _counting(batch)
            if not counting.num_rows:
                continue
            flags = _touches(counting, digested, wanted)
            if flags.any():
                changes += _values(counting.filter(pa.array(flags)), digested)
        columns = [c.name for c in digested.columns]
        return fold_rows(changes, columns, [columns[i] for i in digested.key])


def _described(table: Table, events: Sequence[Event]) -> Digested:
    ensure_known_key(table, events)
    columns, note = compared_columns(table, events)
    names = [c.name for c in columns]
    return Digested(table, columns, tuple(names.index(n) for n in table.identifying), note=note)


def _least(file: File) -> int:
    found = file[1].get("minValues", {}).get("_cdc_lsn")
    return -1 if found is None else int(found)


def _names(digested: Digested, numbers: Collection[int]) -> tuple[str, ...]:
    own = (n for i in numbers for n in digested.columns[i].stored)
    return (*own, *_PLACE, BEFORE, UNCHANGED, "_cdc_raw")


def _batches(looked: _Looked, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Give the rows that the point sees, above what is void; columns that are there."""
    for path, statistics in looked.files:
        high = statistics.get("maxValues", {}).get("_cdc_lsn")
        if high is not None and high < looked.void[0]:
            continue
        where = f"{looked.folder}/{path}"
        with (
            storage_faults(looked.store.uri(where)),
            looked.store.open(where) as source,
            pq.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file,
        ):
            present = [n for n in dict.fromkeys(names) if n in file.schema_arrow.names]
            count = _batch_rows(file.metadata)
            for batch in file.iter_batches(count, columns=present, use_threads=False):
                yield _seen(batch, looked)


def _batch_rows(metadata: Any) -> int:  # noqa: ANN401 - pyarrow has no types
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    row_bytes = max((g.total_byte_size // max(1, g.num_rows) for g in groups), default=0)
    return max(1, min(BATCH_ROWS, _BATCH_BYTES // max(1, row_bytes)))


def _seen(batch: pa.RecordBatch, looked: _Looked) -> pa.RecordBatch:
    lsn: NDArray[np.int64] = batch.column("_cdc_lsn").to_numpy()
    xids: Any = batch.column("_cdc_xid")
    seq: NDArray[np.int64] = batch.column("_cdc_seq").to_numpy()
    flags = looked.point.sees(lsn, seq, pc.fill_null(xids, -1).to_numpy())
    if looked.void[0] >= 0:
        at, number = looked.void
        flags &= (lsn > at) | ((lsn == at) & (seq > number))
    return batch if flags.all() else batch.filter(pa.array(flags))


def _counting(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Leave out the `t` rows, which have been taken account of."""
    is_row = pc.not_equal(batch.column("_cdc_op"), TRUNCATE)
    return batch if pc.all(is_row).as_py() is not False else batch.filter(is_row)


def _touches(
    batch: pa.RecordBatch, digested: Digested, wanted: NDArray[np.uint64]
) -> NDArray[np.bool_]:
    """Say which changes put a row of these keys there, or take one away."""
    own, old = change_keys(batch, digested)
    found: NDArray[np.bool_] = np.isin(own, wanted) | np.isin(old, wanted)
    return found


def _values(batch: pa.RecordBatch, digested: Digested) -> Rows:
    """Give changes as `ingestd.sink.fold` takes them, by the source's names of the columns."""
    count = batch.num_rows
    raw = RawTexts(batch.column("_cdc_raw"))
    given = given_by(batch)
    before = given(BEFORE)
    lsn = batch.column("_cdc_lsn").to_pylist()
    rows: Rows = [dict.fromkeys(("_cdc_raw", BEFORE, UNCHANGED)) for _ in range(count)]
    for name in _PLACE[:3]:
        for row, value in zip(rows, batch.column(name).to_pylist(), strict=True):
            row[name] = value
    owner = {n: c.name for c in digested.columns for n in c.stored}
    unchanged = given(UNCHANGED)
    for row, names in zip(
        rows, [None] * count if unchanged is None else unchanged.to_pylist(), strict=True
    ):
        row[UNCHANGED] = [owner[n] for n in names or () if n in owner] or None
    has_before = [False] * count if before is None else before.is_valid().to_pylist()
    for row, is_there in zip(rows, has_before, strict=True):
        row[BEFORE] = {} if is_there else None

    def given_before(name: str) -> pa.Array | None:
        if before is None or before.type.get_field_index(name) < 0:
            return None
        return pc.struct_field(before, name)

    for column in digested.columns:
        own = values_of(column, given, raw, count)
        old = values_of(column, given_before, raw, count, OF_BEFORE)
        is_old = any(given_before(n) is not None for n in column.stored)
        for number, row in enumerate(rows):
            is_older = lsn[number] < column.since_lsn
            row[column.name] = column.missing if is_older else own[number]
            if is_old and row[BEFORE] is not None:
                row[BEFORE][column.name] = column.missing if is_older else old[number]
    return rows
