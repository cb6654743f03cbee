"""Keeps the catalog of `[catalog]` up to date while the daemon runs, beside the epochs.

A separate task; the catalog is asked in a thread that nothing waits for. So a catalog that is slow,
refuses or hangs delays no epoch and no stop. What it lacks is tried again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ingestd.app.register import register_source
from ingestd.catalogs.names import NameOutcome, NameReport, faults_of
from ingestd.model.errors import IngestdError, OperatorError
from ingestd.process.daemon_thread import in_daemon_thread

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from ingestd.config import CatalogSettings
    from ingestd.observe.metrics import Metrics
    from ingestd.observe.status import DaemonStatus, SourceStatus
    from ingestd.ports import LakeFactory

LOOK_INTERVAL_S = 5.0
EVERY_S = 3600.0
"""How often a source is registered without a change of its tables: for new columns and comments."""
FIRST_RETRY_S = 30.0
MOST_RETRIES = 6
"""After a fault: in 30 s, 1 min, up to 16 min; then with the next change, or after EVERY_S."""
Register = Callable[["LakeFactory", "CatalogSettings", str], Iterable[NameReport]]
_Tables = frozenset[tuple[str, str]]


@dataclass(slots=True)
class _Registered:
    """What is known of a source. `tables`: with their states, when it was last tried."""

    tables: _Tables | None = None
    at: float = 0.0
    retries: int = 0
    fault: str | None = None

    def is_due(self, tables: _Tables, now: float) -> bool:
        """Return whether the source must be registered: not again at once, for whatever changes."""
        if self.tables is not None and now - self.at < FIRST_RETRY_S:
            return False
        if tables != self.tables or now - self.at >= EVERY_S:
            return True
        if self.fault is None or self.retries >= MOST_RETRIES:
            return False
        return now - self.at >= FIRST_RETRY_S * (1 << self.retries)


@dataclass(slots=True)
class CatalogRegistration:
    """Registers the sources of `status` one after the other. `register`: for tests."""

    settings: CatalogSettings
    lake: LakeFactory
    status: DaemonStatus
    metrics: Metrics
    log: FilteringBoundLogger
    register: Register = register_source
    monotonic: Callable[[], float] = time.monotonic
    _registered: dict[str, _Registered] = field(default_factory=dict, init=False)

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self.register_due()
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def register_due(self) -> None:
        """Register the sources whose tables have changed, or that must be tried again."""
        for name, source in list(self.status.sources.items()):
            tables = _tables_of(source)
            known = self._registered.setdefault(name, _Registered())
            if tables and known.is_due(tables, self.monotonic()):
                await self._register(name, tables, known)
        for name in self._registered.keys() - self.status.sources.keys():
            del self._registered[name]

    async def _register(self, name: str, tables: _Tables, known: _Registered) -> None:
        try:
            reports = await in_daemon_thread(
                lambda: _with_known_faults(
                    lambda: [*self.register(self.lake, self.settings, name)]
                ),
                "catalog",
            )
            faults = faults_of(reports)
        except IngestdError as error:
            reports, faults = [], [error]
        if name not in self.status.sources:  # no longer in the config: it has no series any more
            return
        has_changed, known.tables, known.at = tables != known.tables, tables, self.monotonic()
        known.retries = 0 if not faults or has_changed else known.retries + 1
        self.metrics.catalog_faults(name, len(faults))
        counts = Counter(report.outcome for report in reports)
        before, known.fault = known.fault, faults[0].what if faults else None
        if faults and before != known.fault:
            self.log.warning(
                "catalog.failed",
                source=name,
                reason=faults[0].what,
                remedy=faults[0].remedy,
                faults=len(faults),
            )
        elif not faults and (before is not None or counts.keys() - {NameOutcome.UNCHANGED}):
            self.log.info(
                "catalog.registered",
                source=name,
                created=counts[NameOutcome.CREATED],
                updated=counts[NameOutcome.UPDATED],
                removed=counts[NameOutcome.REMOVED],
                tables=counts.total() - counts[NameOutcome.REMOVED],
            )


def _tables_of(source: SourceStatus) -> _Tables:
    """Return the tables that the lake has, with their states."""
    raw = {(name, each.state.value) for name, each in source.tables.items()}
    references = {(f"_ref {name}", each.state.value) for name, each in source.references.items()}
    return frozenset(raw | references) if source.epoch or references else frozenset()


def _with_known_faults(call: Callable[[], list[NameReport]]) -> list[NameReport]:
    """Return what a call returns. Raise an unexpected error as OperatorError, without its text."""
    try:
        return call()
    except IngestdError:
        raise
    except Exception as error:  # of a library; its text may have anything
        raise OperatorError(
            f"the catalog's library failed: {type(error).__name__}",
            remedy="`ingestd register --debug` shows where",
        ) from error
