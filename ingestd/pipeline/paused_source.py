"""What goes on of a paused source: its claim is held, and what is kept for it is measured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ingestd.model.errors import IngestdError
from ingestd.pipeline.pipeline import MONITOR_INTERVAL_S
from ingestd.pipeline.telemetry.source import SourceTelemetry
from ingestd.ports import ChangeCapture, Sink

RETRY_S = 15.0
"""How soon a server that can't be asked, or has another on the source, is asked again."""


class Paused:
    """Until cancelled. Nothing is read of the source's changes or rows, nothing is written.

    The claim keeps a second daemon, on another lake or with another name for it, from taking the
    slot meanwhile; who has the same lake sees the mark. A server that can't be reached is no fault
    of a source that is paused, perhaps for that: the log says once that nothing can be measured.
    `make_sink`: gives a lake that is only looked at.
    """

    def __init__(
        self,
        make_capture: Callable[[], ChangeCapture],
        make_sink: Callable[[], Sink],
        watch: SourceTelemetry,
    ) -> None:
        self._make_capture = make_capture
        self._make_sink = make_sink
        self._watch = watch

    async def run(self) -> None:
        """Run until cancelled; the claim is let go then."""
        while True:
            try:
                if not self._watch.knows_lake:
                    await self._look_at_lake()
                await self._hold()
            except IngestdError as error:
                self._watch.not_measured(error)
            await asyncio.sleep(RETRY_S)

    async def _look_at_lake(self) -> None:
        sink = self._make_sink()
        try:
            self._watch.found(await sink.open())
        finally:
            await sink.close()

    async def _hold(self) -> None:
        capture = self._make_capture()
        try:
            await capture.claim()
            while True:
                await capture.health()
                self._watch.held(await capture.lag())
                await asyncio.sleep(MONITOR_INTERVAL_S)
        finally:
            await capture.close()
