"""The driver of a backfill: the order of its steps, and the state that survives a kill.

    claimed -> prepared -> planned -> read -> loaded -> positioned -> listed
      -> handed over -> cleared

docs/backfill.md lists what is durable in each state. It also explains why the daemon continues
without a missing or duplicate row, whatever the state in which the backfill ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ingestd.lake.delta_lake import DeltaLake
from ingestd.model.changes import EpochSummary
from ingestd.model.errors import IngestdError, OperatorError, TableError, TransientError
from ingestd.model.lake_state import LakeState, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.recorded import RecordError
from ingestd.model.recorded_progress import RecordedProgress
from ingestd.model.schema import TableId
from ingestd.pipeline.known_lake import lake_lost, read_lake
from ingestd.pipeline.table_set import TableSet
from ingestd.ports import (
    ChangeCapture,
    Connector,
    Continuity,
    Discovery,
    Fresh,
    LakeLost,
    Lost,
)
from ingestd.postgres.snapshot.resume import SnapshotRemainder
from spark_jobs.backfills.reading import BackfillPolicy, BackfillReading, SplitRunner
from spark_jobs.backfills.record import Record
from spark_jobs.backfills.table import Filled, TableBackfill
from spark_jobs.backfills.task import BackfillReader


@dataclass(frozen=True, slots=True)
class BackfillOutcome:
    """The outcome for the requested tables.

    `present`: tables that needed no work. `is_listed`: `_epochs` lists the filled tables.
    """

    filled: tuple[Filled, ...]
    present: tuple[TableId, ...]
    failed: tuple[IngestdError, ...]
    is_listed: bool


class Backfill:
    """Backfills tables of one source, once.

    `print_line` receives lines; `reached` is called with a state's name once it is durable.
    """

    def __init__(
        self,
        connector: Connector,
        lake: DeltaLake,
        reader: BackfillReader,
        runner: SplitRunner,
        policy: BackfillPolicy,
        *,
        print_line: Callable[[str], None] = lambda _: None,
        reached: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._source = reader.source
        self._where = f"source {reader.source}"
        self._connector = connector
        self._lake = lake
        self._policy = policy
        self._reached = reached
        self._reading = BackfillReading(
            connector, lake, reader, runner, policy, print_line=print_line, reached=reached
        )

    async def run(self, names: Sequence[TableId]) -> BackfillOutcome:
        """Read these tables into the lake.

        Raises OperatorError for a table that is not captured, a lost slot, or a source on which a
        daemon runs; and TransientError.
        """
        capture = self._connector.capture()
        try:
            return await self._run(capture, list(dict.fromkeys(names)))
        finally:
            await self._lake.close()
            await capture.close()

    async def _run(self, capture: ChangeCapture, names: Sequence[TableId]) -> BackfillOutcome:
        await self._claim(capture)
        committed, continuity = await read_lake(self._lake, capture)
        self._refuse_lost_lake(continuity)
        await self._lake.write_lake_id()
        await self._lake.fence()
        first = await capture.discover(committed.tables)
        continuity = await capture.continuity(committed)
        self._refuse_lost_lake(continuity)
        if isinstance(continuity, Lost):
            remedy = "start `ingestd run`, which records it and makes a new slot; then stop it, "
            raise OperatorError(
                f"{self._where}: changes may be lost: {continuity.reason}",
                remedy=continuity.remedy or f"{remedy}and run this again",
            )
        wanted = self._wanted(names, committed, first)
        present = [name for name in names if name not in wanted]
        self._reached("claimed")
        tables: list[TableBackfill] = []
        failed: list[IngestdError] = []
        is_listed = False
        for name in present:
            await self._clear_leftovers(name)
        if wanted:
            await self._lake.adopt(first.server_id)
            read_to = await self._read_to(wanted, committed)
            prepared = await capture.prepare(first.tables, read_to=read_to)
            self._reached("prepared")
            discovery = await capture.discover(committed.tables)  # as the publication has it now
            tables, failed = self._begin(wanted, committed, discovery, prepared.locked)
            await self._reading.take_up(capture, committed, (first, discovery), tables)
            await self._reading.read(capture, committed, discovery.server_id, tables)
            failed += [table.error for table in tables if table.error is not None]
            tables = [table for table in tables if table.error is None]
            await self._load(capture, committed, tables)
            if isinstance(continuity, Fresh) and tables:
                is_listed = await self._position(committed, tables, is_all=not failed)
            await self._hand_over(tables)
        filled = tuple(table.filled() for table in tables)
        return BackfillOutcome(filled, tuple(present), tuple(failed), is_listed)

    def _refuse_lost_lake(self, continuity: Continuity) -> None:
        if isinstance(continuity, LakeLost):
            raise lake_lost(self._source, continuity.reason)

    async def _claim(self, capture: ChangeCapture) -> None:
        try:
            await capture.claim()
        except TransientError as error:
            if error.reason != "claimed":
                raise
            raise OperatorError(
                f"{self._where}: a daemon or another backfill is running on it",
                remedy="stop it, run this, then start it again; or let the daemon read the table"
                " while it runs: `ingestd snapshot`",
            ) from error

    # --- which tables ------------------------------------------------------------------------

    def _wanted(
        self, names: Sequence[TableId], committed: LakeState, discovery: Discovery
    ) -> list[TableId]:
        """Return the tables to read. Raises OperatorError for one that is not captured."""
        book = TableSet(committed, self._policy.resnapshot_rewritten)
        book.update(discovery)
        unread = {table.id for table in book.to_read()}
        book.request(names)
        if self._policy.again:
            return list(names)
        return [n for n in names if n in unread and not _is_handed_over(committed, n)]

    async def _read_to(self, names: Sequence[TableId], committed: LakeState) -> Lsn | None:
        """Return the greatest point of earlier runs on tables not yet live; None without one."""
        begun = {n for n, t in committed.tables.items() if t.state is TableState.SNAPSHOTTING}
        records = [
            Record(self._lake.store, self._lake.layout.raw(name)) for name in begun.union(names)
        ]
        plans = [await asyncio.to_thread(record.last_plan) for record in records]
        return max((plan.point for plan in plans if plan is not None), default=None)

    async def _clear_leftovers(self, name: TableId) -> None:
        """Remove plan and notes of a complete table: a killed run may have left them behind."""
        record = Record(self._lake.store, self._lake.layout.raw(name))
        await asyncio.to_thread(record.discard, await self._lake.files_of(name))

    def _begin(
        self,
        names: Sequence[TableId],
        committed: LakeState,
        discovery: Discovery,
        busy: Collection[TableId],
    ) -> tuple[list[TableBackfill], list[IngestdError]]:
        offered = {table.id: table for table in discovery.tables}
        tables: list[TableBackfill] = []
        failed: list[IngestdError] = []
        for name in names:
            try:
                if name in committed.damaged:
                    raise committed.damaged[name]
                if name in busy:
                    raise _passing(name, "is locked: it can't be published", "lock_timeout")
                if name not in offered:
                    raise _passing(name, "changed a moment ago", "table_gone")
                tables.append(TableBackfill.for_table(offered[name], self._lake))
            except (TransientError, TableError) as error:
                failed.append(error)
        return tables, failed

    # --- committing --------------------------------------------------------------------------

    async def _load(
        self, capture: ChangeCapture, committed: LakeState, tables: Sequence[TableBackfill]
    ) -> None:
        for table in tables:
            if not table.is_loaded:
                await asyncio.to_thread(self._ensure_seen, table)
        if tables:
            await capture.health()  # the claim still holds: no other process commits
        for table in tables:
            if not table.is_loaded:
                has_rows = table.table.id in committed.watermarks
                await table.commit_files(self._lake, has_rows=has_rows)
            self._reached(f"loaded {table.table.id}")

    def _ensure_seen(self, table: TableBackfill) -> None:
        """Check that the driver sees the files that executors wrote. Blocks."""
        if len(table.record.with_files(table.notes)) < len(table.notes):
            folder = self._lake.store.uri(table.record.table_folder)
            raise OperatorError(
                f"table {table.table.id}: files that executors wrote are not in {folder} as the"
                " driver sees it",
                remedy="`lake.uri` must be a folder that all hosts share, or an object store",
            )

    async def _position(
        self, committed: LakeState, tables: Sequence[TableBackfill], *, is_all: bool
    ) -> bool:
        """In a lake without live tables, record the position and list the loaded rows as an epoch.

        If not `is_all`, list nothing: a failed table may be resumed, and its rows must be of the
        same epoch.
        """
        points = {table.agreed.point for table in tables}
        await self._lake.advance(min(points))
        self._reached("positioned")
        plan = tables[0].agreed
        if committed.epoch > plan.epoch:  # a run before this one has listed it
            return True
        if len(points) > 1 or not is_all or not all(table.is_one_snapshot for table in tables):
            return False
        nbytes = sum(table.nbytes for table in tables)
        await self._lake.close_loaded(
            EpochSummary(plan.point, plan.point, plan.at, transactions=0, nbytes=nbytes)
        )
        self._reached("listed")
        return True

    async def _hand_over(self, tables: Sequence[TableBackfill]) -> None:
        await self._lake.record([await table.last_event(self._lake) for table in tables])
        self._reached("handed over")
        for table in tables:
            await table.clear(self._lake)
        self._reached("cleared")


def _is_handed_over(committed: LakeState, name: TableId) -> bool:
    """Return whether all rows are read, so that only the daemon has to finish the table."""
    known = committed.tables.get(name)
    if known is None or known.state is not TableState.SNAPSHOTTING:
        return False
    try:
        return not SnapshotRemainder.parse(RecordedProgress.parse(known.progress).remainder).left
    except RecordError:
        return False


def _passing(name: TableId, what: str, reason: str) -> TransientError:
    return TransientError(f"table {name} {what}", reason=reason, remedy="run this again")
