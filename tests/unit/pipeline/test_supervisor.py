from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

import pytest
from structlog.testing import capture_logs

from ingestd.model.errors import (
    PROTOCOL_REMEDY,
    IngestdError,
    OperatorError,
    ProtocolError,
    TransientError,
)
from ingestd.model.schema import TableId
from ingestd.observe.status import DaemonStatus, SourceState, SourceStatus, ready
from ingestd.pipeline.retry import RETRY
from ingestd.pipeline.source_runner import SourceSpec
from ingestd.pipeline.supervisor import Supervisor
from tests.unit.pipeline.fixtures import LIMIT_S, until, watch

if TYPE_CHECKING:
    from ingestd.pipeline.pipeline import Pipeline
    from ingestd.pipeline.reference_tables import References

LOST = TransientError("connection lost", reason="connection_lost")
DENIED = OperatorError("no REPLICATION attribute", remedy="ALTER ROLE r REPLICATION;")


class Clock:
    """Monotonic seconds that pass on request."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Waits:
    """Takes the supervisor's waits: notes them, passes the time, and lets `limit` of them by."""

    def __init__(self, clock: Clock, limit: int, stop: asyncio.Event) -> None:
        self.delays: list[float] = []
        self._clock = clock
        self._stop = stop
        self._limit = limit

    async def __call__(self, over: asyncio.Event, delay_s: float) -> None:
        self.delays.append(delay_s)
        self._clock.now += delay_s
        if len(self.delays) >= self._limit:
            self._stop.set()
            await over.wait()


class ScriptedPipeline:
    """Ends each attempt as `attempt` does."""

    def __init__(self, attempt: Callable[[asyncio.Event], object]) -> None:
        self._attempt = attempt
        self.requested: list[TableId] = []

    def request_snapshot(self, tables: Sequence[TableId], where: str | None = None) -> None:
        assert where is None
        if any(t.name == "nope" for t in tables):
            raise OperatorError("table public.nope is not captured")
        self.requested += tables

    async def run(self, stop: asyncio.Event) -> None:
        outcome = self._attempt(stop)
        if asyncio.iscoroutine(outcome):
            await outcome


def supervised(name: str, attempt: Callable[[asyncio.Event], object]) -> SourceSpec:
    return SourceSpec(lambda: cast("Pipeline", ScriptedPipeline(attempt)), watch(name))


def failing(error: Exception) -> Callable[[asyncio.Event], object]:
    def attempt(_: asyncio.Event) -> object:
        raise error

    return attempt


async def delays_after(error: Exception, count: int, *, lasted_s: float = 0.0) -> list[float]:
    clock, stop = Clock(), asyncio.Event()
    waits = Waits(clock, count, stop)

    def attempt(_: asyncio.Event) -> object:
        clock.now += lasted_s
        raise error

    sources = {"shop": supervised("shop", attempt)}
    await Supervisor(sources, wait=waits, monotonic=clock, jitter=lambda: 1.0).run(stop)
    return waits.delays


async def test_transient_faults_back_off_from_half_a_second_to_thirty() -> None:
    delays = await delays_after(LOST, 9)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_jitter_takes_up_to_half_of_a_delay() -> None:
    for attempt in range(1, 40):
        longest = RETRY.delay_s(LOST, attempt, 1.0)
        assert RETRY.delay_s(LOST, attempt, 0.0) == longest / 2
        assert longest / 2 < RETRY.delay_s(LOST, attempt, 0.3) < longest <= 30.0


@pytest.mark.parametrize("reason", ["claimed", "claim_lost", "slot_active"])
def test_a_source_held_by_another_daemon_is_retried_soon(reason: str) -> None:
    """So that an update costs less than 15 s, however early the new daemon was started."""
    held = TransientError("another ingestd works on it", reason=reason)
    assert RETRY.delay_s(held, 1, 1.0) == RETRY.delay_s(LOST, 1, 1.0)
    assert [RETRY.delay_s(held, attempt, 1.0) for attempt in (6, 20)] == [3.0, 3.0]


@pytest.mark.parametrize("error", [DENIED, ProtocolError("bad byte"), ZeroDivisionError("ours")])
async def test_what_needs_a_person_is_tried_again_every_minute(error: Exception) -> None:
    assert await delays_after(error, 4) == [60.0] * 4


async def test_a_pipeline_that_had_settled_backs_off_from_the_start() -> None:
    assert await delays_after(LOST, 3, lasted_s=61.0) == [0.5, 0.5, 0.5]
    assert await delays_after(LOST, 3, lasted_s=59.0) == [0.5, 1.0, 2.0]


async def test_a_state_is_logged_once_with_its_remedy() -> None:
    with capture_logs() as logged:
        await delays_after(DENIED, 5)
    [failed] = [entry for entry in logged if entry["event"] == "source.failed"]
    assert failed["reason"] == DENIED.what
    assert failed["remedy"] == DENIED.remedy
    assert failed["retry_s"] == 60.0
    assert failed["log_level"] == "error"


@pytest.mark.parametrize("where", ["", "source shop, stream, after 0/1"])
async def test_of_a_protocol_error_source_and_remedy_are_logged(where: str) -> None:
    with capture_logs() as logged:
        await delays_after(ProtocolError("bad byte", where=where), 1)
    [failed] = [entry for entry in logged if entry["event"] == "source.failed"]
    assert failed["reason"] == f"{where or 'source shop'}: bad byte"
    assert failed["remedy"] == PROTOCOL_REMEDY


async def test_an_unknown_error_stops_the_source_and_logs_its_place() -> None:
    fault = ZeroDivisionError("ours")
    with capture_logs() as logged:
        await delays_after(fault, 1)
    [unknown] = [entry for entry in logged if entry["event"] == "source.unknown_error"]
    assert unknown["error"] == "ZeroDivisionError"
    assert unknown["where"]
    assert "ours" not in str(logged), "an error's text may quote values of rows"
    [failed] = [entry for entry in logged if entry["event"] == "source.failed"]
    assert "ZeroDivisionError" in failed["reason"]
    assert failed["state"] == "stopped"


async def test_isolated_a_failing_source_leaves_the_others_running() -> None:
    stop, delivered = asyncio.Event(), asyncio.Event()

    async def deliver(stopping: asyncio.Event) -> None:
        delivered.set()
        await stopping.wait()

    sources = {
        "bad": supervised("bad", failing(DENIED)),
        "worse": supervised("worse", failing(ValueError("ours"))),
        "good": supervised("good", deliver),
    }
    task = asyncio.create_task(Supervisor(sources).run(stop))
    status = DaemonStatus("0", datetime.now(UTC), {n: state_of(s) for n, s in sources.items()})
    await until(lambda: status.sources["worse"].state is SourceState.STOPPED)
    await until(delivered.is_set)
    assert not task.done()
    is_ready, reasons = ready(status)
    assert not is_ready
    assert any(f"source bad is stopped: {DENIED.what}" in reason for reason in reasons)
    stop.set()
    async with asyncio.timeout(LIMIT_S):
        await task


async def test_a_source_recovers_once_the_cause_is_fixed() -> None:
    stop = asyncio.Event()
    attempts: list[IngestdError | None] = [LOST, None]

    def attempt(stopping: asyncio.Event) -> object:
        error = attempts.pop(0)
        if error is not None:
            raise error
        return stopping.wait()

    source = supervised("shop", attempt)
    task = asyncio.create_task(Supervisor({"shop": source}, jitter=lambda: 0.0).run(stop))
    await until(lambda: not attempts)
    stop.set()
    async with asyncio.timeout(LIMIT_S):
        await task
    assert state_of(source).state is SourceState.CLOSED


@pytest.mark.parametrize("error", [DENIED, LOST])
async def test_a_stop_during_a_wait_returns_at_once(error: IngestdError) -> None:
    stop = asyncio.Event()
    source = supervised("shop", failing(error))
    late = Supervisor({"shop": source}, jitter=lambda: 1.0)
    task = asyncio.create_task(late.run(stop))
    waiting = {SourceState.STOPPED, SourceState.BACKING_OFF}
    await until(lambda: state_of(source).state in waiting)
    stop.set()
    async with asyncio.timeout(0.4):  # less than the shortest delay
        await task
    assert state_of(source).state is SourceState.CLOSED


async def test_no_attempt_is_made_after_the_stop() -> None:
    stop = asyncio.Event()
    stop.set()
    source = supervised("shop", failing(AssertionError("was started")))
    await Supervisor({"shop": source}).run(stop)
    assert state_of(source).state is SourceState.CLOSED
    assert not state_of(source).last_errors


class ScriptedReferences:
    """Ends with an error `faults` times; then runs until it is cancelled."""

    def __init__(self, faults: int) -> None:
        self.runs = 0
        self._faults = faults

    async def run(self) -> None:
        self.runs += 1
        async with asyncio.TaskGroup() as group:
            group.create_task(self._one())

    async def _one(self) -> None:
        if self.runs <= self._faults:
            msg = "ours"
            raise ZeroDivisionError(msg)
        await asyncio.Event().wait()


async def test_i8_reference_tables_that_end_are_logged_and_begin_again() -> None:
    stop = asyncio.Event()
    waits = Waits(Clock(), 3, stop)
    beside = ScriptedReferences(2)
    source = replace(
        supervised("shop", lambda stopping: stopping.wait()),
        references=cast("References", beside),
    )
    with capture_logs() as logged:
        task = asyncio.create_task(Supervisor({"shop": source}, wait=waits).run(stop))
        await until(lambda: beside.runs == 3)
        assert not task.done()
        stop.set()
        async with asyncio.timeout(LIMIT_S):
            await task
    unknown = [entry for entry in logged if entry["event"] == "source.unknown_error"]
    assert [entry["error"] for entry in unknown] == ["ZeroDivisionError"] * 2
    assert waits.delays == [60.0, 60.0]


# --- asking for a snapshot -------------------------------------------------------------------

ORDERS = TableId("public", "orders")


async def test_a_snapshot_is_asked_of_the_pipeline_that_runs() -> None:
    stop = asyncio.Event()
    fail = asyncio.Event()
    pipelines: list[ScriptedPipeline] = []
    watching = watch()

    async def attempt(stopping: asyncio.Event) -> None:
        watching.enter(SourceState.STREAMING)
        await (stopping.wait() if len(pipelines) > 1 else fail.wait())
        if not stopping.is_set():
            raise LOST

    def make() -> Pipeline:
        pipelines.append(ScriptedPipeline(attempt))
        return cast("Pipeline", pipelines[-1])

    supervisor = Supervisor({"shop": SourceSpec(make, watching)}, jitter=lambda: 0.0)
    task = asyncio.create_task(supervisor.run(stop))
    await until(lambda: watching.not_running() is None)
    supervisor.request_snapshot("shop", [ORDERS])
    assert pipelines[0].requested == [ORDERS]
    fail.set()
    await until(lambda: len(pipelines) == 2 and watching.not_running() is None)
    supervisor.request_snapshot("shop", [ORDERS])
    assert [p.requested for p in pipelines] == [[ORDERS], [ORDERS]]
    stop.set()
    async with asyncio.timeout(LIMIT_S):
        await task


async def test_a_table_that_is_not_captured_is_refused_by_the_pipeline() -> None:
    stop = asyncio.Event()
    watching = watch()

    async def attempt(stopping: asyncio.Event) -> None:
        watching.enter(SourceState.STREAMING)
        await stopping.wait()

    source = SourceSpec(lambda: cast("Pipeline", ScriptedPipeline(attempt)), watching)
    supervisor = Supervisor({"shop": source})
    task = asyncio.create_task(supervisor.run(stop))
    await until(lambda: watching.not_running() is None)
    with pytest.raises(OperatorError, match=r"public\.nope is not captured"):
        supervisor.request_snapshot("shop", [ORDERS, TableId("public", "nope")])
    stop.set()
    async with asyncio.timeout(LIMIT_S):
        await task


@pytest.mark.parametrize(("error", "state"), [(DENIED, "stopped"), (LOST, "backing_off")])
async def test_a_source_that_does_not_run_says_why(error: IngestdError, state: str) -> None:
    stop = asyncio.Event()
    source = supervised("shop", failing(error))
    supervisor = Supervisor({"shop": source}, jitter=lambda: 1.0)
    with pytest.raises(TransientError, match="source shop is starting"):
        supervisor.request_snapshot("shop", [ORDERS])
    task = asyncio.create_task(supervisor.run(stop))
    await until(lambda: str(state_of(source).state) == state)
    with pytest.raises(TransientError) as caught:
        supervisor.request_snapshot("shop", [ORDERS])
    assert caught.value.what == f"source shop is {state}: {error.what}"
    assert caught.value.remedy == (error.remedy or "retry when it is streaming")
    stop.set()
    async with asyncio.timeout(LIMIT_S):
        await task


def state_of(source: SourceSpec) -> SourceStatus:
    return source.telemetry.status
