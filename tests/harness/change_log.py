"""A raw table that a test writes change by change, without a source."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ingestd.lake.delta_lake import DeltaLake
from ingestd.model.changes import EpochSummary, TableBatch, change_schema, marker_batch
from ingestd.model.lake_state import TableEvent, TableState
from ingestd.model.lsn import Lsn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ingestd.model.schema import Table

NOW = datetime(2026, 1, 2, tzinfo=UTC)
SOURCE = "shop"


class ChangeLogWriter:
    """One table of a lake at `path`; each epoch has one transaction.

    A change is (op, row), where op is that of `_cdc_op`. A row may have `_cdc_before`,
    `_cdc_unchanged` and `_cdc_raw`, and its own position in `_cdc_lsn` and `_cdc_seq`.
    """

    def __init__(self, path: Path, table: Table) -> None:
        columns = tuple(replace(c, identity=c.name in table.key) for c in table.columns)
        self.table = replace(table, columns=columns)
        self.sink = DeltaLake(str(path), SOURCE)
        self.lsn = 100

    async def begin(self, *, is_empty: bool = False) -> None:
        """Create the lake. The table is live and has only the `t` of its snapshot."""
        await self.sink.open()
        await self.sink.adopt("server")
        if not is_empty:
            writer = self.sink.begin_epoch()
            await writer.append_batch(marker_batch(self.table, Lsn(self.lsn), NOW))
            await self._commit(writer, Lsn(self.lsn))
        await self.record(TableState.LIVE)

    async def record(self, state: TableState, table: Table | None = None) -> None:
        """Append to `_tables`. `table`: its definition from now on."""
        if table is not None:
            self.table = table
        await self.sink.record([TableEvent(self.table, state, NOW, Lsn(self.lsn), Lsn(100))])

    async def epoch(self, changes: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Commit these changes as an epoch."""
        self.lsn += 10
        writer = self.sink.begin_epoch()
        schema = change_schema(self.table)
        base = {"_cdc_lsn": self.lsn, "_cdc_xid": self.lsn, "_cdc_ts": NOW}
        rows = [
            {**base, "_cdc_seq": number, "_cdc_op": op, **row}
            for number, (op, row) in enumerate(changes, start=1)
        ]
        arrays = [pa.array([row.get(f.name) for row in rows], f.type) for f in schema]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        await writer.append_batch(TableBatch(self.table, batch, 1), from_snapshot=True)
        await self._commit(writer, Lsn(self.lsn))

    async def _commit(self, writer: Any, start: Lsn) -> None:
        await writer.commit(EpochSummary(start, Lsn(start + 5), NOW, 1, 1))
