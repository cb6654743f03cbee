"""Refreshing reference tables alongside a pipeline, on the fakes."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from ingestd.model.backoff import Backoff
from ingestd.model.errors import IngestdError, OperatorError, TransientError
from ingestd.model.lake_state import TableState
from ingestd.model.schema import TableId
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import DaemonStatus, SourceState, SourceStatus, ready
from ingestd.pipeline.reference_tables import FullRefresh, IncrementalRefresh, References
from ingestd.pipeline.retry import RetryPolicy
from ingestd.pipeline.telemetry.reference import ReferenceTelemetry
from ingestd.pipeline.telemetry.source import SourceTelemetry
from ingestd.testing.fakes.reference import (
    FakeReferenceLake,
    FakeReferenceSink,
    FakeReferenceTable,
    FakeReferenceTableSource,
)
from tests.contract.conftest import NAME, make_table
from tests.unit.pipeline.fixtures import until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import pyarrow as pa

    from ingestd.ports import ReferenceState, ReferenceTableSource

T0 = datetime(2026, 1, 2, tzinfo=UTC)


class Failing(FakeReferenceTableSource):
    """Raises each given error once; `of_changes`: from a poll of changes too."""

    def __init__(
        self, table: FakeReferenceTable, faults: list[IngestdError], *, of_changes: bool
    ) -> None:
        super().__init__(table)
        self._faults = faults
        self._of_changes = of_changes

    async def poll_snapshot(self) -> pa.RecordBatch | None:
        if self._faults and self._given:
            raise self._faults.pop(0)
        return await super().poll_snapshot()

    async def poll_changes(self) -> pa.RecordBatch | None:
        if self._faults and self._of_changes:
            raise self._faults.pop(0)
        return await super().poll_changes()


class NotingTelemetry(ReferenceTelemetry):
    """Notes what is shown after each report, and each failure."""

    def __init__(self, status: SourceStatus, telemetry: SourceTelemetry, kind: str) -> None:
        log = structlog.get_logger()
        super().__init__(status, Metrics(), log, telemetry, {NAME: kind})
        self.status = status
        self.shown: list[tuple[TableState, str | None]] = []
        self.failures: list[tuple[TableState, str | None, TableState]] = []

    def _note(self) -> tuple[TableState, str | None]:
        reference = self.status.references[str(NAME)]
        self.shown.append((reference.state, reference.reason))
        return self.shown[-1]

    def opened(self, table: TableId, state: ReferenceState | None) -> None:
        super().opened(table, state)
        self._note()

    def succeeded(self, table: TableId, state: ReferenceState | None) -> None:
        super().succeeded(table, state)
        self._note()

    def current(
        self, table: TableId, state: ReferenceState, seconds: float, *, is_requested: bool = False
    ) -> None:
        super().current(table, state, seconds, is_requested=is_requested)
        self._note()

    def failed(self, table: TableId, error: IngestdError, delay_s: float) -> None:
        super().failed(table, error, delay_s)
        found = self.status.tables.get(str(NAME))
        self.failures.append((*self._note(), TableState.LIVE if found is None else found.state))


@dataclass(frozen=True)
class Immediately(RetryPolicy):
    """Retries at once, and notes each attempt."""

    attempts: list[float] = field(default_factory=list)

    def delay_s(self, error: IngestdError, attempt: int, jitter: float) -> float:
        del error, jitter
        self.attempts.append(attempt)
        return 0.0


class World:
    """One reference table of a source that runs."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.table = FakeReferenceTable(make_table(1))
        self.lake = FakeReferenceLake()
        self.status = SourceStatus("shop", since=T0, state=SourceState.STREAMING)
        self.watch = SourceTelemetry(self.status, Metrics(), structlog.get_logger())
        self.told = NotingTelemetry(self.status, self.watch, kind)
        self.faults: list[IngestdError] = []
        self.fails_changes = False
        self.delays: list[float] = []
        self.made = 0
        self.retry: RetryPolicy = Immediately(attempts=self.delays)

    def source(self, position: int | None = None) -> ReferenceTableSource:
        self.made += 1
        made = Failing(self.table, self.faults, of_changes=self.fails_changes)
        if position is not None:
            made.restore(json.dumps([position, 0, True]).encode())
        return made

    @asynccontextmanager
    async def running(self, refresh_s: float | None = None) -> AsyncGenerator[References, None]:
        sink = FakeReferenceSink(self.lake)
        keeper: Any = (
            IncrementalRefresh(NAME, self.source, sink, self.told)
            if self.kind == "snapshot_plus_cdc"
            else FullRefresh(NAME, self.source, sink, self.told, refresh_s)
        )
        found = References({NAME: keeper}, self.told, frozenset({NAME}), retry=self.retry)
        task = asyncio.create_task(found.run())
        try:
            yield found
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def notify(self) -> None:
        for listener in self.watch.listeners:
            listener()

    async def version(self, count: int) -> None:
        await until(lambda: len(self.lake.versions) >= count)

    def rows(self) -> list[dict[str, Any]]:
        return sorted(self.lake.versions[-1], key=lambda r: r["id"])

    def is_ready(self) -> bool:
        return ready(DaemonStatus("1", T0, {"shop": self.status}))[0]


def row(number: int) -> dict[str, Any]:
    return {"id": number, "name": f"row {number}"}


async def test_manual_is_read_once_and_when_asked_for() -> None:
    world = World("manual")
    world.table.upsert(row(1))
    assert not world.is_ready()
    async with world.running() as references:
        await world.version(1)
        world.table.upsert(row(2))
        world.watch.enter(SourceState.SNAPSHOTTING)
        world.watch.enter(SourceState.STREAMING)
        references.request([NAME])
        await world.version(2)
    assert world.rows() == [row(1), row(2)]
    assert world.is_ready()
    async with world.running() as references:
        references.request([NAME])
        await until(lambda: world.made == 3)
    assert len(world.lake.versions) == 2


async def test_a_refresh_comes_again() -> None:
    world = World("snapshot_only")
    async with world.running(0.001):
        await world.version(1)
        assert world.lake.versions == [[]]
        world.table.upsert(row(1))
        await world.version(2)
        await until(lambda: world.made > 5)
    assert len(world.lake.versions) == 2


async def test_i5_nothing_is_written_while_the_source_is_not_claimed() -> None:
    world = World("snapshot_only")
    world.watch.enter(SourceState.STARTING)
    async with world.running(0.001) as references:
        for _ in range(20):
            await asyncio.sleep(0)
        assert world.made == 0
        with pytest.raises(TransientError, match="is starting"):
            references.request([NAME])
        world.watch.enter(SourceState.STREAMING)
        await world.version(1)


async def test_i8_a_fault_stops_the_table_until_it_is_mended() -> None:
    world = World("manual")
    for number in range(5):
        world.table.upsert(row(number))
    world.faults += [
        TransientError("gone", reason="connection_lost"),
        OperatorError("a value", remedy="mend it"),
    ]
    async with world.running():
        await world.version(1)
    assert world.told.failures == [
        (TableState.SNAPSHOTTING, "gone", TableState.SNAPSHOTTING),
        (TableState.STOPPED, "a value", TableState.STOPPED),
    ]
    assert world.delays == [1, 2]
    assert len(world.rows()) == 5
    assert world.is_ready()
    assert world.status.references[str(NAME)].reason is None


async def test_changes_follow_each_epoch() -> None:
    world = World("snapshot_plus_cdc")
    world.table.upsert(row(1))
    async with world.running():
        await world.version(1)
        for number in (2, 3):
            world.table.upsert(row(number))
            world.notify()
            await world.version(number)
        world.table.truncate()
        world.table.upsert(row(9))
        world.notify()
        await world.version(4)
    assert list(map(len, world.lake.versions)) == [1, 2, 3, 1]
    assert world.lake.position == len(world.table.log)
    assert str(NAME) not in world.status.tables, "its raw table is told of by the pipeline"
    world.table.delete({"id": 9})
    async with world.running():  # resumes where the lake is
        await world.version(5)
    assert world.rows() == []


async def test_other_columns_cause_a_full_refresh() -> None:
    world = World("snapshot_plus_cdc")
    world.table.upsert(row(1))
    async with world.running():
        await world.version(1)
        assert world.lake.schema is not None
        world.lake.schema = world.lake.schema.remove(1)
        world.lake.versions[-1] = [{"id": 1}]
    world.table.upsert(row(2))
    async with world.running():
        await world.version(2)
    assert world.rows() == [row(1), row(2)]


class NeverFitting(FakeReferenceLake):
    """Lacks a column that it was given."""

    def state(self) -> ReferenceState | None:
        state = super().state()
        return None if state is None else replace(state, schema=state.schema.remove(1))


async def test_columns_that_never_fit_leave_other_tables_their_turn() -> None:
    world = World("snapshot_plus_cdc")
    world.table.upsert(row(1))
    world.lake = NeverFitting()
    async with world.running():
        await until(lambda: len(world.delays) > 1)


async def test_a_missing_row_causes_an_immediate_full_refresh() -> None:
    world = World("snapshot_plus_cdc")
    world.table.upsert(row(1))
    async with world.running():
        await world.version(1)
    world.table.upsert(row(2))
    missing = TransientError("a row that changed is not there", reason="row_missing")
    world.lake.faults.append(missing)
    async with world.running():  # nothing else happens that would wake it
        await world.version(2)
    assert world.rows() == [row(1), row(2)]
    assert world.delays == [], "it was no fault of the table"


class Stubborn:
    """A keeper that fails to step and to close, `faults` times each."""

    is_requested = False

    def __init__(self, faults: int) -> None:
        self.steps = self.closes = 0
        self._faults = faults

    async def step(self) -> float | None:
        self.steps += 1
        if self.steps <= self._faults:
            raise TransientError("gone", reason="connection_lost")
        return 0.001

    async def close(self) -> None:
        self.closes += 1
        if self.closes <= self._faults:
            msg = "ours"
            raise RuntimeError(msg)


async def test_i8_a_table_that_fails_to_close_stops_no_other() -> None:
    world = World("manual")
    bad, good = Stubborn(3), Stubborn(0)
    keepers = {NAME: bad, TableId("public", "other"): good}
    task = asyncio.create_task(
        References(keepers, world.told, frozenset(), retry=world.retry).run()
    )
    await until(lambda: min(bad.steps, good.steps) > 5 or task.done())
    world.watch.enter(SourceState.STARTING)
    await until(lambda: bad.closes > 3 or task.done())
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert world.delays == [1, 2, 3]


@pytest.mark.parametrize("kind", ["snapshot_only", "manual", "snapshot_plus_cdc"])
async def test_a_stopped_table_is_not_shown_live_between_two_tries(kind: str) -> None:
    """Reopening the lake's version says nothing about the unreadable rows."""
    world = World(kind)
    world.table.upsert(row(1))
    refresh_s = 0.001 if kind == "snapshot_only" else None
    async with world.running(refresh_s):
        await world.version(1)
    shown = world.told.shown
    shown.clear()
    world.table.upsert(row(2))
    world.faults += [OperatorError("no such value") for _ in range(3)]
    world.fails_changes = True
    async with world.running(refresh_s) as references:
        if kind == "manual":
            references.request([NAME])
        await until(lambda: len(world.lake.versions) > 1)
        await until(world.is_ready)
    first = next(i for i, (state, _) in enumerate(shown) if state is TableState.STOPPED)
    last = max(i for i, (state, _) in enumerate(shown) if state is TableState.STOPPED)
    assert {state for state, _ in shown[first:last]} == {TableState.STOPPED}, shown


async def test_a_stopped_table_is_retried_once_its_source_was_reread() -> None:
    world = World("snapshot_plus_cdc")
    world.retry = RetryPolicy(
        Backoff(3600.0, 3600.0), operator_delay_s=3600.0, reference_delay_s=3600.0
    )
    world.status.table(str(NAME), TableState.LIVE, T0)
    world.table.upsert(row(1))
    world.faults.append(OperatorError("its key is another"))
    async with world.running():
        await until(lambda: world.status.references[str(NAME)].state is TableState.STOPPED)
        for second, state in enumerate((TableState.SNAPSHOTTING, TableState.LIVE), start=1):
            world.status.table(str(NAME), state, T0 + timedelta(seconds=second))
            world.notify()
        await world.version(1)
    assert world.is_ready()
