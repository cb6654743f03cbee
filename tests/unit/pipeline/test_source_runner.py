"""A source's life: delivering, paused, going on, in whatever order it is asked for."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

import pytest
from structlog.testing import capture_logs

from ingestd.model.errors import OperatorError, TransientError
from ingestd.model.schema import TableId
from ingestd.observe.status import SourceState
from ingestd.pipeline.source_runner import SourceRunner, SourceSpec
from ingestd.pipeline.supervisor import Supervisor
from ingestd.testing.fakes.pause import FakePauseMark
from tests.unit.pipeline.fixtures import LIMIT_S, until, watch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ingestd.pipeline.pipeline import Pipeline
    from ingestd.pipeline.telemetry.source import SourceTelemetry

SINCE = datetime(2026, 11, 22, 12, tzinfo=UTC)
FULL = OperatorError("lake ./lake: the disk is full", remedy="free space there")


class Told:
    """What a source does: pipelines that run until they are stopped, and what runs paused."""

    def __init__(self) -> None:
        self.mark = FakePauseMark()
        self.watch: SourceTelemetry = watch()
        self.delivering = 0
        self.attempts = 0
        self.holding = 0
        self.source = SourceSpec(
            lambda: cast("Pipeline", self),
            self.watch,
            mark=self.mark,
            make_paused=lambda: Held(self),
        )
        self.one = SourceRunner(self.source, jitter=lambda: 0.0, now=lambda: SINCE)

    @property
    def state(self) -> SourceState:
        return self.watch.status.state

    async def run(self, stop: asyncio.Event) -> None:
        """A pipeline's."""
        assert self.holding == 0
        self.attempts += 1
        self.delivering += 1
        self.watch.enter(SourceState.STREAMING)
        await stop.wait()
        await asyncio.sleep(0)  # it finishes its epoch
        self.delivering -= 1


class Held:
    """What runs while it is paused."""

    def __init__(self, told: Told) -> None:
        self._told = told

    async def run(self) -> None:
        assert self._told.delivering == 0, "nothing is held before the pipeline has ended"
        self._told.holding += 1
        try:
            await asyncio.Event().wait()
        finally:
            self._told.holding -= 1


@asynccontextmanager
async def running(told: Told) -> AsyncIterator[None]:
    task = asyncio.create_task(told.one.run())
    try:
        yield
    finally:
        told.one.request_stop()
        async with asyncio.timeout(LIMIT_S):
            await task
    assert told.state is SourceState.CLOSED
    assert (told.delivering, told.holding) == (0, 0)


async def test_a_pause_ends_the_pipeline_and_a_resume_begins_another() -> None:
    told = Told()
    async with running(told):
        await until(lambda: told.delivering == 1)
        assert await told.one.pause() == SINCE
        await until(lambda: told.holding == 1)
        assert (told.state, told.watch.status.since) == (SourceState.PAUSED, SINCE)
        assert await told.one.resume()
        await until(lambda: told.delivering == 1)
        assert told.attempts == 2
        assert not await told.one.resume()
        await asyncio.sleep(0)
        assert told.attempts == 2, "what was not paused is left alone"


async def test_a_pause_that_comes_while_a_resume_reads_the_mark_holds() -> None:
    told = Told()
    told.mark.at = SINCE
    is_read, goes_on = asyncio.Event(), asyncio.Event()
    async with running(told):
        await until(lambda: told.holding == 1)
        since = told.mark.since

        async def slow() -> datetime | None:
            found = await since()
            is_read.set()
            await goes_on.wait()
            return found

        told.mark.since = slow  # type: ignore[method-assign]
        assert await told.one.resume()
        await is_read.wait()
        await told.one.pause()
        goes_on.set()
        await until(lambda: told.holding == 1)
        assert told.attempts == 0


async def test_a_source_that_was_paused_before_delivers_nothing() -> None:
    told = Told()
    told.mark.at = SINCE
    async with running(told):
        await until(lambda: told.holding == 1)
    assert told.attempts == 0


async def test_the_last_of_many_commands_holds() -> None:
    told = Told()
    async with running(told):
        for number in range(20):
            await (told.one.pause() if number % 2 else told.one.resume())
            for _ in range(number):
                await asyncio.sleep(0)
        await until(lambda: told.holding == 1)
        for number in range(21):
            await (told.one.pause() if number % 2 else told.one.resume())
        await until(lambda: told.delivering == 1)


async def test_twice_is_as_once_and_is_logged_once() -> None:
    told = Told()
    with capture_logs() as logged:
        async with running(told):
            await told.one.pause()
            await until(lambda: told.holding == 1)
            assert await told.one.pause() == SINCE
            await until(lambda: told.holding == 1)
    assert [e["event"] for e in logged].count("source.paused") == 1


async def test_a_pause_that_cannot_be_stored_is_refused() -> None:
    told = Told()
    async with running(told):
        await until(lambda: told.delivering == 1)
        told.mark.error = FULL
        with pytest.raises(OperatorError, match="the disk is full"):
            await told.one.pause()
        told.mark.error = None
        assert (told.delivering, told.attempts) == (1, 1)


async def test_nothing_is_delivered_before_the_pause_mark_is_known() -> None:
    told = Told()
    told.mark.error = TransientError("lake s3://x: slow down", reason="storage")
    async with running(told):
        await until(lambda: told.state is SourceState.BACKING_OFF)
        assert told.attempts == 0
        told.mark.error = None
        await until(lambda: told.delivering == 1)


async def test_a_pause_takes_a_source_out_of_its_wait_after_a_fault() -> None:
    told = Told()
    told.mark.error = FULL  # tried again after a minute
    async with running(told):
        await until(lambda: told.state is SourceState.STOPPED)
        told.mark.error = None
        await told.one.pause()
        await until(lambda: told.holding == 1)
        assert told.watch.status.reason is None


async def test_a_check_notices_a_mark_set_by_another_process() -> None:
    told = Told()
    async with running(told):
        await until(lambda: told.delivering == 1)
        await told.one.check_pause_mark()
        told.mark.at = SINCE
        await told.one.check_pause_mark()
        await until(lambda: told.holding == 1)
        told.mark.at = None
        await told.one.check_pause_mark()
        await until(lambda: told.delivering == 1)
    assert told.attempts == 2


async def test_a_paused_source_takes_no_snapshots_and_says_what_to_do() -> None:
    told, stop = Told(), asyncio.Event()
    told.mark.at = SINCE
    supervisor = Supervisor({"shop": told.source})
    task = asyncio.create_task(supervisor.run(stop))
    await until(lambda: told.holding == 1)
    for ask in (supervisor.request_snapshot, supervisor.cancel_snapshot):
        with pytest.raises(OperatorError, match="shop is paused since 2026-11-22 12:00:00") as said:
            ask("shop", [TableId("public", "t")])
        assert said.value.remedy == "ingestd resume shop"
    stop.set()
    async with asyncio.timeout(LIMIT_S):
        await task


async def test_a_source_is_stopped_and_started_while_others_run() -> None:
    shop, other, stop = Told(), Told(), asyncio.Event()
    supervisor = Supervisor({"shop": shop.source, "other": other.source})
    task = asyncio.create_task(supervisor.run(stop))
    await until(lambda: shop.delivering == other.delivering == 1)
    async with asyncio.timeout(LIMIT_S):
        await supervisor.stop_source("shop")
    assert (shop.delivering, shop.state) == (0, SourceState.CLOSED)
    with pytest.raises(TransientError, match="source shop does not exist"):
        await supervisor.pause("shop")
    again = Told()
    supervisor.start_source("shop", again.source)
    await until(lambda: again.delivering == 1)
    assert (other.delivering, other.attempts) == (1, 1)
    stop.set()
    async with asyncio.timeout(LIMIT_S):
        await task
    supervisor.start_source("late", shop.source)
    assert shop.attempts == 1, "nothing begins while all stop"
