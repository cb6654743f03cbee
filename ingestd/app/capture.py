"""Captures sources inside another program: the daemon as a library.

It installs no signal handlers, configures no logging (the events go to the standard library's
logger ``ingestd``, unless the program has configured structlog), serves no HTTP, and runs in the
caller's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import structlog

from ingestd import __version__
from ingestd.app.build import SourceBuilder
from ingestd.app.factories import lake_of, load, require_source
from ingestd.config import Config
from ingestd.config.redaction import Redactor
from ingestd.model.changes import CommittedEpoch
from ingestd.model.errors import IngestdError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from ingestd.observe.logs import configure_for_library
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import DaemonStatus
from ingestd.observe.status_json import to_json
from ingestd.pipeline.telemetry.source import SourceTelemetry
from ingestd.process.clock import utc_now

_REDACTOR = Redactor()
"""Knows the secrets of every config that this process has opened, as the log is one for all."""


@dataclass(frozen=True, slots=True)
class CapturedEpoch:
    """An epoch of a source that is durable in the lake.

    `number`: as in `_epochs`, from 1. `end_lsn`: everything committed below it is in the lake.
    `committed_at`: aware, UTC. `rows`: the number of change rows of each raw table in it.
    """

    source: str
    number: int
    end_lsn: Lsn
    committed_at: datetime
    transactions: int
    rows: dict[TableId, int]


class Capture:
    """Captures the sources of a config while it is open; iterate over it for the epochs.

    ``async with Capture("config.toml") as capture: async for epoch in capture: ...``

    `config`: a config file, or a `Config`. `once`: the iteration ends when the lake has all that
    the sources have committed; otherwise with `stop`. An iteration step raises the fault of a
    source that needs an operator (OperatorError and its subclasses; with `once` also the last
    TransientError). Without `once` the source is retried every minute all the same, and the
    iteration may be continued. Faults of single tables are in `status`, and are raised at the end
    with `once`. Epochs that are not consumed are kept, at some 200 bytes a table.

    Leaving the block finishes the open epoch and releases the sources, as SIGTERM does.
    """

    def __init__(
        self, config: Config | Path | str, *, once: bool = False, accepted: Collection[str] = ()
    ) -> None:
        """Read the config. Raises ConfigError.

        `accepted`: sources that may start in another lake than the one they were written to.
        """
        self._config = config if isinstance(config, Config) else load(Path(config))
        for name in accepted:
            require_source(self._config, name)
        self._accepted = frozenset(accepted)
        self._is_once = once
        self._stop = asyncio.Event()
        self._results: asyncio.Queue[CapturedEpoch | IngestdError | None] = asyncio.Queue()
        self._status = DaemonStatus(__version__, utc_now(), lake=self._config.lake.uri)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start the sources. Raises OperatorError."""
        _REDACTOR.learn(self._config.redactor)
        if not structlog.is_configured():
            configure_for_library(_REDACTOR)
        building = SourceBuilder(
            lake_of(self._config),
            Metrics(),
            self._status,
            self._config.redactor,
            self._accepted,
            once=self._is_once,
            watch=self._watch,
        )
        for name in self._config.sources:
            building.source(self._config, name)
        self._supervisor = building.supervisor
        self._task = asyncio.create_task(self._run(), name="ingestd capture")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the sources; return when nothing of them runs any more."""
        self.stop()
        if self._task is not None:
            await self._task

    def __aiter__(self) -> AsyncIterator[CapturedEpoch]:
        """Return itself."""
        return self

    async def __anext__(self) -> CapturedEpoch:
        """Return the next epoch. Raises IngestdError."""
        found = await self._results.get()
        if found is None:
            self._results.put_nowait(None)  # each later step ends, too
            raise StopAsyncIteration
        if isinstance(found, IngestdError):
            found.what = _REDACTOR.text(found.what)
            found.remedy = None if found.remedy is None else _REDACTOR.text(found.remedy)
            raise found
        return found

    def stop(self) -> None:
        """End the iteration once the open epochs are durable."""
        self._stop.set()

    @property
    def status(self) -> dict[str, Any]:
        """The document that the daemon serves as ``/status``."""
        return cast("dict[str, Any]", _REDACTOR.tree(to_json(self._status)))

    async def _run(self) -> None:
        try:
            await self._supervisor.run(self._stop)
        except IngestdError as error:
            if not self._stop.is_set():
                self._results.put_nowait(error)
        finally:
            self._results.put_nowait(None)

    def _watch(self, telemetry: SourceTelemetry) -> None:
        telemetry.epoch_listeners.append(partial(self._committed, telemetry.source))
        if not self._is_once:
            telemetry.fault_listeners.append(self._results.put_nowait)

    def _committed(self, source: str, epoch: CommittedEpoch) -> None:
        self._results.put_nowait(
            CapturedEpoch(
                source,
                epoch.epoch,
                epoch.summary.end_lsn,
                epoch.committed_at,
                epoch.summary.transactions,
                {each.table: each.rows for each in epoch.tables},
            )
        )
