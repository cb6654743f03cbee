"""A pipeline between any capture and any lake, run inside a test."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from ingestd.observe.metrics import Metrics
from ingestd.observe.status import SourceStatus
from ingestd.pipeline.filling_epoch import EpochPolicy
from ingestd.pipeline.pipeline import Pipeline
from ingestd.pipeline.policy import PipelinePolicy
from ingestd.pipeline.telemetry.source import SourceTelemetry
from ingestd.process.clock import utc_now

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from ingestd.ports import ChangeCapture, Sink

LIMIT_S = 15.0
AT_ONCE = PipelinePolicy(EpochPolicy(0.0, 1 << 20), idle_interval_s=0.01)
"""Each epoch is committed as soon as the one before is durable."""


def telemetry_of(source: str = "shop") -> SourceTelemetry:
    """Return new telemetry, with new metrics."""
    return SourceTelemetry(SourceStatus(source, utc_now()), Metrics(), structlog.get_logger())


async def until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Wait for a condition that other tasks bring about. Raise TimeoutError after `limit_s`."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - the fakes have no event for every condition
            await asyncio.sleep(0.001)


@asynccontextmanager
async def running_pipeline(
    capture: ChangeCapture,
    sink: Sink,
    *,
    policy: PipelinePolicy = AT_ONCE,
    telemetry: SourceTelemetry | None = None,
) -> AsyncIterator[asyncio.Task[None]]:
    """Run a pipeline in a task, which the context yields.

    At the end of the context it is stopped as by SIGTERM, unless it has ended already. If the
    context fails, the pipeline's own fault is raised instead, if it has one: it is the cause.
    """
    stop = asyncio.Event()
    pipeline = Pipeline(capture, sink, policy, telemetry or telemetry_of())
    task = asyncio.create_task(pipeline.run(stop))
    failed = False
    try:
        yield task
    except BaseException:
        failed = True
        raise
    finally:
        stop.set()
        [ended] = await asyncio.gather(task, return_exceptions=True)
        if failed and isinstance(ended, BaseException):
            raise ended
