"""A source's lake, written epoch by epoch with the daemon's own sink, without a source."""

from __future__ import annotations

import asyncio
import copy
import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from ingestd.lake.delta_lake import DeltaLake
from ingestd.model.changes import EpochSummary, TableBatch
from ingestd.model.lake_state import TableEvent, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table
from tests.unit.lake.rows import make_batch

Change = dict[str, Any]
START = datetime(2026, 1, 2, tzinfo=UTC)


class RawLake:
    """A lake whose positions come from `next_lsn`: ten apart, so that others fit in between."""

    def __init__(self, uri: Path, source: str = "shop") -> None:
        self.uri = uri
        self.source = source
        self.lsn = 100
        self.epoch = 0
        self._events = 0

    def copied_to(self, uri: Path) -> RawLake:
        """Return a copy, which continues at this one's position."""
        made = copy.copy(self)
        made.uri = shutil.copytree(self.uri, uri)
        return made

    def next_lsn(self) -> int:
        self.lsn += 10
        return self.lsn

    def at(self) -> datetime:
        """Return the time of the newest position: one second per position."""
        return START + timedelta(seconds=self.lsn)

    def commit(self, changes: Mapping[Table, Sequence[Change]] | Sequence[TableBatch]) -> int:
        """Commit an epoch that ends at the newest position; return its number."""
        if isinstance(changes, Mapping):
            batches = [
                make_batch(table, [{"_cdc_ts": self.at(), **row} for row in rows])
                for table, rows in changes.items()
                if rows
            ]
        else:
            batches = list(changes)
        asyncio.run(self._commit(batches))
        self.epoch += 1
        return self.epoch

    def record(
        self,
        state: str,
        *tables: Table,
        at_lsn: int | None = None,
        progress: str = "",
        reason: str | None = None,
        snapshot_lsn: int | None = None,
    ) -> None:
        """Record a state of tables in `_tables`, from the newest position on."""
        self._events += 1
        at = START + timedelta(microseconds=self._events)
        lsn = Lsn(self.lsn + 5 if at_lsn is None else at_lsn)
        read_at = None if snapshot_lsn is None else Lsn(snapshot_lsn)
        events = [
            TableEvent(t, TableState(state), at, lsn, read_at, reason, progress=progress)
            for t in tables
        ]
        asyncio.run(self._record(events))

    async def _commit(self, batches: Sequence[TableBatch]) -> None:
        sink = DeltaLake(str(self.uri), self.source)
        try:
            await sink.open()
            await sink.adopt("7000000000000000001")
            writer = sink.begin_epoch()
            for batch in batches:
                await writer.append_batch(batch, from_snapshot=True)
            end = Lsn(self.lsn + 5)
            await writer.commit(EpochSummary(end, end, self.at(), transactions=1, nbytes=100))
        finally:
            await sink.close()

    async def _record(self, events: Sequence[TableEvent]) -> None:
        sink = DeltaLake(str(self.uri), self.source)
        try:
            await sink.open()
            await sink.adopt("7000000000000000001")
            await sink.record(events)
        finally:
            await sink.close()
