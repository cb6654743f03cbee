"""The supervisor: runs every source independently (I8), and passes commands on to them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial

from ingestd.model.errors import OperatorError, TransientError
from ingestd.model.schema import TableId
from ingestd.pipeline.pipeline import Pipeline
from ingestd.pipeline.reference_tables import refused
from ingestd.pipeline.retry import RETRY, RetryPolicy
from ingestd.pipeline.source_runner import SourceRunner, SourceSpec, Wait, wait_unless_over


def _interrupted(source: str) -> TransientError:
    return TransientError(
        f"source {source} was stopped before it was drained",
        reason="interrupted",
        remedy="nothing was lost: run the command again",
    )


class Supervisor:
    """Runs sources until `stop` is set; sources can be added and removed meanwhile.

    `once`: each source ends when it is drained (`SourceRunner`).
    """

    def __init__(
        self,
        sources: Mapping[str, SourceSpec],
        *,
        once: bool = False,
        retry: RetryPolicy = RETRY,
        wait: Wait = wait_unless_over,
        monotonic: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._make_runner = partial(
            SourceRunner, once=once, retry=retry, wait=wait, monotonic=monotonic, jitter=jitter
        )
        self._sources = {name: self._make_runner(source) for name, source in sources.items()}
        self._is_once = once
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Run all sources; return when they have stopped.

        With `once`, raise the fault of a source that could not be drained: of several, one that
        needs an operator.
        """
        async with asyncio.TaskGroup() as group:
            self._group = group
            for name in self._sources:
                self._start(name)
            await self._until_over(stop)
            self._group = None
            for source in self._sources.values():
                source.request_stop()
        if self._is_once:
            self._raise_undrained()

    async def _until_over(self, stop: asyncio.Event) -> None:
        """Return when `stop` is set, or with `once` when all sources have ended."""
        if not self._is_once:
            await stop.wait()
            return
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set() and any(not task.done() for task in self._tasks.values()):
                running = [task for task in self._tasks.values() if not task.done()]
                await asyncio.wait([stopping, *running], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()

    def _raise_undrained(self) -> None:
        faults = [
            runner.fault or _interrupted(name)
            for name, runner in self._sources.items()
            if not runner.is_drained
        ]
        for fault in sorted(faults, key=lambda fault: isinstance(fault, TransientError)):
            raise fault

    def start_source(self, name: str, source: SourceSpec) -> None:
        """Run one more source, unless all are being stopped."""
        self._sources[name] = self._make_runner(source)
        self._start(name)

    async def stop_source(self, name: str) -> None:
        """Stop one source cleanly; it is removed when this returns."""
        self._sources[name].request_stop()
        task = self._tasks.pop(name, None)
        if task is not None:
            await asyncio.wait([task])
        del self._sources[name]

    async def check_pause_marks(self) -> None:
        """Check for sources that another process paused or resumed in the lake.

        Raises OperatorError, TransientError (the lake).
        """
        for source in list(self._sources.values()):
            await source.check_pause_mark()

    def _start(self, name: str) -> None:
        if self._group is not None:
            self._tasks[name] = self._group.create_task(self._sources[name].run(), name=name)

    # --- commands ------------------------------------------------------------------------------

    async def pause(self, source: str) -> datetime:
        """Pause a source until it is resumed; return since when it is paused.

        Raises OperatorError, TransientError (the lake; an unknown source).
        """
        since = await self._of(source).pause()
        if since is None:
            raise OperatorError(f"source {source} can't be paused: it has no lake to mark that in")
        return since

    async def resume(self, source: str) -> bool:
        """Resume a source; False if it was not paused. Raises as `pause`."""
        return await self._of(source).resume()

    def request_snapshot(
        self, source: str, tables: Sequence[TableId], where: str | None = None
    ) -> None:
        """Re-read tables of a source, or the rows for which `where` (SQL) holds.

        The stream continues meanwhile. Raises OperatorError for a table that is not captured and
        while the source is paused, TransientError while it does not run. A reference table that is
        not streamed is read completely, and can't be read in part.
        """
        asked = self._of(source).source
        asked.telemetry.refuse_if_paused()
        references = asked.references
        own = [t for t in tables if references is not None and t in references.on_request]
        others = [t for t in tables if t not in own]
        if own and where is not None:
            raise refused(own)
        if others:
            self._pipeline(source).request_snapshot(others, where)
            asked.telemetry.snapshot_requested(others, partial=where is not None)
        if own and references is not None:
            references.request(own)

    def cancel_snapshot(self, source: str, tables: Sequence[TableId]) -> None:
        """Cancel the snapshots of these tables, requested or running; the old rows stay.

        Raises OperatorError for a table that has none and while the source is paused,
        TransientError while it does not run.
        """
        asked = self._of(source).source
        asked.telemetry.refuse_if_paused()
        references = asked.references
        own = [t for t in tables if references is not None and t in references.on_request]
        if own:
            raise refused(own)
        self._pipeline(source).cancel_snapshot(tables)
        asked.telemetry.snapshot_cancelled(tables)

    def _of(self, source: str) -> SourceRunner:
        found = self._sources.get(source)
        if found is None:
            raise TransientError(
                f"source {source} does not exist or is restarting",
                reason="not_running",
                remedy="retry in a moment",
            )
        return found

    def _pipeline(self, source: str) -> Pipeline:
        asked = self._of(source)
        fault = asked.source.telemetry.not_running()
        if fault is not None or asked.pipeline is None:
            raise fault or TransientError(f"source {source} is starting", reason="not_running")
        return asked.pipeline
