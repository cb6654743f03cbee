"""Reports a lake's maintenance to metrics and log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from ingestd.model.errors import IngestdError
from ingestd.observe.metrics import Metrics
from ingestd.pipeline.telemetry.source import SourceTelemetry
from ingestd.ports import MaintainedTable


@dataclass(slots=True)
class Totals:
    """Totals of one maintenance run. `error`: the first that a table had."""

    tables: int = 0
    joined_files: int = 0
    written_bytes: int = 0
    removed_files: int = 0
    error: IngestdError | None = None

    def add_table(self, table: MaintainedTable) -> None:
        """Add a table."""
        self.tables += 1
        self.joined_files += table.joined_files
        self.written_bytes += table.written_bytes
        self.removed_files += table.removed_files
        self.error = self.error or table.error


class MaintenanceTelemetry:
    """Reports one source's maintenance. Synchronous, called from the event loop."""

    def __init__(
        self, metrics: Metrics, log: FilteringBoundLogger, telemetry: SourceTelemetry
    ) -> None:
        self.telemetry = telemetry
        self._metrics = metrics
        self._log = log.bind(source=telemetry.source)
        self._has_failed = False

    @property
    def is_running(self) -> bool:
        """True if the source is claimed, and delivers or is about to (I5)."""
        return self.telemetry.not_running() is None

    def added(self, tables: Sequence[str]) -> None:
        """Record that an epoch added a file to each of these tables."""
        for table in tables:
            self._metrics.small_file_added(self.telemetry.source, table)

    def maintained(self, table: MaintainedTable, *, since: int) -> None:
        """Record a maintained table; `since`: files added meanwhile, at most."""
        if table.small_files is not None:
            count = table.small_files + since
            self._metrics.small_files(self.telemetry.source, table.table, count)

    def done(
        self, totals: Totals, error: IngestdError | None, seconds: float, taken: Counter[str]
    ) -> None:
        """Record the end of a run; `taken`: new files of each table at its start."""
        self._metrics.maintained(
            self.telemetry.source,
            joined_files=totals.joined_files,
            removed_files=totals.removed_files,
            has_failed=error is not None,
        )
        if totals.joined_files or totals.removed_files:
            self._log.info(
                "maintenance.done",
                tables=totals.tables,
                new_files=taken.total(),
                joined_files=totals.joined_files,
                written_bytes=totals.written_bytes,
                removed_files=totals.removed_files,
                seconds=round(seconds, 3),
            )
        if error is not None and not self._has_failed:
            self._log.warning("maintenance.failed", reason=error.what, remedy=error.remedy)
        self._has_failed = error is not None
