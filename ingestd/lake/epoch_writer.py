"""One epoch being filled and committed (ports.EpochWriter)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar

import pyarrow as pa

from ingestd.lake.parquet_writer import FragmentSink, FragmentWriter
from ingestd.lake.raw_table import RawTable, statistics_columns
from ingestd.lake.store.store import Store
from ingestd.lake.threads import WorkerThreads, together
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
from ingestd.process.memory import Trimming

T = TypeVar("T")
_CHECKS = 16
"""How often the budget is looked at while as much as it comes: with many tables that takes time."""
_FOOTERS, _PARTS = 0.5, 1.5
"""So many times the budget, on top of it, is what open files may keep for their footers; and where
they are sent in parts, for those too."""


class EpochHost(Protocol):
    """What an epoch needs of its lake."""

    store: Store
    jobs: WorkerThreads
    file_jobs: WorkerThreads
    buffer_bytes: int
    trimming: Trimming
    now: Callable[[], datetime]
    before_commit: Callable[[str], None]

    @property
    def has_unlisted(self) -> bool:
        """Whether there are rows beyond the last epoch, which the next one has to list."""
        ...

    async def usable(self, table: TableId) -> RawTable:
        """Return the raw table."""
        ...

    async def ensure_unreplaced(self) -> None:
        """Raise LakeLostError if the lake is not the one that was read or written last."""
        ...

    async def vouch(self) -> None:
        """Commit to `_epochs` without a row: it fails if another process has taken over."""
        ...

    def set_damaged(self, table: TableId, fault: FolderError) -> TableError:
        """Return the fault as the table's; before it is used again, it is read again."""
        ...

    async def close_epoch(self, epoch: CommittedEpoch) -> CommittedEpoch:
        """Append the epoch's row."""
        ...


@dataclass(slots=True)
class _TablePart:
    """A table's part of the epoch. `schema`: what the raw table must have to take it.

    `resume`: the newest of its batches, None if none has one.
    """

    raw: RawTable
    table: Table
    schema: pa.Schema
    sink: FragmentSink
    resume: str | None = None


class DeltaEpochWriter:
    """An epoch of a `DeltaLake`; `previous` is the one being committed when this began, if any."""

    def __init__(
        self, lake: EpochHost, number: int, previous: DeltaEpochWriter | None = None
    ) -> None:
        self._lake = lake
        self._number = number
        self._previous = previous
        self._parts: dict[TableId, _TablePart] = {}
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
        """Rows taken so far, including those the lake had already."""
        return sum(self._taken.values())

    @property
    def is_over(self) -> bool:
        """Whether it is committed, failed or aborted."""
        return self._over.is_set()

    async def append(self, batch: TableBatch, *, is_read: bool = False) -> None:
        """Take rows; count and drop changes below the watermark at `open` (I3)."""
        self._refuse_if_closed()
        table = batch.table.id
        raw = await self._lake.usable(table)
        self._taken[table] = self._taken.get(table, 0) + batch.rows.num_rows
        rows = batch.rows if is_read else _above(batch.rows, raw.watermark)
        if rows.num_rows == 0 and batch.resume is None:
            return
        rows = with_epoch(rows, self._number)
        schema = raw.admit(rows.schema)
        part = self._parts.get(table)
        if part is None:
            part = self._parts[table] = _TablePart(
                raw, batch.table, schema, self._fragments(batch, raw)
            )
        part.table, part.schema = batch.table, schema
        if batch.resume is not None:
            part.resume = batch.resume
        try:
            self._unchecked_bytes += part.sink.add(rows)
        except FolderError as error:
            raise self._lake.set_damaged(table, error) from error
        if self._unchecked_bytes > self._lake.buffer_bytes // _CHECKS:
            self._unchecked_bytes = 0
            await self._spill()
            await self._close_files()
            await self._trim_if_due()

    async def discard(self, table: TableId) -> None:
        """Forget the table's rows of this epoch."""
        self._taken.pop(table, None)
        part = self._parts.pop(table, None)
        if part is not None:
            with contextlib.suppress(FolderError):  # files that no log names: VACUUM removes them
                await part.sink.abort()

    async def commit(
        self, summary: EpochSummary, stop: StoppedTables | None = None
    ) -> CommittedEpoch:
        """Make all tables' rows durable, then the epoch's row in `_epochs` (I1).

        An epoch all of whose tables failed has a row too, without tables and rows. Its number can't
        be left out, as the next epoch is filled with the one after it, and numbers have no gaps;
        its end can be confirmed, as the tables are recorded as stopped before (I1), and what they
        miss is read again. A raw table whose commit went through all the same is at or above that
        end, and takes nothing of it twice (I3).
        """
        self._refuse_if_closed()
        if self.rows == 0 and not self._lake.has_unlisted:
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
        parts, self._parts = list(self._parts.values()), {}
        self._taken = {}
        await _abort(parts)

    # --- filling ----------------------------------------------------------------------------

    def _refuse_if_closed(self) -> None:
        if self.is_committing or self.is_over:
            msg = f"epoch {self._number} is closed"
            raise RuntimeError(msg)

    def _fragments(self, batch: TableBatch, raw: RawTable) -> FragmentSink:
        columns = statistics_columns(batch.table)
        # A folder that was there and is gone is a fault, which a new one would hide.
        writer = FragmentWriter(
            self._lake.store, raw.log.folder, columns, makes_folder=not raw.log.exists
        )
        return FragmentSink(writer, jobs=self._lake.file_jobs)

    async def _spill(self) -> None:
        """Write the largest tables' rows until half of the budget is free."""
        if self._waiting_bytes() <= self._lake.buffer_bytes:
            return
        while self._own_waiting_bytes() and self._waiting_bytes() > self._lake.buffer_bytes // 2:
            largest = max(self._parts.values(), key=lambda part: part.sink.waiting_bytes)
            await self._of_table(largest, largest.sink.spill())
            await self._trim_if_due()
        await self._trim()

    async def _trim_if_due(self) -> None:
        if self._lake.trimming.is_due():
            await self._trim()

    async def _trim(self) -> None:
        await asyncio.to_thread(self._lake.trimming.trim)  # not behind what is being committed

    async def _close_files(self) -> None:
        """Close the largest files, to half of what they may keep, where all together keep more.

        A transaction over many tables is written in small row groups, whose footers take more than
        their rows; and an object store takes no part that is small.
        """
        part_bytes = self._lake.store.part_bytes
        share = _PARTS if part_bytes else _FOOTERS
        limit_bytes = max(share * self._lake.buffer_bytes, 2 * part_bytes)
        kept_bytes = sum(part.sink.open_bytes for part in self._parts.values())
        if kept_bytes <= limit_bytes:
            return
        closing = []
        for part in sorted(self._parts.values(), key=lambda part: -part.sink.open_bytes):
            if kept_bytes <= limit_bytes / 2:
                break
            kept_bytes -= part.sink.open_bytes
            closing.append(self._of_table(part, part.sink.close_file()))
        await together(closing)

    def _waiting_bytes(self) -> int:
        """Of this epoch and of the one that is being committed."""
        previous = self._previous
        before = 0 if previous is None or previous.is_over else previous._own_waiting_bytes()  # noqa: SLF001
        return before + self._own_waiting_bytes()

    def _own_waiting_bytes(self) -> int:
        return sum(part.sink.waiting_bytes for part in self._parts.values())

    # --- committing -------------------------------------------------------------------------

    async def _finish(self) -> list[tuple[_TablePart, Sequence[Fragment]]]:
        parts = list(self._parts.values())
        finished = await together(self._unless_failed(p, p.sink.finish()) for p in parts)
        found = zip(parts, finished, strict=True)
        return [(part, files) for part, files in found if files is not None]

    async def _of_table(self, part: _TablePart, work: Awaitable[T]) -> T:
        """Do it; a fault at the table's folder is raised as the table's (I8)."""
        try:
            return await work
        except FolderError as error:
            raise self._lake.set_damaged(part.raw.id, error) from error

    async def _unless_failed(self, part: _TablePart, work: Awaitable[T]) -> T | None:
        """Do it; None, and the table must be stopped, if it fails at the table's folder."""
        try:
            return await self._of_table(part, work)
        except TableError as error:
            self._failed.append(error)
            self._parts.pop(part.raw.id, None)
            self._taken.pop(part.raw.id, None)
            with contextlib.suppress(IngestdError):  # the first one is why
                await part.sink.abort()
            return None

    async def _finish_or_remove(self) -> list[tuple[_TablePart, Sequence[Fragment]]]:
        """Finish the fragments; if that fails (a full disk) leave none behind."""
        try:
            return await self._finish()
        except IngestdError:
            with contextlib.suppress(IngestdError):  # the first one is why
                await _abort(self._parts.values())
            raise

    async def _wait_for_previous(self) -> None:
        previous, self._previous = self._previous, None
        if previous is None:
            return
        await previous._over.wait()  # noqa: SLF001 - one of its own kind
        if not previous.is_committed:
            raise TransientError(
                f"epoch {self._number} can't be committed: the one before failed",
                reason="storage",
            )

    async def _commit_tables(
        self, fragments: Sequence[tuple[_TablePart, Sequence[Fragment]]], summary: EpochSummary
    ) -> tuple[TableInEpoch, ...]:
        await self._make_tables()
        tables = await together(
            self._unless_failed(
                part, self._lake.jobs.run(self._commit_table, part, files, summary.end_lsn)
            )
            for part, files in fragments
            if part.raw.id in self._parts
        )
        # One that only says where its capture goes on has not changed.
        return tuple(table for table in tables if table is not None and table.rows)

    async def _make_tables(self) -> None:
        """Make the raw tables that are not there, without rows.

        What is not there can't be fenced. Whoever fences `_epochs` after this finds and fences
        them; if it was before this, they stay as they are (I5).
        """
        new = [part for part in self._parts.values() if not part.raw.log.exists]
        if new:
            await together(
                self._unless_failed(
                    part, self._lake.jobs.run(part.raw.make, part.table, part.schema)
                )
                for part in new
            )
            await self._lake.vouch()

    def _commit_table(
        self, part: _TablePart, fragments: Sequence[Fragment], end_lsn: Lsn
    ) -> TableInEpoch:
        self._lake.before_commit(str(part.raw.id))
        version = part.raw.commit(part.table, part.schema, fragments, end_lsn, part.resume)
        return TableInEpoch(part.raw.id, version, part.sink.rows)


async def _refuse_or_stop(errors: Sequence[TableError], stop: StoppedTables | None) -> None:
    if stop is None:
        raise errors[0]
    await stop(errors)


async def _abort(parts: Iterable[_TablePart]) -> None:
    """Remove what all of them wrote; if that fails for some, raise the first fault at the end."""
    fault: IngestdError | None = None
    for part in parts:
        try:
            await part.sink.abort()
        except IngestdError as error:
            fault = fault or error
    if fault is not None:
        raise fault


def _above(rows: pa.RecordBatch, watermark: Lsn | None) -> pa.RecordBatch:
    """Leave out the rows that the raw table holds already."""
    if watermark is None or rows.num_rows == 0:
        return rows
    above = rows.column("_cdc_lsn").to_numpy() >= int(watermark)
    return rows if above.all() else rows.filter(pa.array(above))


def with_epoch(rows: pa.RecordBatch, epoch: int) -> pa.RecordBatch:
    """Put `_cdc_epoch` where the raw schema has it."""
    after = rows.schema.get_field_index("_cdc_ts")
    values = pa.repeat(pa.scalar(epoch, pa.int64()), rows.num_rows)
    return rows.add_column(after + 1, EPOCH_FIELD, values)
