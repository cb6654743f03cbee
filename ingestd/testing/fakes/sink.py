"""The sink in memory; its state outlives it in a `MemoryDisk`, as in a lake (ports.Sink)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from ingestd.model.changes import (
    EPOCH_FIELD,
    MARKER_SEQ,
    CommittedEpoch,
    EpochSummary,
    TableBatch,
    TableInEpoch,
)
from ingestd.model.errors import OperatorError, TableError, TransientError
from ingestd.model.keys import key_columns
from ingestd.model.lake_state import (
    LakeState,
    RegisteredTable,
    TableEvent,
    UnlistedRows,
    registered,
)
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table, TableId
from ingestd.ports import EpochWriter, Fragment, StoppedTables
from ingestd.process.clock import utc_now


@dataclass(slots=True)
class MemoryTable:
    """A raw table: rows of every version, the watermark, and where its capture resumes.

    Version 0 is the new table, without rows.
    """

    versions: list[pa.Table] = field(default_factory=list)
    watermark: Lsn | None = None
    resume: str = ""

    @property
    def version(self) -> int:
        """The version of the last commit."""
        return len(self.versions)

    def rows(self) -> pa.Table:
        """Return all rows of the newest version."""
        return pa.concat_tables(self.versions, promote_options="default")


@dataclass(slots=True)
class MemoryDisk:
    """The durable state of one source. `lake_id`: the id of its lake."""

    tables: dict[TableId, MemoryTable] = field(default_factory=dict)
    epochs: list[CommittedEpoch] = field(default_factory=list)
    events: list[TableEvent] = field(default_factory=list)
    registered: dict[TableId, RegisteredTable] = field(default_factory=dict)
    position: Lsn | None = None
    server_id: str | None = None
    lake_id: str | None = None
    commits: int = 0
    """Number of commits; a writer that has not seen the last one can't make the next."""
    fences: int = 0
    damage: set[TableId] = field(default_factory=set)
    """Raw tables that can be neither read nor written."""


def _continue(_step: str) -> None:
    """Do nothing before a commit."""


class MemoryLake:
    """ports.Sink on a `MemoryDisk`; `before_commit`: see `ingestd.lake.delta_lake.DeltaLake`."""

    check_interval_s = 5.0

    def __init__(
        self,
        disk: MemoryDisk | None = None,
        *,
        now: Callable[[], datetime] = utc_now,
        before_commit: Callable[[str], None] = _continue,
    ) -> None:
        self.disk = disk if disk is not None else MemoryDisk()
        self.now = now
        self.before_commit = before_commit
        self.watermarks: dict[TableId, Lsn] = {}
        self.held: dict[TableId, int] = {}
        self._reaches: Mapping[TableId, Lsn] = {}
        self._refused: set[TableId] = set()
        self._seen = 0
        self._fences = 0
        self._writers: list[MemoryEpochWriter] = []
        self._is_open = False

    async def open(self) -> LakeState:
        """Return the state of the disk."""
        await self.close()
        disk = self.disk
        last = disk.epochs[-1] if disk.epochs else None
        epoch = last.epoch if last else 0
        self._seen, self._fences, self._refused = disk.commits, disk.fences, set()
        self.watermarks = {
            t: m.watermark
            for t, m in disk.tables.items()
            if m.watermark is not None and t not in disk.damage
        }
        self.held = {
            table: _rows_of(disk.tables[table].rows(), epoch + 1)
            for table, watermark in self.watermarks.items()
            if last is None or watermark >= last.summary.end_lsn
        }
        self.held = {table: rows for table, rows in self.held.items() if rows}
        self._is_open = True
        found = LakeState(
            epoch,
            disk.position,
            dict(self.watermarks),
            {name: self._as_it_is(entry) for name, entry in disk.registered.items()},
            disk.server_id,
            {table: _unlisted(disk.tables[table].rows(), epoch + 1) for table in self.held},
            damaged={table: damaged_table(table) for table in disk.damage},
            lake_id=disk.lake_id,
        )
        self._reaches = found.reaches
        return found

    def require_usable(self, table: TableId) -> None:
        """Raise TableError if the raw table is damaged."""
        held = self.disk.tables.get(table)
        if table in self.disk.damage or (held is not None and table in self._refused):
            raise damaged_table(table)
        if held is not None and held.watermark is not None and self._is_open:
            self.watermarks.setdefault(table, held.watermark)

    def _as_it_is(self, entry: RegisteredTable) -> RegisteredTable:
        held = self.disk.tables.get(entry.table)
        is_usable = held is not None and entry.table not in self.disk.damage
        return replace(entry, resume=held.resume) if held is not None and is_usable else entry

    def refuse_beyond(self, end: Lsn) -> Mapping[TableId, TableError]:
        """Treat tables with a position above `end` as damaged."""
        beyond = [table for table, lsn in self._reaches.items() if lsn > end]
        for table in beyond:
            self._refused.add(table)
            del self.watermarks[table]
            self.held.pop(table, None)
        return {table: damaged_table(table) for table in beyond}

    async def write_lake_id(self, lake_id: str | None = None) -> str:
        """Assign the disk an id, unless it has one."""
        self.disk.lake_id = self.disk.lake_id or lake_id or str(uuid.uuid4())
        return self.disk.lake_id

    async def ensure_exists(self) -> None:
        """Do nothing: the disk can't disappear."""

    async def fence(self) -> Mapping[TableId, TableError]:
        """Make all other writers' commits fail; raise if this one has missed a commit."""
        is_stale = self.disk.commits != self._seen or self.disk.fences != self._fences
        self.disk.fences = self._fences = self.disk.fences + 1
        self.disk.commits = self._seen = self.disk.commits + 1
        if is_stale:
            raise _claimed("fence")
        return {}

    async def adopt(self, server_id: str) -> None:
        """Record the server."""
        self.disk.server_id = server_id

    def begin_epoch(self) -> EpochWriter:
        """Begin the next epoch."""
        if not self._is_open:
            msg = "the sink is not open"
            raise RuntimeError(msg)
        pending = [w for w in self._writers if not w.is_over]
        if any(not w.is_committing for w in pending):
            msg = "the epoch before is still being filled"
            raise RuntimeError(msg)
        last = self.disk.epochs[-1].epoch if self.disk.epochs else 0
        number = pending[-1].number + 1 if pending else last + 1
        writer = self.make_writer(number, pending[-1] if pending else None)
        self._writers = [*pending, writer]
        return writer

    def make_writer(self, number: int, previous: MemoryEpochWriter | None) -> MemoryEpochWriter:
        """Return the writer of an epoch; a test may override it."""
        return MemoryEpochWriter(self, number, previous)

    async def record(self, events: Sequence[TableEvent]) -> None:
        """Append events."""
        self.swap("_tables")
        for event in events:
            name = event.table.id
            self.disk.events.append(event)
            self.disk.registered[name] = registered(event, self.disk.registered.get(name))

    async def unsent(self, table: Table, since: Lsn) -> Sequence[pa.RecordBatch]:
        """Search the rows."""
        self.require_usable(table.id)
        held = self.disk.tables.get(table.id)
        if held is None:
            return []
        rows = held.rows()
        recent = pc.greater_equal(rows["_cdc_lsn"], int(since))
        rows = rows.filter(pc.and_(recent, rows["_cdc_unchanged"].is_valid()))
        columns = [*key_columns(table), "_cdc_unchanged"]
        return list(rows.select(columns).combine_chunks().to_batches())

    async def has_marker(self, table: Table, point: Lsn) -> bool:
        """Search the rows."""
        self.require_usable(table.id)
        held = self.disk.tables.get(table.id)
        if held is None:
            return False
        rows = held.rows().select(["_cdc_lsn", "_cdc_seq"]).to_pylist()
        return {"_cdc_lsn": int(point), "_cdc_seq": MARKER_SEQ} in rows

    async def advance(self, position: Lsn) -> None:
        """Record a later position."""
        if self.disk.position is None or position > self.disk.position:
            self.swap("_epochs")
            self.disk.position = position

    async def changes(
        self, table: TableId, columns: Sequence[str]
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yield the current rows, epoch by epoch."""
        held = self.disk.tables.get(table)
        if held is not None:
            rows = held.rows()
            for batch in rows.select([n for n in columns if n in rows.schema.names]).to_batches():
                yield batch

    async def close(self) -> None:
        """Discard everything uncommitted."""
        self._is_open = False
        writers, self._writers = self._writers, []
        for writer in writers:
            await writer.abort()

    def swap(self, step: str) -> None:
        """Compare and swap: raise if another writer has committed since `open`."""
        self.before_commit(step)
        if self.disk.fences != self._fences:
            raise _claimed(step)
        if self.disk.commits != self._seen:
            raise OperatorError(
                f"{step}: another writer appended", remedy="stop the other daemon of this source"
            )
        self.disk.commits = self._seen = self._seen + 1


class MemoryEpochWriter:
    """ports.EpochWriter of a `MemoryLake`."""

    def __init__(self, lake: MemoryLake, number: int, previous: MemoryEpochWriter | None) -> None:
        self._lake = lake
        self._number = number
        self._previous = previous
        self._batches: dict[TableId, list[pa.Table]] = {}
        self._resumes: dict[TableId, str] = {}
        self._taken: dict[TableId, int] = {}
        self._over = asyncio.Event()
        self.is_committing = False
        self.is_committed = False

    @property
    def number(self) -> int:
        """The epoch's number."""
        return self._number

    @property
    def rows(self) -> int:
        """Rows accepted so far."""
        return sum(self._taken.values())

    @property
    def is_over(self) -> bool:
        """Return whether it is committed, failed or aborted."""
        return self._over.is_set()

    async def append_batch(self, batch: TableBatch, *, from_snapshot: bool = False) -> None:
        """Accept rows."""
        self._refuse_if_closed()
        self._lake.require_usable(batch.table.id)
        table, rows = batch.table.id, pa.Table.from_batches([batch.rows])
        self._taken[table] = self._taken.get(table, 0) + rows.num_rows
        watermark = self._lake.watermarks.get(table)
        if watermark is not None and not from_snapshot:
            rows = rows.filter(pc.greater_equal(rows["_cdc_lsn"], int(watermark)))
        if rows.num_rows or batch.resume is not None:
            self._refuse_other_types(table, rows)
            epochs = pa.repeat(pa.scalar(self._number, pa.int64()), rows.num_rows)
            at = rows.schema.get_field_index("_cdc_ts") + 1
            self._batches.setdefault(table, []).append(rows.add_column(at, EPOCH_FIELD, epochs))
        if batch.resume is not None:
            self._resumes[table] = batch.resume

    async def discard(self, table: TableId) -> None:
        """Discard a table's rows."""
        self._taken.pop(table, None)
        self._batches.pop(table, None)
        self._resumes.pop(table, None)

    async def commit(
        self, summary: EpochSummary, stop: StoppedTables | None = None
    ) -> CommittedEpoch:
        """Write the rows to the disk, table by table, then the epoch."""
        self._refuse_if_closed()
        if self.rows == 0 and not self._lake.held:
            msg = "an epoch without rows is not committed: use Sink.advance"
            raise ValueError(msg)
        self.is_committing = True
        try:
            await self.wait_for_previous()
            rows, errors = self._commit_tables(summary)
            if errors:
                if stop is None:
                    raise errors[0]
                await stop(errors)
            committed = self._commit(summary, rows)
            self.is_committed = True
        finally:
            self._over.set()
        return committed

    async def abort(self) -> None:
        """Discard the epoch."""
        if not self.is_committing:
            self._over.set()
            self._batches, self._taken, self._resumes = {}, {}, {}

    def _refuse_if_closed(self) -> None:
        if self.is_committing or self.is_over:
            msg = f"epoch {self._number} is closed"
            raise RuntimeError(msg)

    def _refuse_other_types(self, table: TableId, rows: pa.Table) -> None:
        stored = self._lake.disk.tables.get(table, MemoryTable()).versions
        for known in [*stored, *self._batches.get(table, [])]:
            types = {f.name: f.type for f in known.schema}
            for name in set(rows.schema.names) & set(types):
                come = rows.schema.field(name).type
                if types[name] != come and not pa.types.is_struct(come):
                    raise TableError(
                        table, f"column {name} is {types[name]} in the lake and now {come}"
                    )

    async def wait_for_previous(self) -> None:
        """Wait until the previous epoch is committed; a test may override it."""
        previous, self._previous = self._previous, None
        if previous is not None:
            await previous._over.wait()  # noqa: SLF001 - the same class
            if not previous.is_committed:
                raise TransientError("the previous epoch failed", reason="storage")

    def _commit_tables(self, summary: EpochSummary) -> tuple[dict[TableId, int], list[TableError]]:
        lake, disk = self._lake, self._lake.disk
        rows = {table: count for table, count in lake.held.items() if table not in disk.damage}
        errors = []
        for table, batches in self._batches.items():
            lake.swap(str(table))
            if table in disk.damage:
                errors.append(damaged_table(table))
                continue
            stored = disk.tables.setdefault(table, MemoryTable())
            stored.versions.append(pa.concat_tables(batches, promote_options="default"))
            stored.watermark = summary.end_lsn
            stored.resume = self._resumes.get(table, stored.resume)
            rows[table] = rows.get(table, 0) + stored.versions[-1].num_rows
        return rows, errors

    def _commit(self, summary: EpochSummary, rows: Mapping[TableId, int]) -> CommittedEpoch:
        lake, disk = self._lake, self._lake.disk
        tables = tuple(
            TableInEpoch(table, disk.tables[table].version, count)
            for table, count in sorted(rows.items())
            if count
        )
        lake.swap("_epochs")
        committed = CommittedEpoch(self._number, replace(summary), lake.now(), tables)
        disk.epochs.append(committed)
        disk.position = max(summary.end_lsn, disk.position or summary.end_lsn)
        lake.held = {}
        return committed


class MemoryPageSink:
    """ports.PageSink that keeps its rows."""

    def __init__(self) -> None:
        self.pages: list[pa.RecordBatch] = []
        self._is_over = False

    async def append_rows(self, rows: pa.RecordBatch) -> None:
        """Accept rows."""
        self._refuse_if_over()
        if rows.num_rows:
            self.pages.append(rows)

    async def finish(self) -> Sequence[Fragment]:
        """Return a fragment for each run of one schema."""
        self._refuse_if_over()
        self._is_over = True
        runs: list[list[pa.RecordBatch]] = []
        for page in self.pages:
            if runs and runs[-1][0].schema.equals(page.schema):
                runs[-1].append(page)
            else:
                runs.append([page])
        return [_fragment(index, run) for index, run in enumerate(runs)]

    async def abort(self) -> None:
        """Discard the rows."""
        self._is_over = True
        self.pages = []

    def _refuse_if_over(self) -> None:
        if self._is_over:
            msg = "the page sink is finished"
            raise RuntimeError(msg)


def damaged_table(table: TableId) -> TableError:
    """Return the fault of a raw table that can't be used."""
    return TableError(table, "its raw table is damaged", remedy="repair it")


def _claimed(step: str) -> TransientError:
    return TransientError(f"{step}: another ingestd has taken over", reason="claimed")


def _fragment(index: int, run: Sequence[pa.RecordBatch]) -> Fragment:
    rows = sum(page.num_rows for page in run)
    size = sum(page.nbytes for page in run)
    return Fragment(f"part-{index}.parquet", size, rows, f'{{"numRecords":{rows}}}', 0)


def _unlisted(rows: pa.Table, epoch: int) -> UnlistedRows:
    found = rows.filter(pc.equal(rows[EPOCH_FIELD.name], epoch))
    first, reach = (Lsn(end(found["_cdc_lsn"]).as_py()) for end in (pc.min, pc.max))
    return UnlistedRows(first, reach, pc.max(found["_cdc_ts"]).as_py())


def _rows_of(rows: pa.Table, epoch: int) -> int:
    return int(pc.sum(pc.equal(rows[EPOCH_FIELD.name], epoch)).as_py() or 0)
