"""One raw table: its schema in the lake and the commits of its epochs (design section 2)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ingestd.changes import EPOCH_FIELD
from ingestd.errors import TableError
from ingestd.keys import key_columns, key_rows
from ingestd.ports import Fragment
from ingestd.positions import Lsn
from ingestd.schema import Table, TableId
from ingestd.sink.append_log import CHECKPOINT_INTERVAL, AppendLog, Creation
from ingestd.sink.evolution import SchemaConflictError, additions, evolved
from ingestd.sink.read import read_each, read_files
from ingestd.sink.statistics import has_statistics

POSITION_COLUMNS = ("_cdc_lsn", "_cdc_seq", "_cdc_epoch", "_cdc_ts")
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def statistics_columns(table: Table) -> list[str]:
    """Name the columns that get bounds: position and epoch, and the key as far as its types do."""
    keys = {*table.key, *table.identity}
    chosen = [c.lake_name for c in table.columns if c.name in keys and has_statistics(c.type)]
    return [*POSITION_COLUMNS, *chosen]


class RawTable:
    """The raw table of one source table.

    `plan` is the schema that the lake has, or will have when the epochs being filled are there: it
    only grows. `log` is for worker threads, `admit` for the event loop.
    """

    def __init__(self, table: TableId, log: AppendLog) -> None:
        self.id = table
        self.log = log
        self.plan: pa.Schema | None = None
        self.watermark: Lsn | None = None
        self._admitted: pa.Schema | None = None

    def load(self) -> None:
        """Read what the lake holds. Blocks."""
        self.log.load()
        self.plan = self.log.schema()
        version = self.log.app_version()
        self.watermark = None if version is None else Lsn(version)

    def rows_of_epoch(self, epoch: int) -> int:
        """Count the rows that the lake holds of an epoch. Blocks."""

        def may_hold(statistics: Mapping[str, Any]) -> bool:
            low = statistics.get("minValues", {}).get("_cdc_epoch")
            high = statistics.get("maxValues", {}).get("_cdc_epoch")
            return low is None or high is None or low <= epoch <= high

        rows = read_files(
            self.log.handle,
            self.log.store,
            self.log.folder,
            columns=[EPOCH_FIELD.name],
            keep=may_hold,
        )
        return int(pc.sum(pc.equal(rows.column(0), epoch)).as_py() or 0)

    def unsent(self, table: Table, since: Lsn) -> list[pa.RecordBatch]:
        """See `ingestd.ports.Sink.unsent`. Blocks; while commits go on."""
        log = AppendLog(self.log.store, self.log.folder, self.log.app_id)
        log.load()
        present = log.schema()
        if present is None:
            return []

        def may_hold(statistics: Mapping[str, Any]) -> bool:
            high = statistics.get("maxValues", {}).get("_cdc_lsn")
            return high is None or high >= since

        wanted = [*key_columns(table), "_cdc_unchanged", "_cdc_lsn"]
        if not set(wanted) <= set(present.names):
            return []  # no row has such a key yet
        schema = pa.schema([present.field(name) for name in wanted])
        parts = read_each(
            log.handle, log.store, log.folder, schema, keep=may_hold, unless_null="_cdc_unchanged"
        )
        found: list[pa.RecordBatch] = []
        for part in parts:
            recent = pc.greater_equal(part["_cdc_lsn"], int(since))
            lacking = part.filter(pc.and_(recent, part["_cdc_unchanged"].is_valid()))
            for rows in lacking.combine_chunks().to_batches():
                unchanged = rows.column("_cdc_unchanged")
                found.append(key_rows(table, rows).append_column("_cdc_unchanged", unchanged))
        return found

    def admit(self, rows: pa.Schema) -> pa.Schema:
        """Give the schema the table must have for such rows. Raises TableError."""
        if self._admitted is None or not self._admitted.equals(rows):
            try:
                self.plan = evolved(self.plan, rows)
            except SchemaConflictError as error:
                raise TableError(
                    self.id,
                    str(error),
                    remedy="exclude the table in `tables`; or remove its folder from the lake and"
                    " restart: it is read anew",
                ) from error
            self._admitted = rows
        assert self.plan is not None
        return self.plan

    def commit(
        self, table: Table, schema: pa.Schema, fragments: Sequence[Fragment], end_lsn: Lsn
    ) -> int:
        """Append an epoch's fragments, durably, and give the Delta version (I1, I3). Blocks.

        New columns are a commit of their own, just before: a kill between the two leaves columns
        without rows, which the next epoch fills.
        """
        if not self.log.exists:
            return self.log.create(_creation(table, schema), fragments, int(end_lsn))
        present = self.log.schema()
        assert present is not None
        added = additions(present, schema)
        if added:
            self.log.add_columns(added)
        return self.log.append(fragments, int(end_lsn))


def _creation(table: Table, schema: pa.Schema) -> Creation:
    # The property's syntax for odd names differs between writers: they do without.
    columns = [n for n in statistics_columns(table) if _PLAIN_NAME.match(n)]
    return Creation(
        schema,
        {
            "delta.dataSkippingStatsColumns": ",".join(columns),
            "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
        },
    )
