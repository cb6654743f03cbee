"""A paused source: its claim is kept, and what the source retains for it is measured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ingestd.model.errors import IngestdError
from ingestd.pipeline.policy import MONITOR_INTERVAL_S
from ingestd.pipeline.telemetry.source import SourceTelemetry
from ingestd.ports import ChangeCapture, Sink

RETRY_S = 15.0
"""Delay before retrying a server that is unreachable or whose source another daemon holds."""


class Paused:
    """Runs until cancelled. Reads none of the source's changes or rows, writes nothing.

    The claim keeps a second daemon, with another lake or another name for it, from taking the slot
    meanwhile; a daemon on the same lake sees the pause mark. An unreachable server is not a fault
    of a paused source, which may be paused because of it: the log reports once that nothing can be
    measured. `make_sink`: returns a lake that is only read.
    """

    def __init__(
        self,
        make_capture: Callable[[], ChangeCapture],
        make_sink: Callable[[], Sink],
        telemetry: SourceTelemetry,
    ) -> None:
        self._make_capture = make_capture
        self._make_sink = make_sink
        self._telemetry = telemetry

    async def run(self) -> None:
        """Run until cancelled; then release the claim."""
        while True:
            try:
                if not self._telemetry.knows_lake:
                    await self._show_lake()
                await self._keep_claim()
            except IngestdError as error:
                self._telemetry.not_measured(error)
            await asyncio.sleep(RETRY_S)

    async def _show_lake(self) -> None:
        sink = self._make_sink()
        try:
            self._telemetry.lake_read_while_paused(await sink.open())
        finally:
            await sink.close()

    async def _keep_claim(self) -> None:
        capture = self._make_capture()
        try:
            await capture.claim()
            while True:
                await capture.health()
                self._telemetry.report_retained(await capture.lag())
                await asyncio.sleep(MONITOR_INTERVAL_S)
        finally:
            await capture.close()
