"""One table during its backfill: its plan, the splits that were read, and its commits."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import reduce

import pyarrow as pa

from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.epoch_writer import with_epoch
from ingestd.lake.parquet_writer import FragmentWriter
from ingestd.lake.raw_table import RowRange, raw_schema, statistics_columns
from ingestd.model.changes import marker_batch
from ingestd.model.errors import IngestdError
from ingestd.model.lake_state import TableEvent, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.recorded_progress import RecordedProgress
from ingestd.model.schema import Table, TableId
from ingestd.ports import Fragment
from ingestd.postgres.snapshot.resume import remainder_text
from ingestd.process.clock import utc_now
from spark_jobs.backfills.record import Note, Plan, PlannedSplit, Record


@dataclass(frozen=True, slots=True)
class Filled:
    """A table whose rows are in the lake. If not `is_live`, the daemon finishes it."""

    table: TableId
    rows: int
    point: Lsn
    is_live: bool


@dataclass(slots=True)
class TableBackfill:
    """The state of one table. `plan`: None until its point is known; `notes`: by split number."""

    table: Table
    record: Record
    plan: Plan | None = None
    notes: dict[int, Note] = field(default_factory=dict)
    is_loaded: bool = False
    error: IngestdError | None = None

    @classmethod
    def for_table(cls, table: Table, lake: DeltaLake) -> TableBackfill:
        """Return a new state. Raises TableError if the raw table can't store such rows."""
        lake.raw_tables.raw_table(table.id).plan_schema_for(raw_schema(table))
        return cls(table, Record(lake.store, lake.layout.raw(table.id)))

    @property
    def agreed(self) -> Plan:
        """The plan. It must exist."""
        assert self.plan is not None
        return self.plan

    @property
    def is_read(self) -> bool:
        """Return whether every split is read."""
        return self.plan is not None and len(self.notes) == len(self.plan.splits)

    @property
    def unread(self) -> list[PlannedSplit]:
        """The splits of the plan that are not read yet."""
        return [s for number, s in enumerate(self.agreed.splits) if number not in self.notes]

    @property
    def is_one_snapshot(self) -> bool:
        """Return whether all rows come from one snapshot."""
        return all(note.point == self.agreed.point for note in self.notes.values())

    @property
    def nbytes(self) -> int:
        """Arrow bytes of the rows."""
        return sum(note.nbytes for note in self.notes.values())

    def files(self, *, is_marked: bool) -> list[Fragment]:
        """Return the files to commit. If `is_marked`, the file with the `t` comes first."""
        found = [f for _, note in sorted(self.notes.items()) for f in note.fragments]
        return [self.agreed.marker, *found] if is_marked else found

    def row_range(self, *, is_marked: bool) -> RowRange | None:
        """Return the row range of those files; None without rows."""
        parts = [note.row_range for note in self.notes.values() if note.rows]
        if is_marked:
            parts.append(RowRange(1, self.agreed.point, self.agreed.point, self.agreed.at))
        return reduce(RowRange.with_more, parts) if parts else None

    async def commit_files(self, lake: DeltaLake, *, has_rows: bool) -> None:
        """Commit the files. `has_rows`: the lake has older rows of the table.

        Readers use the older rows until the new ones are complete. If the new ones may still lack
        values, the daemon writes the `t` last, and all changes are kept until then.
        """
        is_marked = self.is_one_snapshot or not has_rows
        held = self.row_range(is_marked=is_marked)
        if held is not None:
            files = self.files(is_marked=is_marked)
            watermark = self.agreed.point if is_marked else self.agreed.complete_to
            await lake.append_files(self.table, files, watermark, held)
        self.is_loaded = True

    async def last_event(self, lake: DeltaLake) -> TableEvent:
        """Return the last event for `_tables`: the table is live, or the daemon must finish it."""
        plan = self.agreed
        if self.is_one_snapshot:
            return event_of(self.table, TableState.LIVE, plan.point)
        left = remainder_text(self.table, plan.point, sum(s.nbytes for s in plan.splits), (), ())
        is_marked = plan.marker.path in await lake.files_of(self.table.id)
        return replace(
            event_of(self.table, TableState.SNAPSHOTTING, plan.point),
            progress=RecordedProgress(left, has_marker_last=not is_marked).to_text(),
        )

    async def clear(self, lake: DeltaLake) -> None:
        """Remove the plan, the notes, and all files that were not committed."""
        committed = await lake.files_of(self.table.id)
        await asyncio.to_thread(self.record.discard, committed)

    def filled(self) -> Filled:
        """Return the outcome for the report."""
        rows = sum(note.rows for note in self.notes.values())
        return Filled(self.table.id, rows, self.agreed.point, self.is_one_snapshot)


def write_marker(
    lake: DeltaLake, table: Table, point: Lsn, at: datetime, *, epoch: int
) -> Fragment:
    """Write the file with the table's `t` at (`point`, -1). Blocks."""
    batch = marker_batch(table, point, at)
    writer = FragmentWriter(lake.store, lake.layout.raw(table.id), statistics_columns(table))
    writer.write([pa.Table.from_batches([with_epoch(batch.rows, epoch)])])
    [fragment] = writer.finish()
    return fragment


def event_of(table: Table, state: TableState, point: Lsn) -> TableEvent:
    """Return an event for `_tables`, for a snapshot at `point`."""
    return TableEvent(table, state, utc_now(), point, point)
