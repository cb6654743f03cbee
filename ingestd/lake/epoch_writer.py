"""The writer that fills and commits one epoch (ports.EpochWriter)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from ingestd.lake.parquet_writer import FragmentSink, FragmentWriter
from ingestd.lake.raw_table import RawTable, statistics_columns
from ingestd.lake.threads import gather_fail_fast
from ingestd.model.changes import (
    EPOCH_FIELD,
    CommittedEpoch,
    EpochSummary,
    TableBatch,
    TableInEpoch,
)
from ingestd.model.errors import FolderError, IngestdError, TableError, TransientError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table, TableId
from ingestd.ports import Fragment, StoppedTables

if TYPE_CHECKING:
    from ingestd.lake.delta_lake import DeltaLake

T = TypeVar("T")
_CHECKS = 16
"""Budget checks per budget's worth of rows: with many tables a check takes time."""
_FOOTERS, _MULTIPART = 0.5, 1.5
"""Multiples of the budget that open files may use for their footers, in addition to it; the second
one applies where files are uploaded in parts, and includes those."""


@dataclass(slots=True)
class _FillingTable:
    """A table with rows in the epoch. `schema`: the schema that the raw table must have to hold it.

    `resume`: the `TableBatch.resume` of its newest batch that has one, else None.
    """

    raw: RawTable
    table: Table
    schema: pa.Schema
    sink: FragmentSink
    resume: str | None = None


class DeltaEpochWriter:
    """An epoch of a `DeltaLake`; `previous`: the epoch being committed when this one began."""

    def __init__(
        self, lake: DeltaLake, number: int, previous: DeltaEpochWriter | None = None
    ) -> None:
        self._lake = lake
        self._number = number
        self._previous = previous
        self._entries: dict[TableId, _FillingTable] = {}
        self._taken: dict[TableId, int] = {}
        self._failed: list[TableError] = []
        self._unchecked_bytes = 0
        self._over = asyncio.Event()
        self.is_committing = False
        self.is_committed = False

    @property
    def number(self) -> int:
        """The epoch's number."""
        return self._number

    @property
    def rows(self) -> int:
        """Rows accepted so far, including those that the lake already had."""
        return sum(self._taken.values())

    @property
    def tables(self) -> frozenset[TableId]:
        """The tables that have rows in the epoch."""
        return frozenset(self._entries)

    @property
    def is_over(self) -> bool:
        """Return whether it is committed, failed or aborted."""
        return self._over.is_set()

    async def append_batch(self, batch: TableBatch, *, from_snapshot: bool = False) -> None:
        """Accept rows; count but drop changes below the watermark at `open` (I3)."""
        self._refuse_if_closed()
        table = batch.table.id
        raw = await self._lake.raw_tables.reload_if_damaged(table)
        self._taken[table] = self._taken.get(table, 0) + batch.rows.num_rows
        rows = batch.rows if from_snapshot else _not_below(batch.rows, raw.watermark)
        if rows.num_rows == 0 and batch.resume is None:
            return
        rows = with_epoch(rows, self._number)
        schema = raw.plan_schema_for(rows.schema)
        entry = self._entries.get(table)
        if entry is None:
            entry = self._entries[table] = _FillingTable(
                raw, batch.table, schema, self._fragments(batch, raw)
            )
        entry.table, entry.schema = batch.table, schema
        if batch.resume is not None:
            entry.resume = batch.resume
        try:
            self._unchecked_bytes += entry.sink.add_rows(rows)
        except FolderError as error:
            raise self._lake.raw_tables.set_damaged(table, error) from error
        if self._unchecked_bytes > self._lake.buffer_bytes // _CHECKS:
            self._unchecked_bytes = 0
            await self._spill()
            await self._close_files()
            await self._trim_if_due()

    async def discard(self, table: TableId) -> None:
        """Discard the table's rows of this epoch."""
        self._taken.pop(table, None)
        entry = self._entries.pop(table, None)
        if entry is not None:
            with contextlib.suppress(FolderError):  # files that no log names: VACUUM removes them
                await entry.sink.abort()

    async def commit(
        self, summary: EpochSummary, stop: StoppedTables | None = None
    ) -> CommittedEpoch:
        """Make all tables' rows durable, then the epoch's row in `_epochs` (I1).

        An epoch also has a row if all of its tables failed; that row has no tables and no rows. The
        number can't be skipped: the next epoch already has the following one, and numbers have no
        gaps. Its end may be confirmed: by then `_tables` has the failed tables as stopped (I1), and
        their rows are read again. If a raw table's commit succeeded all the same,
        its watermark is at or above that end, so no row is appended twice (I3).
        """
        self._refuse_if_closed()
        if self.rows == 0 and not self._lake.raw_tables.unlisted:
            msg = "an epoch without rows is not committed: use Sink.advance"
            raise ValueError(msg)
        self.is_committing = True
        try:
            fragments = await self._finish_or_remove()
            await self._wait_for_previous()
            await self._lake.ensure_unreplaced()
            tables = await self._commit_tables(fragments, summary)
            if self._failed:
                await _refuse_or_stop(self._failed, stop)
            committed = await self._lake.close_epoch(
                CommittedEpoch(self._number, summary, self._lake.now(), tables)
            )
            self.is_committed = True
        finally:
            self._over.set()
        return committed

    async def abort(self) -> None:
        """Drop the epoch and its files, unless their commits have begun."""
        if self.is_committing or self.is_over:
            return
        self._over.set()
        tables, self._entries = list(self._entries.values()), {}
        self._taken = {}
        await _abort(tables)

    # --- filling ----------------------------------------------------------------------------

    def _refuse_if_closed(self) -> None:
        if self.is_committing or self.is_over:
            msg = f"epoch {self._number} is closed"
            raise RuntimeError(msg)

    def _fragments(self, batch: TableBatch, raw: RawTable) -> FragmentSink:
        columns = statistics_columns(batch.table)
        # A missing folder of an existing table is a fault, which a new folder would hide.
        writer = FragmentWriter(
            self._lake.store, raw.log.folder, columns, makes_folder=not raw.log.exists
        )
        return FragmentSink(writer, jobs=self._lake.file_jobs)

    async def _spill(self) -> None:
        """Write the largest tables' rows until half of the budget is free."""
        if self._waiting_bytes() <= self._lake.buffer_bytes:
            return
        while self._own_waiting_bytes() and self._waiting_bytes() > self._lake.buffer_bytes // 2:
            largest = max(self._entries.values(), key=lambda entry: entry.sink.waiting_bytes)
            await self._lake.raw_tables.of_table(largest.raw.id, largest.sink.spill())
            await self._trim_if_due()
        await self._trim()

    async def _trim_if_due(self) -> None:
        if self._lake.trimming.is_due():
            await self._trim()

    async def _trim(self) -> None:
        await asyncio.to_thread(self._lake.trimming.trim)  # not queued behind the commits

    async def _close_files(self) -> None:
        """Close the largest files if all together keep more than the limit, down to half of it.

        A transaction over many tables is written in small row groups, whose footers take more than
        their rows; and an object store accepts no small parts.
        """
        part_bytes = self._lake.store.part_bytes
        share = _MULTIPART if part_bytes else _FOOTERS
        limit_bytes = max(share * self._lake.buffer_bytes, 2 * part_bytes)
        kept_bytes = sum(entry.sink.open_bytes for entry in self._entries.values())
        if kept_bytes <= limit_bytes:
            return
        closing = []
        for entry in sorted(self._entries.values(), key=lambda entry: -entry.sink.open_bytes):
            if kept_bytes <= limit_bytes / 2:
                break
            kept_bytes -= entry.sink.open_bytes
            closing.append(self._lake.raw_tables.of_table(entry.raw.id, entry.sink.close_file()))
        await gather_fail_fast(closing)

    def _waiting_bytes(self) -> int:
        """Return the buffered bytes of this epoch and of the one being committed."""
        previous = self._previous
        before = 0 if previous is None or previous.is_over else previous._own_waiting_bytes()  # noqa: SLF001
        return before + self._own_waiting_bytes()

    def _own_waiting_bytes(self) -> int:
        return sum(entry.sink.waiting_bytes for entry in self._entries.values())

    # --- committing -------------------------------------------------------------------------

    async def _finish(self) -> list[tuple[_FillingTable, Sequence[Fragment]]]:
        tables = list(self._entries.values())
        finished = await gather_fail_fast(self._unless_failed(e, e.sink.finish()) for e in tables)
        found = zip(tables, finished, strict=True)
        return [(entry, files) for entry, files in found if files is not None]

    async def _unless_failed(
        self, entry: _FillingTable, work: Awaitable[T], *, commits: bool = False
    ) -> T | None:
        """Await the work; on a table's fault return None and record that the table must stop.

        `commits`: the files stay, as a commit that failed here may still arrive in the store.
        """
        try:
            return await self._lake.raw_tables.of_table(entry.raw.id, work)
        except TableError as error:
            self._failed.append(error)
            self._entries.pop(entry.raw.id, None)
            self._taken.pop(entry.raw.id, None)
            if not commits:
                with contextlib.suppress(IngestdError):  # report the first fault
                    await entry.sink.abort()
            return None

    async def _finish_or_remove(self) -> list[tuple[_FillingTable, Sequence[Fragment]]]:
        """Finish the fragments; if that fails (a full disk) remove them all."""
        try:
            return await self._finish()
        except IngestdError:
            with contextlib.suppress(IngestdError):  # report the first fault
                await _abort(self._entries.values())
            raise

    async def _wait_for_previous(self) -> None:
        previous, self._previous = self._previous, None
        if previous is None:
            return
        await previous._over.wait()  # noqa: SLF001 - the same class
        if not previous.is_committed:
            raise TransientError(
                f"epoch {self._number} can't be committed: the previous epoch failed",
                reason="storage",
            )

    async def _commit_tables(
        self, fragments: Sequence[tuple[_FillingTable, Sequence[Fragment]]], summary: EpochSummary
    ) -> tuple[TableInEpoch, ...]:
        await self._make_tables()
        tables = await gather_fail_fast(
            self._unless_failed(
                entry,
                self._lake.jobs.run(self._commit_table, entry, files, summary.end_lsn),
                commits=True,
            )
            for entry, files in fragments
            if entry.raw.id in self._entries
        )
        # A table that only records where its capture resumes has not changed.
        return tuple(table for table in tables if table is not None and table.rows)

    async def _make_tables(self) -> None:
        """Create the missing raw tables, without rows.

        A missing table can't be fenced. A writer that fences `_epochs` after this finds and fences
        the new tables; if it did so before, they stay empty (I5).
        """
        new = [entry for entry in self._entries.values() if not entry.raw.log.exists]
        if new:
            await gather_fail_fast(
                self._unless_failed(
                    entry, self._lake.jobs.run(entry.raw.make, entry.table, entry.schema)
                )
                for entry in new
            )
            await self._lake.ensure_not_fenced()

    def _commit_table(
        self, entry: _FillingTable, fragments: Sequence[Fragment], end_lsn: Lsn
    ) -> TableInEpoch:
        self._lake.before_commit(str(entry.raw.id))
        version = entry.raw.commit(entry.table, entry.schema, fragments, end_lsn, entry.resume)
        return TableInEpoch(entry.raw.id, version, entry.sink.rows)


async def _refuse_or_stop(errors: Sequence[TableError], stop: StoppedTables | None) -> None:
    if stop is None:
        raise errors[0]
    await stop(errors)


async def _abort(tables: Iterable[_FillingTable]) -> None:
    """Remove the files of these tables; at the end raise the first fault, if any."""
    fault: IngestdError | None = None
    for entry in tables:
        try:
            await entry.sink.abort()
        except IngestdError as error:
            fault = fault or error
    if fault is not None:
        raise fault


def _not_below(rows: pa.RecordBatch, watermark: Lsn | None) -> pa.RecordBatch:
    """Return the rows that the raw table does not hold yet: those at the watermark or above it.

    A transaction may begin where the last one ended, so a row at the watermark is new.
    """
    if watermark is None or rows.num_rows == 0:
        return rows
    above = rows.column("_cdc_lsn").to_numpy() >= int(watermark)
    return rows if above.all() else rows.filter(pa.array(above))


def with_epoch(rows: pa.RecordBatch, epoch: int) -> pa.RecordBatch:
    """Add `_cdc_epoch` at its place in the raw schema."""
    after = rows.schema.get_field_index("_cdc_ts")
    values = pa.repeat(pa.scalar(epoch, pa.int64()), rows.num_rows)
    return rows.add_column(after + 1, EPOCH_FIELD, values)
