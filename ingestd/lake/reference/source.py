"""A table's current rows, derived from its changes in the lake (ports.ReferenceTableSource).

The result is always the fold of the raw table at a durable epoch, `position`. The complete table is
folded in as many passes as memory requires, each over the keys of one share. Changes of later
epochs are read from the commits made since.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.lake.delta.log import TableLog
from ingestd.lake.delta.read import list_files, read_files
from ingestd.lake.delta.tail import CommitTail, EpochEnd, File
from ingestd.lake.layout import Layout
from ingestd.lake.reference.definition import ReferenceDefinition, read_definition
from ingestd.lake.reference.keyless_rows import KeylessRows
from ingestd.lake.reference.last_rows import last_rows
from ingestd.lake.reference.raw_changes import (
    POSITION,
    Position,
    change_rows_schema,
    epochs_of,
    hashes_of,
    highest,
    is_in_share,
    key_hashes,
    read_changes,
)
from ingestd.lake.registry_table import SCHEMA as TABLES_SCHEMA
from ingestd.lake.store.errors import table_fault
from ingestd.lake.store.pending_calls import StorageCalls
from ingestd.lake.store.store import open_store
from ingestd.lake.threads import WorkerThreads
from ingestd.model.changes import TRUNCATE, field_of
from ingestd.model.errors import FolderError, TableError, TransientError, resnapshot_command
from ingestd.model.schema import TableId

MEMORY_BYTES = 64 << 20
"""Arrow bytes of change rows folded at once; the peak is about three times as much."""
BATCH_ROWS = 1 << 16
_LAST_SEQ = 1 << 62


@dataclass(slots=True)
class _Plan:
    """A plan to fold the complete table. `above`: position of the newest `t`; `passes`: shares."""

    definition: ReferenceDefinition
    epoch: int
    files: Sequence[File]
    above: Position
    passes: int
    linked: pa.Table | None
    tail: CommitTail
    reach: Position


class RawReferenceSource:
    """See above. `uri`: the lake's. It only reads, and may run alongside the source's daemon.

    `poll_snapshot` raises TransientError (``not_whole``) while the table's own snapshot is not
    complete. A table with a value that its column can't hold raises TableError.
    """

    def __init__(
        self,
        uri: str,
        source: str,
        table: TableId,
        *,
        storage_options: Mapping[str, str] | None = None,
        memory_bytes: int = MEMORY_BYTES,
        batch_rows: int = BATCH_ROWS,
        calls: StorageCalls | None = None,
    ) -> None:
        layout = Layout(source)
        self._source = source
        self._table = table
        self._memory_bytes = memory_bytes
        self._batch_rows = batch_rows
        self._store = open_store(uri, storage_options, calls=calls)
        self._raw = TableLog(self._store, layout.raw(table), layout.app_id(table))
        self._tables = TableLog(self._store, layout.tables, layout.app_id())
        self._epochs = EpochEnd(TableLog(self._store, layout.epochs, layout.app_id()))
        self._jobs = WorkerThreads(at_once=1)
        self._definition: ReferenceDefinition | None = None
        self._plan: _Plan | None = None
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._returned = 0
        self._resumed: int | None = None
        self._is_complete = False
        self._epoch = 0
        self._tail: CommitTail | None = None
        self._reach = (-1, -1)

    @property
    def key(self) -> Sequence[str]:
        """The replica identity's columns, or the primary key's if it is FULL; may be empty."""
        return () if self._definition is None else self._definition.own_key

    @property
    def position(self) -> int:
        """The epoch."""
        return self._epoch if self._plan is None else self._plan.epoch

    async def poll_snapshot(self) -> pa.RecordBatch | None:
        """Fold a share; return its rows."""
        return await self._jobs.run(self._poll_snapshot)

    def is_snapshot_complete(self) -> bool:
        """Return whether all shares were returned."""
        return self._is_complete

    async def poll_changes(self) -> pa.RecordBatch | None:
        """Fold the later epochs, or the table again if their rows can't just be added."""
        return await self._jobs.run(self._poll_changes)

    def checkpoint(self) -> bytes:
        """Return the epoch, and how many batches of the snapshot were returned."""
        passes = self._resumed if self._plan is None else self._plan.passes
        return json.dumps([self.position, self._returned, passes, self._is_complete]).encode()

    def restore(self, checkpoint: bytes) -> bool:
        """Resume at that epoch: the same share of the same fold."""
        epoch, given, passes, is_complete = json.loads(checkpoint)
        if is_complete:
            self.resume(epoch)
            return True
        if given == 0:
            return True
        self._epoch, self._returned, self._resumed = epoch, given, passes
        return True

    def resume(self, epoch: int) -> None:
        """Resume with the changes after this epoch."""
        self._epoch, self._is_complete = epoch, True

    async def close(self) -> None:
        """Wait until the current read has ended."""
        await self._jobs.settle()

    @contextmanager
    def _raw_faults(self) -> Iterator[None]:
        """Raise a fault of the raw table's folder as the table's own."""
        try:
            yield
        except FolderError as error:
            raise table_fault(error, self._source, self._table, self._raw.uri) from error

    # --- the complete table (blocking) --------------------------------------------------------

    def _poll_snapshot(self) -> pa.RecordBatch | None:
        if self._is_complete:
            return None
        if self._plan is None:
            definition, epoch = self._find_definition()
            if self._returned:
                epoch = self._epoch
            elif not definition.is_live or not epoch:
                raise TransientError(
                    f"table {self._table}: its own snapshot is not complete", reason="not_whole"
                )
            with self._raw_faults():
                self._plan = self._make_plan(definition, epoch)
        plan = self._plan
        batches, self._batches = self._batches, None  # an error ends a generator; begin a new one
        with self._raw_faults():
            if batches is None:
                batches = self._folded(plan)
                for _ in range(self._returned):  # skip batches that were returned before
                    next(batches, None)
            batch = next(batches, None)
        if batch is not None:
            self._batches = batches
            self._returned += 1
            return batch
        self._plan = None
        self._returned, self._is_complete, self._epoch = 0, True, plan.epoch
        self._tail, self._reach = plan.tail, plan.reach
        self._tail.requeue(f for f in plan.files if epochs_of(f[1])[1] > plan.epoch)
        return None

    def _find_definition(self) -> tuple[ReferenceDefinition, int]:
        """Return the table as recorded, and an epoch at which that record was valid.

        The table was live at that epoch if the record is the same before and after reading the
        epochs: it becomes live only when the epoch with its last rows is durable.
        """
        while True:
            definition = self._described()
            epoch = self._epochs.last()
            if self._described() is definition:
                return definition, epoch

    def _described(self) -> ReferenceDefinition:
        known = self._tables.version
        if known < 0 or self._tables.has_commit(known + 1):
            self._tables.load()
            if self._tables.version != known or self._definition is None:
                self._definition = self._read_definition()
        if self._definition is None:
            self._definition = self._read_definition()
        return self._definition

    def _read_definition(self) -> ReferenceDefinition:
        nothing = ReferenceDefinition(
            self._table, is_live=False, columns=(), key=(), key_since_lsn=0
        )
        if not self._tables.exists:
            return nothing
        rows = read_files(
            self._tables.handle, self._store, self._tables.folder, schema=TABLES_SCHEMA
        )
        own = rows.filter(pc.equal(rows["table"], str(self._table)))
        events = sorted(own.to_pylist(), key=lambda e: e["at"])
        return read_definition(self._table, events) if events else nothing

    def _make_plan(self, definition: ReferenceDefinition, epoch: int) -> _Plan:
        self._raw.load()
        tail = CommitTail(self._store, self._raw.folder, self._raw.version)
        files = self._files()
        above, reach = self._marks(files, epoch)
        if definition.key_since_lsn > max(above[0], 0):
            raise TableError(
                self._table,
                "its key has changed since its rows were read",
                remedy=f"re-read it: {resnapshot_command(self._source, self._table)}",
            )
        nbytes = self._nbytes(definition, files, epoch)
        passes = self._resumed or max(1, -(-nbytes // self._memory_bytes))
        self._resumed = None
        has_key = passes > 1 and bool(definition.key)
        linked = self._linked(definition, files, epoch, above) if has_key else None
        return _Plan(definition, epoch, files, above, passes, linked, tail, reach)

    def _marks(self, files: Sequence[File], epoch: int) -> tuple[Position, Position]:
        """Return the positions of the newest `t` and of the newest row."""
        above = reach = (-1, -2)
        for file in files:
            for rows in read_changes(self._raw, file, POSITION, epoch):
                if not rows.num_rows:
                    continue
                reach = max(reach, highest(rows))
                marks = rows.filter(pc.equal(rows["_cdc_op"], TRUNCATE))
                if marks.num_rows:
                    above = max(above, highest(marks))
        return above, reach

    def _linked(
        self,
        definition: ReferenceDefinition,
        files: Sequence[File],
        epoch: int,
        above: Position,
    ) -> pa.Table | None:
        """Return the keys before and after each change of a key: one share has all of them."""
        wanted = change_rows_schema(definition, definition.key)
        found = []
        for file in files:
            for rows in read_changes(self._raw, file, wanted, epoch, above):
                before = pa.chunked_array(rows["_cdc_before"])
                moved = rows.filter(pc.and_(before.is_valid(), pc.equal(rows["_cdc_op"], "u")))
                if moved.num_rows:
                    found.append(moved.select(list(definition.key)))
                    fields = [field_of(moved["_cdc_before"], n) for n in definition.key]
                    found.append(pa.table(fields, names=list(definition.key)))
        return pa.concat_tables(found) if found else None

    def _folded(self, plan: _Plan) -> Iterator[pa.RecordBatch]:
        """Yield rows share by share; first an empty batch with the columns."""
        definition = plan.definition
        yield pa.RecordBatch.from_pylist([], definition.schema)
        names = [c.raw for c in definition.columns]
        linked = None
        if plan.linked is not None:
            linked = np.unique(key_hashes(plan.linked, definition.key))
        for share in range(plan.passes):
            if definition.key:
                current = self._last_rows(plan, share, linked)
            else:
                current = self._keyless_rows(plan, share)
            if not len(current):
                continue
            # In an order independent of the files' order, as `restore` counts batches.
            order = np.argsort(hashes_of(current, definition.key or names), kind="stable")
            current = current.select(names).take(pa.array(order))
            rows = current.rename_columns(definition.schema.names).cast(definition.schema)
            yield from rows.to_batches(max_chunksize=self._batch_rows)

    def _last_rows(self, plan: _Plan, share: int, linked: NDArray[np.uint64] | None) -> pa.Table:
        """Return the current rows whose keys are in a share."""
        definition = plan.definition
        parts = [change_rows_schema(definition, [c.raw for c in definition.columns]).empty_table()]
        for rows in self._changes_of(plan):
            is_own = is_in_share(rows, definition.key, share, plan.passes, linked)
            parts.append(rows.filter(pa.array(is_own)))
        rows = definition.with_missing(pa.concat_tables(parts))
        del parts
        current = last_rows(rows, definition.key, definition.refusal)
        return current.filter(pc.equal(current["_cdc_op"], "u"))

    def _keyless_rows(self, plan: _Plan, share: int) -> pa.Table:
        """Return the current rows in a share, of a table without a key."""
        keyless = KeylessRows(plan.definition, share, plan.passes)
        names = [c.raw for c in plan.definition.columns]
        keyless.add_changes(change_rows_schema(plan.definition, names).empty_table())
        for rows in self._changes_of(plan):
            keyless.add_changes(rows)
        return keyless.rows()

    def _changes_of(self, plan: _Plan) -> Iterator[pa.Table]:
        names = [c.raw for c in plan.definition.columns]
        wanted = change_rows_schema(plan.definition, names)
        for file in plan.files:
            yield from read_changes(self._raw, file, wanted, plan.epoch, plan.above)

    # --- changes (blocking) -------------------------------------------------------------------

    def _poll_changes(self) -> pa.RecordBatch | None:
        if not self._is_complete:
            return None
        before = self._definition
        definition, epoch = self._find_definition()
        is_same = before is None or (
            (before.schema, before.key) == (definition.schema, definition.key)
        )
        is_same = is_same and epoch >= self._epoch  # else the lake was replaced
        if is_same and (not definition.is_live or epoch <= self._epoch):
            return _no_changes(definition)
        found = None
        if is_same:
            with self._raw_faults():
                found = self._changes_to(definition, epoch)
        if found is None:  # start over
            self._is_complete, self._plan, self._batches, self._returned = False, None, None, 0
            self._tail = None
        return found

    def _changes_to(self, definition: ReferenceDefinition, epoch: int) -> pa.RecordBatch | None:
        """Return the changes up to an epoch; None if the table must be folded again."""
        if self._tail is None:
            self._tail = self._new_tail()
        files = self._tail.files()
        if files is None:  # the log no longer has the commits
            return None
        wanted = change_rows_schema(definition, [c.raw for c in definition.columns])
        parts, nbytes = [wanted.empty_table()], 0
        for file in files:
            for rows in read_changes(self._raw, file, wanted, epoch, after=self._epoch):
                parts.append(rows)
                nbytes += rows.nbytes
                if nbytes > self._memory_bytes:
                    return None
        rows = pa.concat_tables(parts)
        if not self._only_adds(rows) or (rows.num_rows and not definition.key):
            return None
        changes = self._changes(definition, rows)
        if rows.num_rows:
            self._reach = max(self._reach, highest(rows))
        self._tail.requeue(f for f in files if epochs_of(f[1])[1] > epoch)
        self._epoch = epoch
        return changes

    def _changes(self, definition: ReferenceDefinition, rows: pa.Table) -> pa.RecordBatch:
        if not rows.num_rows:
            return _no_changes(definition)
        found = last_rows(definition.with_missing(rows), definition.key, definition.refusal)
        [batch] = _renamed(found, definition).combine_chunks().to_batches()
        return batch

    def _only_adds(self, rows: pa.Table) -> bool:
        """Return whether the fold can continue: no `t`, and all rows above those folded."""
        if not rows.num_rows:
            return True
        if pc.any(pc.equal(rows["_cdc_op"], TRUNCATE)).as_py():
            return False
        order = [("_cdc_lsn", "ascending"), ("_cdc_seq", "ascending")]
        lowest = rows.take(pc.sort_indices(rows, order)[:1])
        return highest(lowest) > self._reach

    def _new_tail(self) -> CommitTail:
        """Read all files once after a start, also to find how far the fold reaches."""
        self._raw.load()
        tail = CommitTail(self._store, self._raw.folder, self._raw.version)
        files = self._files()
        for file in files:
            first, last = epochs_of(file[1])
            high = file[1].get("maxValues", {}).get("_cdc_lsn")
            if first > self._epoch:
                continue
            if last <= self._epoch and high is not None:
                # This may be too far: then something is folded again once.
                self._reach = max(self._reach, (high, _LAST_SEQ))
                continue
            for rows in read_changes(self._raw, file, POSITION, self._epoch):
                if rows.num_rows:
                    self._reach = max(self._reach, highest(rows))
        tail.requeue(f for f in files if epochs_of(f[1])[1] > self._epoch)
        return tail

    def _files(self) -> list[File]:
        found = list_files(self._raw.handle) if self._raw.exists else []
        return [(path, statistics) for path, statistics, _ in found]

    def _nbytes(self, definition: ReferenceDefinition, files: Sequence[File], epoch: int) -> int:
        """Return an estimate of all rows' size in memory, from one row group."""
        rows: int = sum(statistics.get("numRecords") or 0 for _, statistics in files)
        wanted = change_rows_schema(definition, [c.raw for c in definition.columns])
        largest = sorted(files, key=lambda f: -(f[1].get("numRecords") or 0))[:1]
        for file in largest:
            for sample in read_changes(self._raw, file, wanted, epoch):
                return int(rows * sample.nbytes // max(1, sample.num_rows))
        return 0


def _no_changes(definition: ReferenceDefinition) -> pa.RecordBatch:
    schema = definition.schema.append(pa.field("_cdc_op", pa.string()))
    return pa.RecordBatch.from_pylist([], schema)


def _renamed(rows: pa.Table, definition: ReferenceDefinition) -> pa.Table:
    """Rename columns as in the reference table, also where values contain their names."""
    names = {c.raw: c.name for c in definition.columns}
    lists = rows["_cdc_unchanged"]
    if lists.null_count < len(lists):
        renamed = [None if n is None else [names[each] for each in n] for n in lists.to_pylist()]
        index = rows.schema.get_field_index("_cdc_unchanged")
        kind = pa.list_(pa.string())
        rows = rows.set_column(index, "_cdc_unchanged", pa.array(renamed, kind))
    base = pa.concat_arrays(rows["_cdc_before"].chunks)
    fields = [field_of(base, n) for n in definition.key]
    base = pa.StructArray.from_arrays(fields, names=definition.own_key, mask=base.is_null())
    index = rows.schema.get_field_index("_cdc_before")
    rows = rows.set_column(index, "_cdc_before", base)
    return rows.rename_columns([names.get(n, n) for n in rows.schema.names])
