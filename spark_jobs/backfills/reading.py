"""Reads the tables of a backfill.

Each table's plan is new, or that of an earlier run if it is still valid (`take_up`). Splits that
the earlier run finished are not read again (`_orders`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ingestd.lake.delta_lake import DeltaLake
from ingestd.model.errors import TableError
from ingestd.model.lake_state import LakeState, TableState
from ingestd.model.schema import Table, TableId
from ingestd.ports import ChangeCapture, Connector, Discovery, Split
from ingestd.postgres.wal.slot_snapshot import SlotSnapshot
from spark_jobs.backfills.record import Note, Plan, PlannedSplit, definition_of, run_name
from spark_jobs.backfills.table import TableBackfill, event_of, write_marker
from spark_jobs.backfills.task import BackfillReader, Failure, SplitOrder
from spark_jobs.backfills.validity import BackfillStanding, are_there, why_void

LOOK_EVERY_S = 5.0
"""Interval at which the claim is checked while splits are read."""


MOST_SPLITS = 10_000
"""Per table. Each split is at least one file in one Delta commit."""


class SplitRunner(Protocol):
    """Runs read tasks, such as on Spark."""

    def run(self, reader: BackfillReader, orders: Sequence[SplitOrder]) -> list[Note | Failure]:
        """Return the outcome of each order, in the order given. Blocks.

        Raises IngestdError if tasks can't run.
        """
        ...

    def cancel(self) -> None:
        """Make `run` return soon. May be called from any thread at any time."""
        ...


@dataclass(frozen=True, slots=True)
class BackfillPolicy:
    """`resumes`: earlier runs may be resumed. `again`: live tables are re-read, too."""

    split_bytes: int
    resumes: bool = True
    again: bool = False
    resnapshot_rewritten: bool = True


class BackfillReading:
    """The reading part of a run: call `take_up`, then `read`."""

    def __init__(
        self,
        connector: Connector,
        lake: DeltaLake,
        reader: BackfillReader,
        runner: SplitRunner,
        policy: BackfillPolicy,
        *,
        print_line: Callable[[str], None],
        reached: Callable[[str], None],
    ) -> None:
        self._connector = connector
        self._lake = lake
        self._reader = reader
        self._runner = runner
        self._policy = policy
        self._print_line = print_line
        self._reached = reached

    # --- resuming an earlier run -------------------------------------------------------------

    async def take_up(
        self,
        capture: ChangeCapture,
        committed: LakeState,
        discoveries: Sequence[Discovery],
        tables: Sequence[TableBackfill],
    ) -> None:
        """Take over plans that are still valid; remove what the others left."""
        able = await capture.choose_incremental([t.table for t in tables], initial=False)
        confirmed = (await capture.lag()).confirmed_lsn
        for table in tables:
            plan = await asyncio.to_thread(table.record.last_plan)
            files = await self._lake.files_of(table.table.id)
            notes = {} if plan is None else await asyncio.to_thread(table.record.notes, plan)
            if plan is None or not notes:
                await table.clear(self._lake)
                continue
            paths = {plan.marker.path, *(f.path for n in notes.values() for f in n.fragments)}
            is_loaded = bool(paths & files)
            if not is_loaded:
                notes = await asyncio.to_thread(table.record.with_files, notes)
            standing = BackfillStanding(
                table=table.table.id,
                committed=committed,
                origin=discoveries[-1].server_id,
                changed=_changed(table.table.id, discoveries),
                definition=definition_of(table.table),
                confirmed=confirmed,
                is_loaded=is_loaded,
                is_complete=len(notes) == len(plan.splits),
                is_at_one_point=all(note.point == plan.point for note in notes.values()),
                is_resumable=self._policy.resumes and table.table.id in able,
            )
            why = why_void(plan, standing)
            if why is not None:
                self._print_line(f"{table.table.id}: starts over: {why}")
                await table.clear(self._lake)
                continue
            table.plan, table.notes, table.is_loaded = plan, notes, is_loaded
            self._print_line(
                f"{table.table.id}: {len(notes)} of {len(plan.splits)} splits are done"
            )

    # --- reading -----------------------------------------------------------------------------

    async def read(
        self,
        capture: ChangeCapture,
        committed: LakeState,
        origin: str,
        tables: Sequence[TableBackfill],
    ) -> None:
        """Read the remaining splits of these tables, under a new snapshot.

        A table's own fault is stored in `error` of that table. Raises an error that concerns all.
        """
        reading = [table for table in tables if not table.is_read]
        if not reading:
            return
        snapshot = await capture.snapshot([t.table for t in reading])
        try:
            assert isinstance(snapshot, SlotSnapshot)
            orders: list[tuple[TableBackfill, SplitOrder]] = []
            for table in reading:
                try:
                    await self._plan(committed, origin, snapshot, table)
                except TableError as error:
                    table.error = error
                else:
                    orders += [(table, order) for order in _orders(snapshot, table)]
            self._reached("planned")
            await self._run_orders(capture, orders)
        finally:
            await snapshot.close()
        self._reached("read")

    async def _plan(
        self,
        committed: LakeState,
        origin: str,
        snapshot: SlotSnapshot,
        table: TableBackfill,
    ) -> None:
        """Make a durable plan of the splits to read under this snapshot."""
        source, name = table.table, table.table.id
        splits = await self._cut(source, snapshot.exported)
        if table.plan is not None:
            if are_there([s.where for s in table.unread], [s.where for s in splits]):
                table.plan = table.plan.continued(list(table.notes.values()))
                await asyncio.to_thread(table.record.write_plan, table.plan)
                return
            self._print_line(f"{name}: starts over: its rows are in other files now")
            await table.clear(self._lake)
            table.plan, table.notes = None, {}
        if not committed.is_live(name):
            await self._lake.record([event_of(source, TableState.SNAPSHOTTING, snapshot.point)])
        point, at, epoch = snapshot.point, snapshot.at, committed.epoch
        marker = await asyncio.to_thread(
            write_marker, self._lake, source, point, at, epoch=epoch + 1
        )
        table.plan = Plan(
            run=run_name(1),
            definition=definition_of(source),
            origin=origin,
            epoch=epoch,
            position=committed.position,
            watermark=committed.watermarks.get(name),
            point=point,
            at=at,
            marker=marker,
            splits=tuple(PlannedSplit(s.where, s.estimated_bytes) for s in splits),
        )
        await asyncio.to_thread(table.record.write_plan, table.plan)

    async def _cut(self, table: Table, snapshot: str) -> Sequence[Split]:
        manager = self._connector.splits()
        splits = await manager.splits(table, snapshot, self._policy.split_bytes)
        if len(splits) <= MOST_SPLITS:
            return splits
        larger = sum(split.estimated_bytes for split in splits) // MOST_SPLITS
        return await manager.splits(table, snapshot, max(larger, self._policy.split_bytes))

    async def _run_orders(
        self, capture: ChangeCapture, orders: Sequence[tuple[TableBackfill, SplitOrder]]
    ) -> None:
        if not orders:
            return
        self._print_line(f"reading {len(orders)} splits")
        work = partial(self._runner.run, self._reader, [order for _, order in orders])
        running = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            while not running.done():
                await asyncio.wait([running], timeout=LOOK_EVERY_S)
                await capture.health()
        except BaseException:
            self._runner.cancel()
            await asyncio.gather(running, return_exceptions=True)
            raise
        for (table, order), outcome in zip(orders, running.result(), strict=True):
            if isinstance(outcome, Note):
                table.notes[order.number] = outcome
            elif table.error is None:
                table.error = outcome.error()


def _orders(snapshot: SlotSnapshot, table: TableBackfill) -> list[SplitOrder]:
    """Return orders for the splits of a table that are not read yet."""
    plan = table.agreed
    return [
        SplitOrder(
            split=Split(table.table, snapshot.exported, split.where, split.nbytes),
            number=number,
            point=snapshot.point,
            at=snapshot.at,
            epoch=plan.epoch + 1,
            folder=table.record.table_folder,
            run_folder=table.record.run_folder(plan.run),
        )
        for number, split in enumerate(plan.splits)
        if number not in table.notes
    ]


def _changed(name: TableId, discoveries: Sequence[Discovery]) -> str | None:
    """Return why a table's rows that were read are void, as discoveries report; None if valid."""
    for found in discoveries:
        if name in found.rewritten:
            return found.rewritten[name]
        if name in found.interrupted:
            return found.interrupted[name]
    return None
