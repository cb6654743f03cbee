"""Runs one source, delivering or paused, and retries it after faults.

===================  ==============================================  ===========================
ended by             state                                           retried after
===================  ==============================================  ===========================
`TransientError`     backing_off                                     0.5 s doubling to 30 s, jitter
any other error      stopped: operator action required, no guesses   60 s
a pause              paused                                          when it is resumed
the end              closed                                          never
===================  ==============================================  ===========================

The pause is recorded in the lake alone (`PauseMark`), and read at the start of each phase. A
command changes the pause mark, then ends the phase. So the mark holds, whatever the order of the
commands, and whenever the daemon is killed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from ingestd.model.errors import IngestdError, ProtocolError, TransientError
from ingestd.observe.status import SourceState
from ingestd.pipeline.known_lake import KnownLake
from ingestd.pipeline.pipeline import Pipeline
from ingestd.pipeline.reference_tables import References
from ingestd.pipeline.retry import ONCE_ATTEMPTS, RETRY, RetryPolicy
from ingestd.pipeline.telemetry.source import SourceTelemetry
from ingestd.ports import PauseMark
from ingestd.process.clock import utc_now
from ingestd.process.tasks import cancel_all

SETTLED_S = 60.0
"""A pipeline that ran this long starts over with the first delay."""


class BackgroundJob(Protocol):
    """A job that runs alongside a pipeline, or instead of it, until it is cancelled."""

    async def run(self) -> None:
        """Run until cancelled; nothing of it continues then."""
        ...


class MaintenanceJob(BackgroundJob, Protocol):
    """The job that maintains a source's lake."""

    async def maintain(self) -> None:
        """Do at once all that is done from time to time."""
        ...


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """A source: how to create a pipeline for one attempt, its telemetry, its background jobs.

    `mark`: its pause mark; None: it can't be paused. `make_paused`: creates the job that
    runs while it is paused. `known`: background jobs run while this says that the lake is the
    source's.
    """

    make_pipeline: Callable[[], Pipeline]
    telemetry: SourceTelemetry
    references: References | None = None
    maintainer: MaintenanceJob | None = None
    mark: PauseMark | None = None
    make_paused: Callable[[], BackgroundJob] | None = None
    known: KnownLake | None = None


async def wait_unless_over(over: asyncio.Event, delay_s: float) -> None:
    """Return after the delay, or as soon as `over` is set."""
    try:
        async with asyncio.timeout(delay_s):
            await over.wait()
    except TimeoutError:
        return


Wait = Callable[[asyncio.Event, float], Awaitable[None]]


class SourceRunner:
    """Runs one source until `request_stop`. `pipeline`: the current attempt's.

    `once`: it ends when the lake has all that the source has committed by then, and
    `is_drained`; or with the `fault` that prevents it.
    """

    def __init__(
        self,
        source: SourceSpec,
        *,
        once: bool = False,
        retry: RetryPolicy = RETRY,
        wait: Wait = wait_unless_over,
        monotonic: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.source = source
        self.pipeline: Pipeline | None = None
        self.is_drained = False
        self.fault: IngestdError | None = None
        self._is_once = once
        self._retry = retry
        self._wait = wait
        self._monotonic = monotonic
        self._jitter = jitter
        self._now = now
        self._phase_over = asyncio.Event()
        self._is_ended = False
        self._is_paused = False
        self._changing = asyncio.Lock()

    @property
    def name(self) -> str:
        """The source's name."""
        return self.source.telemetry.source

    def request_stop(self) -> None:
        """Make `run` close the source and return."""
        self._is_ended = True
        self._phase_over.set()

    async def pause(self) -> datetime | None:
        """Pause the source until `resume`; return since when, None if it can't be paused.

        The pause mark is durable when this returns; the pipeline may still be finishing its epoch.
        Raises OperatorError, TransientError (the lake): then nothing has changed.
        """
        mark = self.source.mark
        if mark is None:
            return None
        async with self._changing:
            since = await mark.put(self._now())
            if not self._is_paused:
                self._phase_over.set()
        return since

    async def resume(self) -> bool:
        """Continue where the source was; False if it was not paused. Raises as `pause`."""
        mark = self.source.mark
        if mark is None:
            return False
        async with self._changing:
            was_paused = await mark.clear()
            if was_paused or self._is_paused:
                self._phase_over.set()
        return was_paused

    async def check_pause_mark(self) -> None:
        """Check whether another process paused or resumed the source. Raises as `pause`."""
        mark = self.source.mark
        if mark is None:
            return
        async with self._changing:
            if (await mark.since() is not None) is not self._is_paused:
                self._phase_over.set()

    async def run(self) -> None:
        """Run the source; return once it has ended."""
        while not self._is_ended:
            over = self._phase_over = asyncio.Event()
            self._is_paused = False  # until the mark is read: a pause that arrives now counts
            since = await self._paused_since(over)
            if over.is_set():
                continue
            if since is None:
                await self._deliver(over)
            elif self._is_once:
                self.source.telemetry.paused(since)
                self._fail(self.source.telemetry.paused_fault())
            else:
                self._is_paused = True
                await self._stay_paused(since, over)
        self.source.telemetry.enter(SourceState.CLOSED)

    async def _paused_since(self, over: asyncio.Event) -> datetime | None:
        """Read the pause mark, retrying indefinitely: nothing is delivered before it is known."""
        attempt = 0
        while self.source.mark is not None and not over.is_set():
            try:
                return await self.source.mark.since()
            except IngestdError as error:
                attempt += 1
                await self._wait_to_retry(error, attempt, over)
        return None

    async def _wait_to_retry(self, error: IngestdError, attempt: int, over: asyncio.Event) -> None:
        """Report a fault and wait until it is retried; end instead, if it runs once."""
        delay_s = self._retry.delay_s(error, attempt, self._jitter())
        self.source.telemetry.failed(error, delay_s)
        if self._is_once and (attempt >= ONCE_ATTEMPTS or not isinstance(error, TransientError)):
            self._fail(error)
        else:
            await self._wait(over, delay_s)

    def _fail(self, error: IngestdError) -> None:
        self.fault = error
        self.request_stop()

    async def _stay_paused(self, since: datetime, over: asyncio.Event) -> None:
        self.source.telemetry.paused(since)
        if self.source.make_paused is None:
            await over.wait()
        else:
            await self._keep_beside(self.source.make_paused(), over)

    async def _deliver(self, over: asyncio.Event) -> None:
        self.source.telemetry.resumed()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep(over), name=f"source {self.name}")
            if self.source.references is not None:
                beside = self._keep_writing(self.source.references, over)
                group.create_task(beside, name=f"references of {self.name}")
            if self.source.maintainer is not None:
                beside = self._keep_writing(self.source.maintainer, over)
                group.create_task(beside, name=f"maintenance of {self.name}")

    async def _keep(self, over: asyncio.Event) -> None:
        attempt = 0
        while not over.is_set():
            began = self._monotonic()
            error = await self._attempt(over)
            if error is None:
                return
            is_settled = self._monotonic() - began >= SETTLED_S and not self._is_once
            attempt = 1 if is_settled else attempt + 1
            await self._wait_to_retry(error, attempt, over)

    async def _keep_beside(self, beside: BackgroundJob, over: asyncio.Event) -> None:
        """Run a job, and restart it after an unexpected error, which is logged."""
        while not over.is_set():
            error = await _until(over, beside)
            if error is None:
                return
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self.source.telemetry.unknown(error)
            await self._wait(over, self._retry.operator_delay_s)

    async def _keep_writing(self, beside: BackgroundJob, over: asyncio.Event) -> None:
        """Run a job that writes to the lake too, while the lake is the source's."""
        known = self.source.known
        while not over.is_set():
            if known is None:
                await self._keep_beside(beside, over)
            elif await _first_of(over, known.found) is known.found:
                keeping = asyncio.create_task(self._keep_beside(beside, over))
                try:
                    await _first_of(over, known.lost, or_task=keeping)
                finally:
                    if not over.is_set():
                        keeping.cancel()
                    await asyncio.gather(keeping, return_exceptions=True)

    async def _end(self) -> None:
        """End after everything is in the lake: bring the rest up to date."""
        telemetry = self.source.telemetry
        self.fault = None  # of an earlier attempt
        try:
            if self.source.references is not None:
                await self.source.references.drain()
        except IngestdError as error:  # of a reference table
            self.fault = error
        if self.source.maintainer is not None:
            try:
                await self.source.maintainer.maintain()
            except OSError as error:  # no process or temporary file for it
                self.fault = self.fault or telemetry.unknown(error)
        self.fault = telemetry.stopped_fault() or self.fault
        self.is_drained = self.fault is None
        telemetry.drained()
        self.request_stop()

    async def _attempt(self, over: asyncio.Event) -> IngestdError | None:
        try:
            self.pipeline = self.source.make_pipeline()
            if self._is_once:
                await self.pipeline.run(over, drained=self._end)
            else:
                await self.pipeline.run(over)
        except ProtocolError as error:
            return error.within(f"source {self.name}")
        except IngestdError as error:
            return error
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - only this source stops, a Rust panic too
            return self.source.telemetry.unknown(error)
        finally:
            self.pipeline = None
        return None


async def _until(over: asyncio.Event, beside: BackgroundJob) -> BaseException | None:
    """Run the job until `over` is set or it ends; return the error that ended it."""
    running = asyncio.create_task(beside.run())
    ending = asyncio.create_task(over.wait())
    try:
        await asyncio.wait([running, ending], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all(running, ending)
    return None if running.cancelled() else running.exception()


async def _first_of(
    *events: asyncio.Event, or_task: asyncio.Task[None] | None = None
) -> asyncio.Event | None:
    """Return the first of these events that is set; None if the task ended before."""
    waiting = {asyncio.create_task(event.wait()): event for event in events}
    tasks = [*waiting, *([] if or_task is None else [or_task])]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_all(*waiting)
    return next((event for event in events if event.is_set()), None)
