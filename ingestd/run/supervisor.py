"""The supervisor: keeps every source's pipeline going, each on its own (I8).

===================  ==============================================  ===========================
what ended it        state                                           tried again after
===================  ==============================================  ===========================
`TransientError`     backing_off                                     0.5 s doubling to 30 s, jitter
any other error      stopped: a person must act; never guess         60 s
stop                 closed                                          not again
===================  ==============================================  ===========================
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ingestd.errors import IngestdError, TransientError
from ingestd.observe.status import SourceState
from ingestd.run.pipeline import Pipeline
from ingestd.run.references import References, refused
from ingestd.run.retrying import OPERATOR_DELAY_S, retry_delay_s
from ingestd.run.watch import Watch
from ingestd.schema import TableId

SETTLED_S = 60.0
"""A pipeline that ran this long starts over with the first delay."""


@dataclass(frozen=True, slots=True)
class Supervised:
    """A source: how to make a pipeline for one attempt, what watches it, what runs beside it."""

    make_pipeline: Callable[[], Pipeline]
    watch: Watch
    references: References | None = None
    maintainer: Beside | None = None


class Beside(Protocol):
    """What runs beside a pipeline until it is cancelled."""

    async def run(self) -> None:
        """Run until cancelled; nothing of it goes on then."""
        ...


class Supervisor:
    """Runs sources until `stop` is set."""

    def __init__(
        self,
        sources: Mapping[str, Supervised],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._sources = sources
        self._monotonic = monotonic
        self._jitter = jitter
        self._running: dict[str, Pipeline] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Return when all sources have stopped."""
        async with asyncio.TaskGroup() as group:
            for name, source in self._sources.items():
                group.create_task(self._keep(name, source, stop), name=f"source {name}")
                if source.references is not None:
                    beside = self._keep_beside(source.references, source.watch, stop)
                    group.create_task(beside, name=f"references of {name}")
                if source.maintainer is not None:
                    beside = self._keep_beside(source.maintainer, source.watch, stop)
                    group.create_task(beside, name=f"maintenance of {name}")

    def request_snapshot(
        self, source: str, tables: Sequence[TableId], where: str | None = None
    ) -> None:
        """Have tables of a source read anew, or the rows that `where` (SQL) holds for.

        All goes on meanwhile. Raises KeyError for an unknown source, OperatorError for a table that
        is not captured, TransientError while the source does not run. A reference table that is not
        streamed is read whole, and can't be read in part.
        """
        references = self._sources[source].references
        own = [t for t in tables if references is not None and t in references.asked]
        others = [t for t in tables if t not in own]
        if own and where is not None:
            raise refused(own)
        if others:
            self._pipeline(source).request_snapshot(others, where)
            watch = self._sources[source].watch
            watch.snapshot_requested(others, partial=where is not None)
        if own and references is not None:
            references.request(own)

    def cancel_snapshot(self, source: str, tables: Sequence[TableId]) -> None:
        """Give up the snapshots of these tables, asked for or under way; the old rows stay.

        Raises KeyError for an unknown source, OperatorError for a table that has none,
        TransientError while the source does not run.
        """
        references = self._sources[source].references
        own = [t for t in tables if references is not None and t in references.asked]
        if own:
            raise refused(own)
        self._pipeline(source).cancel_snapshot(tables)
        self._sources[source].watch.snapshot_cancelled(tables)

    def _pipeline(self, source: str) -> Pipeline:
        fault = self._sources[source].watch.not_running()
        pipeline = self._running.get(source)
        if fault is not None or pipeline is None:
            raise fault or TransientError(f"source {source} is starting", reason="not_running")
        return pipeline

    async def _keep(self, name: str, source: Supervised, stop: asyncio.Event) -> None:
        attempt = 0
        while not stop.is_set():
            began = self._monotonic()
            error = await self._attempt(name, source, stop)
            if error is None:
                break
            attempt = 1 if self._monotonic() - began >= SETTLED_S else attempt + 1
            delay_s = retry_delay_s(error, attempt, self._jitter())
            source.watch.failed(error, delay_s)
            await _wait(stop, delay_s)
        source.watch.enter(SourceState.CLOSED)

    async def _keep_beside(self, beside: Beside, watch: Watch, stop: asyncio.Event) -> None:
        """Its faults are each table's own: what ends it all is none of these, and is logged."""
        while not stop.is_set():
            error = await _until_stop(beside, stop)
            if error is None:
                return
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            watch.unknown(error)
            await _wait(stop, OPERATOR_DELAY_S)

    async def _attempt(
        self, name: str, source: Supervised, stop: asyncio.Event
    ) -> IngestdError | None:
        try:
            self._running[name] = source.make_pipeline()
            await self._running[name].run(stop)
        except IngestdError as error:
            return error
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - only this source stops, a Rust panic too
            return source.watch.unknown(error)
        finally:
            self._running.pop(name, None)
        return None


async def _until_stop(beside: Beside, stop: asyncio.Event) -> BaseException | None:
    """Run it until `stop` is set or it ends by itself; give what it ended with."""
    running = asyncio.create_task(beside.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        running.cancel()
        stopping.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)
    return None if running.cancelled() else running.exception()


async def _wait(stop: asyncio.Event, delay_s: float) -> None:
    """Return after the delay, or as soon as `stop` is set."""
    try:
        async with asyncio.timeout(delay_s):
            await stop.wait()
    except TimeoutError:
        return
