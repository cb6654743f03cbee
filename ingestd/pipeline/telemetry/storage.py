"""Logs storage that does not answer: once when it begins, once when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from structlog.typing import FilteringBoundLogger

from ingestd.observe.status import DaemonStatus
from ingestd.ports import StorageWait

LOOK_INTERVAL_S = 1.0


class StorageTelemetry:
    """For all sources of `status`. /readyz and /status check on their own."""

    def __init__(self, status: DaemonStatus, log: FilteringBoundLogger) -> None:
        self._status = status
        self._log = log
        self._reported: dict[str, StorageWait] = {}

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            self.report_changes()
            await asyncio.sleep(LOOK_INTERVAL_S)

    def report_changes(self) -> None:
        """Log what is new."""
        waits = dict(self._waits())
        for name, wait in waits.items():
            if name not in self._reported:
                self._log.warning(
                    "storage.waits",
                    source=name,
                    path=wait.path,
                    seconds=round(wait.seconds, 1),
                    remedy=wait.remedy,
                )
        for name, wait in self._reported.items():
            if name not in waits:
                self._log.info("storage.answered", source=name, path=wait.path)
        self._reported = waits

    def _waits(self) -> Iterator[tuple[str, StorageWait]]:
        for name, source in self._status.sources.items():
            if (wait := source.storage()) is not None:
                yield name, wait
