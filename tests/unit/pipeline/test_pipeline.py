from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ingestd.lake.delta_lake import DeltaLake
from ingestd.model.changes import ChangeSet
from ingestd.model.errors import OperatorError, TableError, TableReplacedError, TransientError
from ingestd.model.lake_state import LakeState, RegisteredTable, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Column, Table, TableId, with_before
from ingestd.observe.status import SourceState
from ingestd.pipeline.filling_epoch import EpochPolicy
from ingestd.pipeline.pipeline import Pipeline
from ingestd.pipeline.policy import PipelinePolicy
from ingestd.pipeline.startup import without_position
from ingestd.ports import Continuity, Discovery, Lost, Refused, Snapshot, SnapshotItem
from ingestd.testing.fakes.capture import FakeCapture, FakeChange, FakeDatabase
from ingestd.testing.fakes.sink import MemoryDisk, MemoryEpochWriter, MemoryLake
from ingestd.testing.fakes.snapshot import FakeSnapshot
from ingestd.testing.running import telemetry_of
from tests.unit.pipeline.fixtures import (
    LIMIT_S,
    A,
    B,
    C,
    lake_rows,
    policy,
    put,
    running,
    source_rows,
    until,
    watch,
)


def durable(disk: MemoryDisk) -> Lsn:
    return disk.position or Lsn(0)


def settled(base: FakeDatabase, disk: MemoryDisk) -> bool:
    """Whether all that was written is durable and every readable table is complete."""
    readable = [t.id for t in base.tables if t.id not in base.unreadable]
    states = {disk.registered[n].state if n in disk.registered else None for n in readable}
    return durable(disk) == base.current and states == {TableState.LIVE}


class AuditedCapture(FakeCapture):
    """Fails the test when a position is confirmed that is not durable."""

    def __init__(self, database: FakeDatabase, disk: MemoryDisk) -> None:
        super().__init__(database)
        self.disk = disk
        self.confirmed: list[Lsn] = []

    async def confirm(self, position: Lsn) -> None:
        assert position <= durable(self.disk), f"{position} is not durable"
        self.confirmed.append(position)
        await super().confirm(position)


class EndingCapture(FakeCapture):
    """Reports the end of its stream; its catalog polls fail on demand."""

    def __init__(self, database: FakeDatabase) -> None:
        super().__init__(database)
        self.has_ended = False
        self.loses_catalog = asyncio.Event()

    async def tables_changed(self) -> None:
        await self.loses_catalog.wait()
        raise TransientError("the claim's connection is lost", reason="connection_lost")

    async def changes(self, after: Lsn | None) -> AsyncGenerator[ChangeSet, None]:
        try:
            async with aclosing(super().changes(after)) as change_sets:
                async for change_set in change_sets:
                    yield change_set
        finally:
            self.has_ended = True


def fail(base: FakeDatabase) -> None:
    """End the capture, which checks its claim, with a fault."""
    base.holder = None
    base.commit()


class CrashError(Exception):
    """The process dies here."""


async def test_ack_after_durable_only_confirms_what_the_lake_holds() -> None:
    base, disk = FakeDatabase([A, B]), MemoryDisk()
    capture = AuditedCapture(base, disk)
    async with running(base, disk, capture=capture):
        for key in range(20):
            base.commit(put(A, key), put(B, key))
            await until(lambda: len(disk.epochs) > 0)
        await until(lambda: settled(base, disk))
    assert capture.confirmed == sorted(capture.confirmed)
    assert base.slot == durable(disk) == base.current


async def test_first_load_gives_snapshot_then_changes() -> None:
    base, disk = FakeDatabase([A, B]), MemoryDisk()
    base.commit(put(A, 1, "before"), put(B, 1))
    async with running(base, disk):
        await until(lambda: disk.registered.get(A.id) is not None)
        base.commit(put(A, 1, "after", "u"), put(A, 2))
        await until(lambda: settled(base, disk))
    assert lake_rows(disk, A) == source_rows(base, A)
    assert lake_rows(disk, B) == source_rows(base, B)
    ops = Counter(disk.tables[A.id].rows()["_cdc_op"].to_pylist())
    assert ops == {"t": 1, "r": 1, "u": 1, "c": 1}
    assert {e.state for e in disk.registered.values()} == {TableState.LIVE}


async def test_whole_transactions_a_large_one_is_never_split() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    async with running(base, disk, change_set_rows=3):
        await until(lambda: disk.registered.get(A.id) is not None)
        made = base.commit(*(put(A, key) for key in range(100)))
        base.commit(put(A, 100))
        await until(lambda: settled(base, disk))
    rows = disk.tables[A.id].rows()
    of_large = rows.filter(rows["_cdc_lsn"].to_numpy() == made.commit_lsn)
    streamed = of_large.filter(of_large["_cdc_seq"].to_numpy() > 0)
    assert streamed["_cdc_seq"].to_pylist() == list(range(1, 101))
    assert len(set(streamed["_cdc_epoch"].to_pylist())) == 1


@pytest.mark.parametrize("step", ["public.a", "public.b", "_epochs", "_tables"])
@pytest.mark.parametrize("nth", [0, 1, 2, 3])
async def test_exactly_once_after_a_crash_before_any_commit(step: str, nth: int) -> None:
    base, disk = FakeDatabase([A, B]), MemoryDisk()
    base.commit(put(A, 1), put(B, 1))
    seen = Counter[str]()

    def crash(at: str) -> None:
        seen[at] += 1
        if at == step and seen[at] == nth + 1:
            raise CrashError(at)

    audited = AuditedCapture(base, disk)
    async with running(base, disk, before_commit=crash, capture=audited) as task:
        for key in range(2, 8):
            base.commit(put(A, key), put(B, key), put(A, 1, str(key), "u"))
            await until(lambda: task.done() or settled(base, disk))
    async with running(base, disk):
        base.commit(put(A, 99), put(B, 99))
        await until(lambda: settled(base, disk))
    for table in (A, B):
        assert lake_rows(disk, table) == source_rows(base, table)
        rows = disk.tables[table.id].rows()
        streamed = rows.filter(rows["_cdc_seq"].to_numpy() > 0)
        positions = list(
            zip(*(streamed[c].to_pylist() for c in ("_cdc_lsn", "_cdc_seq")), strict=True)
        )
        assert len(positions) == len(set(positions))
    assert [e.epoch for e in disk.epochs] == list(range(1, len(disk.epochs) + 1))


async def test_first_epoch_lists_unlisted_rows_without_new_changes() -> None:
    """A backfill, or a crash whose table is no longer captured: no replay brings these rows."""
    base, disk = FakeDatabase([A, B]), MemoryDisk()
    base.commit(put(A, 1), put(B, 1))
    async with running(base, disk):
        await until(lambda: settled(base, disk))
    held, last = disk.tables[A.id], disk.epochs[-1]
    base.commit()  # the source's position grows, with nothing captured
    beyond = held.versions[0].slice(0, 1).to_pylist()
    row = beyond[0] | {"_cdc_epoch": last.epoch + 1, "_cdc_lsn": int(base.current)}
    held.versions.append(pa.Table.from_pylist([row], held.versions[0].schema))
    held.watermark = base.current
    async with running(base, disk):
        await until(lambda: len(disk.epochs) > last.epoch)
    assert [(t.table, t.version, t.rows) for t in disk.epochs[-1].tables] == [
        (A.id, held.version, 1)
    ]
    assert disk.epochs[-1].summary.end_lsn >= row["_cdc_lsn"]


async def test_first_epoch_covers_the_highest_watermark() -> None:
    base, disk = FakeDatabase([A, B]), MemoryDisk()
    async with running(base, disk):
        await until(lambda: settled(base, disk))

    def crash(at: str) -> None:
        if at == "public.b":
            raise CrashError(at)

    late, watching = policy(max_delay_s=60.0), watch()
    async with running(base, disk, before_commit=crash, settings=late, watching=watching) as task:
        for key in range(5):
            base.commit(put(A, key), put(B, key))
        await until(lambda: watching.status.received_lsn == base.current)
        base.asks_for_checkpoint = True
        base.write_elsewhere(8)
        await until(task.done)
    base.asks_for_checkpoint = False
    watermark = disk.tables[A.id].watermark
    assert watermark is not None
    assert watermark > durable(disk)
    epochs_before = len(disk.epochs)
    async with running(base, disk):  # max_delay 0: every transaction would be an epoch of its own
        await until(lambda: len(disk.epochs) > epochs_before)
    first = disk.epochs[epochs_before]
    assert first.summary.end_lsn >= watermark
    assert {t.table for t in first.tables} == {A.id, B.id}
    assert lake_rows(disk, A) == source_rows(base, A)
    assert lake_rows(disk, B) == source_rows(base, B)


async def test_snapshot_boundary_table_added_while_another_is_live() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    base.commit(put(A, 1), put(B, 1))
    async with running(base, disk):
        await until(lambda: settled(base, disk))
    # While no daemon runs, both change: these changes of b are in its snapshot and in the stream.
    base.commit(put(A, 2), put(B, 2))
    base.commit(put(B, 1, "changed", "u"))
    base.commit(put(B, 2, "", "d"))
    base.tables.append(B)
    async with running(base, disk):
        await until(lambda: settled(base, disk))
        base.commit(put(A, 3), put(B, 3))
        await until(lambda: settled(base, disk))
    assert lake_rows(disk, A) == source_rows(base, A)
    assert lake_rows(disk, B) == source_rows(base, B)
    rows = disk.tables[B.id].rows()
    point = disk.registered[B.id].snapshot_lsn
    above = rows.filter(rows["_cdc_lsn"].to_numpy() >= point)
    assert Counter(above["_cdc_op"].to_pylist()) == {"t": 1, "r": 1, "c": 1}


async def test_isolated_a_table_that_cannot_be_read_stops_alone() -> None:
    base, disk = FakeDatabase([A, B]), MemoryDisk()
    base.unreadable[B.id] = TableError(B.id, "no right to read it", remedy="GRANT")
    base.commit(put(A, 1), put(B, 1))
    async with running(base, disk):
        await until(lambda: len(disk.epochs) > 0)
        base.commit(put(A, 2), put(B, 2))
        await until(lambda: settled(base, disk))
    assert lake_rows(disk, A) == source_rows(base, A)
    assert B.id not in disk.tables
    assert disk.registered[B.id].state is TableState.STOPPED
    assert disk.registered[B.id].reason == "no right to read it"
    assert disk.registered[A.id].state is TableState.LIVE
    # What it missed comes back with its next snapshot.
    base.unreadable.clear()
    async with running(base, disk):
        await until(lambda: disk.registered[B.id].state is TableState.LIVE)
    assert lake_rows(disk, B) == source_rows(base, B)


async def test_idle_advances_the_slot_without_epochs() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    async with running(base, disk):
        await until(lambda: settled(base, disk))
        base.write_elsewhere(1 << 20)
        await until(lambda: base.slot == base.current)
    assert len(disk.epochs) == 1
    assert durable(disk) == base.slot


async def test_a_lost_slot_resnapshots_all_tables() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    base.commit(put(A, 1), put(A, 2))
    async with running(base, disk):
        await until(lambda: settled(base, disk))
    base.commit(put(A, 1, "", "d"), put(A, 3))
    base.slot = None
    async with running(base, disk):
        await until(lambda: settled(base, disk))
    assert lake_rows(disk, A) == source_rows(base, A)


async def test_a_loss_is_recorded_before_anything_hides_it() -> None:
    """The next start may see a good slot, of a server that the lake knows."""
    base, disk = FakeDatabase([A]), MemoryDisk()
    base.commit(put(A, 1), put(A, 2))
    async with running(base, disk):
        await until(lambda: settled(base, disk))
    base.commit(put(A, 1, "", "d"))
    base.slot, base.server_id = None, "fake-2"

    async def fail(server_id: str) -> None:
        raise TransientError(f"no place for {server_id}", reason="storage")

    lake = MemoryLake(disk)
    lake.adopt = fail  # type: ignore[method-assign]
    with pytest.raises(TransientError):
        await Pipeline(FakeCapture(base), lake, policy(), watch()).run(asyncio.Event())
    known = disk.registered[A.id]
    assert (known.state, disk.server_id) == (TableState.SNAPSHOTTING, "fake-1")
    assert known.reason


def test_what_a_snapshot_left_to_be_read_is_void_after_a_loss() -> None:
    half = RegisteredTable(A.id, A.oid, 1, TableState.SNAPSHOTTING, None, Lsn(5), progress="left")
    committed = LakeState(1, Lsn(9), {A.id: Lsn(9)}, {A.id: half}, "fake-1")
    given_up = without_position(committed, "gone")
    assert given_up.position is None
    assert (given_up.tables[A.id].progress, given_up.tables[A.id].reason) == ("", "gone")


@pytest.mark.parametrize("resnapshot", [True, False])
async def test_a_source_behind_the_lake_is_never_resumed(*, resnapshot: bool) -> None:
    """By the next check it may be ahead of the lake, with other changes."""
    base, disk = FakeDatabase([A]), MemoryDisk()
    base.commit(put(A, 1), put(A, 2))
    async with running(base, disk):
        await until(lambda: settled(base, disk))
    base.commit(put(A, 1, "", "d"))
    position = base.slot

    class Behind(FakeCapture):
        async def continuity(self, _committed: LakeState) -> Continuity:
            return Lost("it is behind", remedy="move on", is_behind=True)

    settings = replace(policy(), resnapshot_when_lost=resnapshot)
    with pytest.raises(OperatorError, match="it is behind") as raised:
        await Pipeline(Behind(base), MemoryLake(disk), settings, watch()).run(asyncio.Event())
    assert raised.value.remedy == "move on"
    assert base.slot == position
    assert disk.registered[A.id].reason == "it is behind"
    async with running(base, disk):
        await until(lambda: settled(base, disk))
        await until(lambda: disk.registered[A.id].state is TableState.LIVE)
    assert disk.tables[A.id].rows()["_cdc_op"].to_pylist().count("t") == 2
    assert lake_rows(disk, A) == source_rows(base, A)


async def test_lost_slot_stops_when_asked_to() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    async with running(base, disk):
        await until(lambda: settled(base, disk))
    base.slot = None
    settings = PipelinePolicy(EpochPolicy(0.0, 1 << 20), resnapshot_when_lost=False)
    async with running(base, disk, settings=settings) as task:
        await until(task.done)
    with pytest.raises(OperatorError, match="changes may be lost"):
        task.result()
    assert base.slot is None


async def test_stop_finishes_the_open_epoch() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    watching = watch()
    async with running(base, disk, settings=policy(max_delay_s=3600.0), watching=watching):
        await until(lambda: disk.registered.get(A.id) is not None and settled(base, disk))
        made = base.commit(put(A, 1))
        await until(lambda: (watching.status.received_lsn or 0) >= made.end_lsn)
    assert lake_rows(disk, A) == source_rows(base, A)
    assert base.slot == durable(disk) == base.current


@pytest.mark.parametrize("lost", ["stream", "catalog"])
async def test_whole_transactions_a_source_fault_completes_the_commit(
    tmp_path: Path, lost: str
) -> None:
    """A standby promoted without the slot would not deliver the rest of the epoch.

    One that has the slot may have been promoted before it had that epoch: nothing is confirmed. All
    else ends at once.
    """
    base = FakeDatabase([A, B])
    capture = EndingCapture(base)
    watching, steps = watch(), list[str]()
    blocked, goes_on = threading.Event(), threading.Event()

    def before_commit(step: str) -> None:
        steps.append(step)
        if step == "public.b" and steps.count(step) > 1:  # the first has what the tables held
            blocked.set()
            assert goes_on.wait(LIMIT_S)

    lake = DeltaLake(str(tmp_path), "shop", before_commit=before_commit)
    async with running(base, MemoryDisk(), capture=capture, sink=lake, watching=watching) as task:
        await until(lambda: watching.status.state is SourceState.STREAMING)
        made = base.commit(put(A, 1), put(B, 1))
        await until(blocked.is_set)
        confirmed = base.slot
        if lost == "stream":
            fail(base)
        else:
            capture.loses_catalog.set()
        await until(lambda: capture.has_ended)
        for _ in range(20):  # turns in which it would be given up
            await asyncio.sleep(0)
        goes_on.set()
        await until(task.done)
    with pytest.raises(TransientError, match="claim"):
        task.result()
    assert steps[-1] == "_epochs"
    assert base.slot == confirmed
    found = await DeltaLake(str(tmp_path), "shop").open()
    assert found.position == made.end_lsn


class HangingLake(MemoryLake):
    """A lake whose commits never end, once it `hangs`; `begun`: it has begun one."""

    hangs = False

    def __init__(self, disk: MemoryDisk) -> None:
        super().__init__(disk)
        self.begun = asyncio.Event()

    def make_writer(self, number: int, previous: MemoryEpochWriter | None) -> MemoryEpochWriter:
        lake = self

        class HangingWriter(MemoryEpochWriter):
            async def wait_for_previous(self) -> None:
                if lake.hangs:
                    lake.begun.set()
                    await asyncio.Future()
                await super().wait_for_previous()

        return HangingWriter(self, number, previous)


async def test_a_fault_of_the_source_waits_for_the_lake_for_a_time() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    lake = HangingLake(disk)
    brief = replace(policy(), finish_limit_s=0.05)
    async with running(base, disk, settings=brief, sink=lake) as task:
        await until(lambda: settled(base, disk))
        lake.hangs = True
        base.commit(put(A, 1))
        await until(lake.begun.is_set)
        fail(base)
        await until(task.done)
    with pytest.raises(TransientError, match="claim"):
        task.result()


async def test_one_writer_waits_for_the_claim() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    async with running(base, disk):
        await until(lambda: settled(base, disk))
        async with running(base, disk) as second:
            await until(second.done)
        with pytest.raises(TransientError) as raised:
            second.result()
        assert raised.value.reason == "claimed"
        base.commit(put(A, 1))
        await until(lambda: settled(base, disk))


async def test_dropped_table_is_recorded() -> None:
    base, disk = FakeDatabase([A, B]), MemoryDisk()
    async with running(base, disk):
        await until(lambda: B.id in disk.tables and disk.position is not None)
    base.tables.remove(B)
    async with running(base, disk):
        await until(lambda: disk.registered[B.id].state is TableState.DROPPED)


async def test_snapshot_boundary_a_recreated_table_is_resnapshotted() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    base.commit(put(A, 1), put(A, 2))
    async with running(base, disk):
        await until(lambda: settled(base, disk))
    base.tables[0] = replace(A, oid=A.oid + 1)  # DROP TABLE, CREATE TABLE: no event reports it
    base.log.clear()
    base.commit(put(A, 100))
    async with running(base, disk):
        await until(lambda: settled(base, disk))
    assert lake_rows(disk, A) == source_rows(base, A)
    assert disk.registered[A.id].oid == A.oid + 1


async def test_a_new_column_in_mid_snapshot_does_not_make_it_live() -> None:
    wider = with_before(
        replace(A, columns=(*A.columns, Column("more", 25, -1, pa.string(), "text"))), full=False
    )
    base, disk = FakeDatabase([A]), MemoryDisk()
    base.commit(put(A, 1))

    def crash(step: str) -> None:
        if step == "public.a":
            raise CrashError(step)

    class Widened(FakeCapture):
        async def snapshot(self, tables: Sequence[Table], **options: Any) -> Snapshot:
            snapshot = await super().snapshot(tables, **options)
            self._tables = {wider.id: wider}  # what the stream brings from now on
            base.commit(FakeChange(A.id, "c", {"id": 2, "note": "", "more": "x"}))
            return snapshot

    capture = Widened(base)
    async with running(base, disk, before_commit=crash, capture=capture) as task:
        await until(task.done)
    assert disk.registered[A.id].state is TableState.SNAPSHOTTING
    base.tables[0] = wider
    async with running(base, disk):
        await until(lambda: settled(base, disk))
    assert disk.registered[A.id].state is TableState.LIVE
    assert [row["id"] for row in lake_rows(disk, A)] == [1, 2]


async def test_columns_that_changed_while_no_daemon_ran_are_recorded() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    async with running(base, disk):
        await until(lambda: disk.registered.get(A.id) is not None and len(disk.epochs) == 1)
    wider = replace(A, columns=(*A.columns, Column("more", 25, -1, pa.string(), "text")))
    base.tables[0] = with_before(wider, full=False)
    async with running(base, disk):
        await until(lambda: disk.registered[A.id].schema_version == 2)
    assert [c.name for c in disk.registered[A.id].columns] == ["id", "note", "more"]


async def test_without_snapshots_a_gap_stops_the_source() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    never = PipelinePolicy(EpochPolicy(0.0, 1 << 20), reads_existing_rows=False)
    async with running(base, disk, settings=never):
        await until(lambda: base.slot is not None)
        base.commit(put(A, 1))
        await until(lambda: settled(base, disk))
    base.slot = None
    base.commit(put(A, 2))
    async with running(base, disk, settings=never) as task:
        await until(task.done)
    with pytest.raises(OperatorError, match="changes may be lost"):
        task.result()


async def test_a_lost_claim_ends_a_snapshot_at_once() -> None:
    settings = replace(policy(), monitor_interval_s=0.001)
    base, disk = FakeDatabase([A]), MemoryDisk()

    class Endless(FakeCapture):
        async def snapshot(self, tables: Sequence[Table], **options: Any) -> Snapshot:
            base.holder = None  # another takes it
            await asyncio.Event().wait()
            return await super().snapshot(tables, **options)

    async with running(base, disk, settings=settings, capture=Endless(base)) as task:
        await until(task.done)
    with pytest.raises(TransientError, match="claim"):
        task.result()


class FailingLake(MemoryLake):
    """A lake in which the files of an epoch can't be removed."""

    def make_writer(self, number: int, previous: MemoryEpochWriter | None) -> MemoryEpochWriter:
        class FailingWriter(MemoryEpochWriter):
            async def abort(self) -> None:
                raise TransientError("the store is away", reason="storage")

        return FailingWriter(self, number, previous)

    async def close(self) -> None:
        """Leave the files."""


async def test_clean_up_continues_when_files_cannot_be_removed() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    base.unreadable[A.id] = TableError(A.id, "x")

    def crash(step: str) -> None:
        raise CrashError(step)

    lake = FailingLake(disk, before_commit=crash)
    async with running(base, disk, sink=lake) as task:
        await until(task.done)
    with pytest.raises(CrashError):
        task.result()
    assert base.holder is None, "the claim was not let go"


def test_a_state_is_kept_while_a_failed_source_starts_again() -> None:
    watching = watch()
    watching.failed(TransientError("away", reason="connection_lost"), 0.5)
    watching.enter(SourceState.STARTING)
    assert watching.status.state is SourceState.BACKING_OFF
    assert watching.status.reason == "away"
    watching.enter(SourceState.STREAMING)
    assert watching.status.reason is None


# --- tables that come and change while streaming -------------------------------------------------


async def test_snapshot_boundary_a_new_table_joins_the_running_stream() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    base.commit(put(A, 1), put(B, 1))
    async with running(base, disk) as task:
        await until(lambda: settled(base, disk))
        base.commit(put(A, 2), put(B, 2))
        base.tables.append(B)
        base.commit(put(A, 3), put(B, 2, "", "d"))
        await until(lambda: settled(base, disk))
        base.commit(put(A, 4), put(B, 1, "changed", "u"), put(B, 5))
        await until(lambda: settled(base, disk))
        assert not task.done()
    assert lake_rows(disk, A) == source_rows(base, A)
    assert lake_rows(disk, B) == source_rows(base, B)
    assert Counter(disk.tables[B.id].rows()["_cdc_op"].to_pylist())["t"] == 1
    assert [e.state for e in disk.events if e.table.id == A.id] == ["snapshotting", "live"]


class HeldCapture(FakeCapture):
    """Its second snapshot returns no page before `go_on`, as for a table that takes a day."""

    def __init__(self, database: FakeDatabase) -> None:
        super().__init__(database)
        self.go_on = asyncio.Event()
        self.taken = 0

    async def snapshot(self, tables: Sequence[Table], **options: Any) -> Snapshot:
        self.taken += 1
        held = partial(HeldSnapshot, go_on=self.go_on)
        self.make_snapshot = held if self.taken == 2 else FakeSnapshot
        return await super().snapshot(tables, **options)


class HeldSnapshot(FakeSnapshot):
    def __init__(self, *parts: Any, go_on: asyncio.Event, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._go_on = go_on

    async def items(self) -> AsyncGenerator[SnapshotItem, None]:
        async for item in super().items():
            yield item
            await self._go_on.wait()


async def test_isolated_other_tables_continue_while_a_new_one_is_read() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    base.commit(put(A, 1), put(B, 1), put(B, 2))
    capture = HeldCapture(base)
    async with running(base, disk, capture=capture):
        await until(lambda: settled(base, disk))
        base.tables.append(B)
        base.commit(put(A, 2), put(B, 3))
        await until(lambda: capture.taken == 2)
        for key in range(3, 8):
            made = base.commit(put(A, key), put(B, 10 + key), put(B, 2, str(key), "u"))
            await until(lambda end=made.end_lsn: durable(disk) >= end)  # type: ignore[misc]
            assert disk.registered[B.id].state is TableState.SNAPSHOTTING
        capture.go_on.set()
        await until(lambda: settled(base, disk))
    assert lake_rows(disk, A) == source_rows(base, A)
    assert lake_rows(disk, B) == source_rows(base, B)


async def test_a_new_table_need_not_wait_for_one_that_is_being_read() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    base.commit(put(A, 1), put(B, 1), put(C, 1))
    capture = HeldCapture(base)
    async with running(base, disk, capture=capture):
        await until(lambda: settled(base, disk))
        base.tables.append(B)
        base.commit(put(A, 2))
        await until(lambda: capture.taken == 2)
        base.tables.append(C)
        base.commit(put(A, 3), put(C, 2))
        await until(lambda: bool(base.commit(put(A, 3, "", "u"))) and is_live(disk, C))
        assert disk.registered[B.id].state is TableState.SNAPSHOTTING
        capture.go_on.set()
        await until(lambda: settled(base, disk))
    for table in (A, B, C):
        assert lake_rows(disk, table) == source_rows(base, table)


def is_live(disk: MemoryDisk, table: Table) -> bool:
    known = disk.registered.get(table.id)
    return known is not None and known.state is TableState.LIVE


async def test_snapshot_boundary_a_kill_while_a_new_table_is_read() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    base.commit(put(A, 1), put(B, 1), put(B, 2))
    capture = HeldCapture(base)
    async with running(base, disk, capture=capture):
        await until(lambda: settled(base, disk))
        base.tables.append(B)
        base.commit(put(A, 2), put(B, 3))
        await until(lambda: capture.taken == 2)
        await until(lambda: bool(base.commit(put(A, 3, "", "u"))) and B.id in disk.tables)
    assert disk.registered[B.id].state is TableState.SNAPSHOTTING
    base.commit(put(B, 1, "", "d"), put(B, 2, "later", "u"))
    async with running(base, disk):
        await until(lambda: settled(base, disk))
    assert lake_rows(disk, B) == source_rows(base, B)


async def test_a_rewritten_table_serves_old_rows_until_resnapshotted() -> None:
    base, disk = FakeDatabase([A, B]), MemoryDisk()
    base.commit(put(A, 1), put(A, 2), put(B, 1))
    capture = HeldCapture(base)
    async with running(base, disk, capture=capture):
        await until(lambda: settled(base, disk))
        base.tables[0] = replace(A, fingerprint="another file")
        base.log[0] = replace(base.log[0], changes=(put(A, 1, "other"), put(B, 1)))
        base.commit(put(B, 2))
        await until(lambda: capture.taken == 2)
        await until(lambda: disk.registered[A.id].state is TableState.SNAPSHOTTING)
        assert {row["id"] for row in lake_rows(disk, A)} == {1, 2}
        capture.go_on.set()
        await until(lambda: settled(base, disk))
    assert lake_rows(disk, A) == source_rows(base, A) == [{"id": 1, "note": "other"}]
    assert disk.registered[A.id].fingerprint == "another file"


async def test_a_rewritten_table_is_only_recorded_when_asked_to() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    base.commit(put(A, 1))
    settings = replace(policy(), resnapshot_rewritten=False)
    async with running(base, disk, settings=settings):
        await until(lambda: settled(base, disk))
        base.tables[0] = replace(A, fingerprint="another file")
        base.commit(put(A, 2))
        await until(lambda: disk.registered[A.id].fingerprint == "another file")
    assert disk.registered[A.id].state is TableState.LIVE
    assert disk.registered[A.id].reason == "rewritten"
    ops = Counter(disk.tables[A.id].rows()["_cdc_op"].to_pylist())
    assert ops["t"] == 1


async def test_a_snapshot_request_resnapshots_a_table() -> None:
    base, disk = FakeDatabase([A, B]), MemoryDisk()
    base.commit(put(A, 1), put(B, 1))
    pipeline = Pipeline(FakeCapture(base), MemoryLake(disk), policy(), watch())
    stop = asyncio.Event()
    with pytest.raises(TransientError):
        pipeline.request_snapshot([A.id])
    task = asyncio.create_task(pipeline.run(stop))
    await until(lambda: settled(base, disk))
    with pytest.raises(OperatorError, match=r"public\.c is not captured"):
        pipeline.request_snapshot([A.id, TableId("public", "c")])
    pipeline.request_snapshot([A.id])
    await until(
        lambda: [e.state for e in disk.events if e.table.id == A.id].count(TableState.LIVE) == 2
    )
    await until(lambda: settled(base, disk))
    stop.set()
    await task
    markers = [disk.tables[t.id].rows()["_cdc_op"].to_pylist().count("t") for t in (A, B)]
    assert markers == [2, 1]
    assert lake_rows(disk, A) == source_rows(base, A)


async def test_isolated_a_stopped_table_returns_once_it_is_fixed() -> None:
    base, disk = FakeDatabase([A]), MemoryDisk()
    base.refused.append(Refused(B, TableError(B.id, "no usable replica identity")))
    base.commit(put(A, 1), put(B, 1))
    async with running(base, disk):
        await until(lambda: B.id in disk.registered and settled(base, disk))
        assert disk.registered[B.id].state is TableState.STOPPED
        base.refused.clear()
        base.tables.append(B)
        base.commit(put(B, 2))
        await until(lambda: settled(base, disk))
    assert lake_rows(disk, B) == source_rows(base, B)


async def test_a_table_that_goes_is_taken_no_more() -> None:
    base, disk = FakeDatabase([A, B]), MemoryDisk()
    base.commit(put(A, 1), put(B, 1))
    async with running(base, disk):
        await until(lambda: settled(base, disk))
        base.tables.remove(B)
        base.commit(put(A, 2))
        await until(lambda: disk.registered[B.id].state is TableState.DROPPED)
        base.commit(put(A, 3), put(B, 2))
        await until(lambda: settled(base, disk))
    assert lake_rows(disk, B) == [{"id": 1, "note": ""}]
    assert lake_rows(disk, A) == source_rows(base, A)


async def test_each_epoch_ends_above_the_last_on_an_idle_source() -> None:
    base, disk = FakeDatabase([A, B]), MemoryDisk()
    base.commit(put(A, 1), put(B, 1))
    capture = HeldCapture(base)
    capture.go_on.set()
    async with running(base, disk, capture=capture, settings=policy(max_bytes=1)):
        await until(lambda: settled(base, disk))
        capture.database.tables[1] = replace(B, fingerprint="another file")
        base.write_elsewhere(1)
        await until(lambda: disk.registered[B.id].fingerprint == "another file")
        await until(lambda: settled(base, disk))
    ends = [e.summary.end_lsn for e in disk.epochs]
    assert all(one < other for one, other in pairwise(ends))


async def test_isolated_a_locked_table_waits_and_the_others_continue() -> None:
    base, disk = FakeDatabase([A, B]), MemoryDisk()
    base.commit(put(A, 1), put(B, 1))
    base.locked.add(B.id)
    async with running(base, disk):
        await until(lambda: is_live(disk, A))
        made = base.commit(put(A, 2), put(B, 2))
        await until(lambda: durable(disk) >= made.end_lsn)
        assert B.id not in disk.registered
        base.locked.clear()
        base.tables[0] = replace(A, fingerprint="makes the fake look again")
        base.commit(put(A, 3))
        await until(lambda: settled(base, disk))
    assert lake_rows(disk, A) == source_rows(base, A)
    assert lake_rows(disk, B) == source_rows(base, B)


async def test_lossless_a_column_away_for_a_time_causes_a_resnapshot() -> None:
    other = with_before(
        replace(A, columns=(A.columns[0], Column("memo", 25, -1, pa.string(), "text"))), full=False
    )
    base, disk = FakeDatabase([A]), MemoryDisk()
    capture = FakeCapture(base)
    base.commit(put(A, 1, "one"))
    async with running(base, disk, capture=capture):
        await until(lambda: settled(base, disk))
        capture.tables = {A.id: other}  # renamed, and back again, between two catalog polls
        base.commit(FakeChange(A.id, "c", {"id": 2, "memo": "two"}))
        await until(lambda: durable(disk) == base.current)
        capture.tables = {A.id: A}
        base.log[-1] = replace(base.log[-1], changes=(put(A, 2, "two"),))
        base.commit(put(A, 3, "three"))
        await until(lambda: settled(base, disk) and len(disk.events) > 4)
    there = [{"id": row["id"], "note": row["note"]} for row in lake_rows(disk, A)]
    assert there == source_rows(base, A)


class LockedCapture(FakeCapture):
    """Can't read its catalog."""

    async def discover(self, known: Mapping[TableId, RegisteredTable]) -> Discovery:
        if self.tables:
            raise TransientError("a table is locked", reason="lock_timeout")
        return await super().discover(known)


@pytest.mark.parametrize("kind", [FakeCapture, pytest.param(LockedCapture, marks=pytest.mark.slow)])
async def test_a_drain_ends_with_the_rows_or_the_fault(kind: type[FakeCapture]) -> None:
    base, disk = FakeDatabase([A, B]), MemoryDisk()
    base.commit(put(A, 1), put(B, 1))
    slow = PipelinePolicy(EpochPolicy(3600.0, 1 << 30), idle_interval_s=3600.0)
    pipeline = Pipeline(kind(base), MemoryLake(disk), slow, telemetry_of())
    stop = asyncio.Event()

    async def drained() -> None:
        stop.set()

    async with asyncio.timeout(LIMIT_S):
        if kind is FakeCapture:
            await pipeline.run(stop, drained)
            assert lake_rows(disk, A) == source_rows(base, A)
            assert durable(disk) == base.current
        else:
            with pytest.raises(TransientError, match="a table is locked"):
                await pipeline.run(stop, drained)


@pytest.mark.attack("table owner")
async def test_a_drain_ends_though_a_table_is_altered() -> None:
    """Its owner could keep `run --once` from ending."""
    base = FakeDatabase([A, B])
    base.commit(put(A, 1), put(B, 1))
    base.unreadable[B.id] = TableReplacedError(B.id, "was rewritten while it was read")
    pipeline = Pipeline(FakeCapture(base), MemoryLake(MemoryDisk()), policy(), telemetry_of())
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(TransientError, match="altered each time"):
            await pipeline.run(asyncio.Event(), _never)


async def _never() -> None:
    pytest.fail("not all tables were read")
