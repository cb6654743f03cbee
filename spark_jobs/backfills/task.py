"""The task of a backfill: reads a split, writes its rows to Parquet files, and writes a note.

Nothing here depends on Spark or Postgres: the rows come from the connector's `PageSource`, and the
files go into the raw table's folder. No reader sees them before the driver commits them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa

from ingestd.app.connectors import FACTORIES
from ingestd.config import SourceSettings
from ingestd.lake.parquet_writer import FragmentSink, FragmentWriter
from ingestd.lake.raw_table import raw_schema, statistics_columns
from ingestd.lake.store.store import Store, open_store
from ingestd.model.changes import SNAPSHOT, SNAPSHOT_SEQ
from ingestd.model.errors import (
    IngestdError,
    OperatorError,
    TableError,
    TransientError,
)
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table, TableId
from ingestd.ports import Connector, Split
from spark_jobs.backfills.record import Note, write_note

ATTEMPTS = 6
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 10.0
_FOR_GOOD = frozenset({"snapshot_gone"})
"""Reasons of transient faults that a retry under the same snapshot can't fix."""


@dataclass(frozen=True, slots=True)
class SplitOrder:
    """An order to read a split: `number` of its table's plan, at `point`, with rows of `epoch`.

    `folder`: of the raw table in the lake; `run_folder`: where the note is written.
    """

    split: Split
    number: int
    point: Lsn
    at: datetime
    epoch: int
    folder: str
    run_folder: str


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a split could not be read. `table` is None if the fault is not the table's own."""

    what: str
    remedy: str | None
    table: TableId | None = None
    reason: str | None = None

    @classmethod
    def from_error(cls, error: IngestdError) -> Failure:
        """Return a failure for an error: its class and texts are all that another process needs."""
        if isinstance(error, TableError):
            return cls(error.reason, error.remedy, error.table)
        reason = error.reason if isinstance(error, TransientError) else None
        return cls(error.what, error.remedy, None, reason)

    def error(self) -> IngestdError:
        """Return the failure as an error again."""
        if self.table is not None:
            return TableError(self.table, self.what, remedy=self.remedy)
        if self.reason is not None:
            return TransientError(self.what, reason=self.reason, remedy=self.remedy)
        return OperatorError(self.what, remedy=self.remedy)


@dataclass(frozen=True, slots=True)
class BackfillReader:
    """Reads splits of a source in any process. It contains the source's secrets; `repr` hides them.

    `lake`: an absolute path or a URI.
    """

    source: str
    settings: SourceSettings = field(repr=False)
    lake: str
    storage_options: Mapping[str, str] | None = field(repr=False)
    memory_bytes: int

    def connector(self) -> Connector:
        """Return a new connector to the source."""
        factory = FACTORIES[self.settings.kind]
        return factory.create(self.source, self.settings, memory_bytes=self.memory_bytes // 2)

    def read(self, order: SplitOrder) -> Note | Failure:
        """Read a split into durable files and write a durable note. Blocks.

        Must not be called in an event loop. Transient faults are retried from the start, at most
        ATTEMPTS times.
        """
        return asyncio.run(self._read_patiently(order))

    async def _read_patiently(self, order: SplitOrder) -> Note | Failure:
        for attempt in range(ATTEMPTS):
            try:
                return await self._read_split(order)
            except TransientError as error:
                if attempt == ATTEMPTS - 1 or error.reason in _FOR_GOOD:
                    return Failure.from_error(error)
            except IngestdError as error:
                return Failure.from_error(error)
            delay_s = min(FIRST_DELAY_S * 2.0**attempt, LONGEST_DELAY_S)
            await asyncio.sleep(delay_s * random.uniform(0.5, 1))  # noqa: S311 - jitter only
        raise AssertionError

    async def _read_split(self, order: SplitOrder) -> Note:
        store = await asyncio.to_thread(open_store, self.lake, self.storage_options)
        connector = self.connector()
        try:
            note = await self._write(order, connector, store)
        finally:
            await connector.close()
        await asyncio.to_thread(write_note, store, order.run_folder, note)
        return note

    async def _write(self, order: SplitOrder, connector: Connector, store: Store) -> Note:
        table = order.split.table
        writer = FragmentWriter(store, order.folder, statistics_columns(table))
        sink = FragmentSink(writer, buffer_bytes=self.memory_bytes // 4)
        nbytes = 0
        source = connector.page_source(order.split)
        try:
            async for batch in source.batches():
                nbytes += batch.nbytes
                await sink.append_rows(snapshot_rows(table, batch, order))
            fragments = await sink.finish()
        except BaseException:
            await sink.abort()
            raise
        finally:
            await source.close()
        return Note(order.number, order.point, order.at, sink.rows, nbytes, tuple(fragments))


def snapshot_rows(table: Table, batch: pa.RecordBatch, order: SplitOrder) -> pa.RecordBatch:
    """Return a batch of a page source as rows of the raw table: `r` at (point, 0).

    `batch`: the table's columns by their lake names, and `_cdc_raw`.
    """
    values: Mapping[str, Any] = {
        "_cdc_op": SNAPSHOT,
        "_cdc_lsn": int(order.point),
        "_cdc_seq": SNAPSHOT_SEQ,
        "_cdc_ts": order.at,
        "_cdc_epoch": order.epoch,
    }
    schema, present = raw_schema(table), set(batch.schema.names)
    columns = [
        batch.column(f.name)
        if f.name in present
        else _constant(values.get(f.name), f.type, batch.num_rows)
        for f in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _constant(value: Any, of: pa.DataType, rows: int) -> pa.Array:  # noqa: ANN401 - of any column
    return pa.nulls(rows, of) if value is None else pa.repeat(pa.scalar(value, of), rows)
