"""A raw table: its schema in the lake and the commits of its epochs (design section 2)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ingestd.failpoints import lost, reach
from ingestd.lake.delta.append_log import AppendLog, Creation
from ingestd.lake.delta.checkpoint_schedule import CHECKPOINT_INTERVAL
from ingestd.lake.delta.conflicts import AllegedTakeoverError
from ingestd.lake.delta.file_statistics import has_statistics
from ingestd.lake.delta.log import AcceptTorn, TableLog
from ingestd.lake.delta.log_paths import file_of
from ingestd.lake.delta.read import read_each
from ingestd.lake.schema_evolution import SchemaConflictError, additions, evolved
from ingestd.lake.store.errors import storage_faults
from ingestd.model.changes import EPOCH_FIELD, MARKER_SEQ, change_schema
from ingestd.model.errors import FolderError, TableError, TransientError, shortened
from ingestd.model.keys import key_columns, key_rows
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table, TableId
from ingestd.ports import Fragment

POSITION_COLUMNS = ("_cdc_lsn", "_cdc_seq", "_cdc_epoch", "_cdc_ts")
_EPOCH = EPOCH_FIELD.name
_MOST_BOUNDED = 32
"""The limit of a Postgres key (INDEX_MAX_KEYS), and Delta's default number of bounds."""
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def statistics_columns(table: Table) -> list[str]:
    """Return the columns that get bounds: position, epoch, and key columns of suitable types.

    An identity of more columns (FULL) is cut: each takes up to 1 kB of a commit for each file.
    """
    able = [c for c in table.columns if has_statistics(c.type)]
    chosen = [c.lake_name for c in able if c.name in table.key]
    chosen += [c.lake_name for c in able if c.name in table.identity and c.name not in table.key]
    return [*POSITION_COLUMNS, *chosen[:_MOST_BOUNDED]]


_MOST_ROWS = 1 << 48
"""Of one epoch. More are not believed: `_epochs` has their number as 64 bits."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows of one epoch: their number, lowest and highest `_cdc_lsn`, latest `_cdc_ts` (aware)."""

    rows: int
    first: Lsn
    reach: Lsn
    at: datetime

    def with_more(self, other: RowRange) -> RowRange:
        """Return the union of both ranges."""
        return RowRange(
            self.rows + other.rows,
            min(self.first, other.first),
            max(self.reach, other.reach),
            max(self.at, other.at),
        )


def raw_schema(table: Table) -> pa.Schema:
    """Return the Arrow schema of this table's rows in its raw table (all fields nullable)."""
    schema = change_schema(table)
    return schema.insert(schema.get_field_index("_cdc_ts") + 1, EPOCH_FIELD)


class RawTable:
    """The raw table of one source table.

    `planned_schema` is the lake's, now or after the epochs being filled: it only grows. `log` is
    for worker threads, `plan_schema_for` for the event loop.
    """

    def __init__(self, table: TableId, log: AppendLog) -> None:
        self.id = table
        self.log = log
        self.planned_schema: pa.Schema | None = None
        self.watermark: Lsn | None = None
        self.resume = ""
        self._planned_for: pa.Schema | None = None
        self._compared: tuple[pa.Schema, pa.Schema] | None = None

    def load(self, accept_torn: AcceptTorn | None = None) -> None:
        """Read the lake's state; `accept_torn`: see `TableLog.load`. Blocks."""
        self.log.load(accept_torn)
        self.planned_schema = self.log.schema()
        version = self.log.app_version()
        self.watermark = None if version is None else Lsn(version)
        self.resume = self.log.resume()

    def rows_of_epoch(self, epoch: int) -> RowRange | None:
        """Return the range of an epoch's rows in the lake; None if it has none. Blocks.

        A load may be large, so files with rows of one epoch only are judged by their statistics.
        """
        found: list[RowRange] = []

        def is_to_be_read(statistics: Mapping[str, Any]) -> bool:
            low, high = statistics.get("minValues", {}), statistics.get("maxValues", {})
            first, last = low.get(_EPOCH), high.get(_EPOCH)
            if first is None or last is None:
                return True
            if not first <= epoch <= last:
                return False
            if first < last or not {"_cdc_lsn", "_cdc_ts"} <= high.keys() & low.keys():
                return True
            lsns = Lsn(low["_cdc_lsn"]), Lsn(high["_cdc_lsn"])
            found.append(RowRange(statistics["numRecords"], *lsns, _time(high["_cdc_ts"])))
            return False

        present = self.log.schema()
        assert present is not None
        schema = pa.schema([present.field(name) for name in (_EPOCH, "_cdc_lsn", "_cdc_ts")])
        log = self.log
        for part in read_each(log.handle, log.store, log.folder, schema, keep=is_to_be_read):
            rows = part.filter(pc.equal(part[_EPOCH], epoch))
            if rows.num_rows:
                lsns = Lsn(pc.min(rows["_cdc_lsn"]).as_py()), Lsn(pc.max(rows["_cdc_lsn"]).as_py())
                found.append(RowRange(rows.num_rows, *lsns, pc.max(rows["_cdc_ts"]).as_py()))
        if not found:
            return None
        union = reduce(RowRange.with_more, found)
        if union.rows > _MOST_ROWS:
            msg = f"its files claim {union.rows} rows in one epoch"
            raise ValueError(msg)
        return union

    def files(self) -> frozenset[str]:
        """Return the paths of its data files. Blocks."""
        if not self.log.exists:
            return frozenset()
        with storage_faults(self.log.uri):
            paths = pa.table(self.log.handle.get_add_actions())["path"].to_pylist()
        return frozenset(file_of(path, self.log.uri) for path in paths)

    def has_marker(self, point: Lsn) -> bool:
        """See `ingestd.ports.Sink.has_marker`. Blocks; may run during commits."""
        log = self._newest()
        present = log.schema()
        if present is None:
            return False

        def may_hold(statistics: Mapping[str, Any]) -> bool:
            low = statistics.get("minValues", {}).get("_cdc_lsn")
            high = statistics.get("maxValues", {}).get("_cdc_lsn")
            return low is None or high is None or low <= point <= high

        schema = pa.schema([present.field(name) for name in ("_cdc_lsn", "_cdc_seq")])
        for part in read_each(log.handle, log.store, log.folder, schema, keep=may_hold):
            is_at_point = pc.equal(part["_cdc_lsn"], int(point))
            is_marker = pc.equal(part["_cdc_seq"], MARKER_SEQ)
            if pc.any(pc.and_(is_at_point, is_marker)).as_py():
                return True
        return False

    def _newest(self) -> TableLog:
        log = TableLog(self.log.store, self.log.folder, self.log.app_id)
        log.load()
        return log

    def unsent(self, table: Table, since: Lsn) -> list[pa.RecordBatch]:
        """See `ingestd.ports.Sink.unsent`. Blocks; may run during commits."""
        log = self._newest()
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

    def plan_schema_for(self, rows: pa.Schema) -> pa.Schema:
        """Plan the schema that the table must have for such rows; return it. Raise TableError."""
        if self._planned_for is None or not self._planned_for.equals(rows):
            try:
                self.planned_schema = evolved(self.planned_schema, rows)
            except SchemaConflictError as error:
                raise TableError(
                    self.id,
                    shortened(str(error)),
                    remedy="exclude the table in `tables`; or remove its folder from the lake and"
                    " restart: it is re-read",
                ) from error
            self._planned_for = rows
        assert self.planned_schema is not None
        return self.planned_schema

    def make(self, table: Table, schema: pa.Schema) -> None:
        """Create the table in the lake, without rows. Blocks.

        If another process created it since the lake was read, raise as `reread_once` does.
        """
        reach("sink.raw_create.before", lost)
        with self.reread_once():
            self.log.create(_creation(table, schema))
        reach("sink.raw_create.after", lost)

    @contextmanager
    def reread_once(self) -> Iterator[None]:
        """Raise the first AllegedTakeoverError as TransientError: the lake is re-read."""
        try:
            yield
        except AllegedTakeoverError as error:
            if not self.log.is_first_allegation():
                raise
            raise TransientError(error.what, reason="claimed", remedy=error.remedy) from error

    def commit(
        self,
        table: Table,
        schema: pa.Schema,
        fragments: Sequence[Fragment],
        end_lsn: Lsn,
        resume: str | None = None,
    ) -> int:
        """Append an epoch's fragments durably; return the Delta version (I1, I3). Blocks.

        `resume`: stored in the same commit (`TableBatch.resume`); None repeats the previous one.
        New columns are added by a separate commit just before. A kill between the two leaves
        columns without rows, which the next epoch fills.
        """
        resume = self.resume if resume is None else resume
        version = self._append(table, schema, fragments, end_lsn, resume)
        self.resume = resume
        return version

    def _append(
        self,
        table: Table,
        schema: pa.Schema,
        fragments: Sequence[Fragment],
        end_lsn: Lsn,
        resume: str,
    ) -> int:
        if not self.log.exists:
            self.make(table, schema)
        self._add_missing_columns(schema)
        if resume:
            self.log.expect_resumes()
        reach("sink.raw_commit.before", lost)
        version = self.log.commit_files(fragments, int(end_lsn), resume)
        reach("sink.raw_commit.after", lost)
        return version

    def _add_missing_columns(self, wanted: pa.Schema) -> None:
        """Add the columns that the lake's schema lacks; skip the pair that was compared last."""
        present = self.log.schema()
        assert present is not None
        if self._compared == (present, wanted):
            return
        try:
            added = additions(present, evolved(present, wanted))
        except SchemaConflictError as error:  # another program added the column
            raise FolderError(
                f"lake table {self.log.uri}: {error}", remedy="put the folder back from a copy"
            ) from error
        if added:
            reach("sink.new_columns.before", lost)
            self.log.add_columns(added)
            reach("sink.new_columns.after", lost)
        else:
            self._compared = present, wanted


def _time(bound: datetime | str) -> datetime:
    """Parse a bound of `_cdc_ts`, which deltalake returns as the statistics have it."""
    at = datetime.fromisoformat(bound) if isinstance(bound, str) else bound
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def _creation(table: Table, schema: pa.Schema) -> Creation:
    # Writers disagree on the property's syntax for unusual names, so those are left out.
    columns = [n for n in statistics_columns(table) if _PLAIN_NAME.match(n)]
    return Creation(
        schema,
        {
            "delta.dataSkippingStatsColumns": ",".join(columns),
            "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
        },
    )
