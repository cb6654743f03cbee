"""An open epoch: what it covers so far, and when it must be closed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingestd.model.changes import OF_BEFORE, ChangeSet, EpochSummary, TableBatch
from ingestd.model.errors import TableError
from ingestd.model.lake_state import UnlistedRows
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.schema import TableId
from ingestd.pipeline.snapshot_queue import QueuedSplitEnd
from ingestd.ports import EpochWriter

COMMIT_TIMES_KEPT = 1 << 20
"""Freshness is measured for this many transactions of an epoch: a first snapshot may take
hours."""
_UNIX_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class EpochPolicy:
    """When an epoch is closed: `max_delay_s` after its first change, or at `max_bytes`."""

    max_delay_s: float
    max_bytes: int


@dataclass(slots=True)
class RowTally:
    """Rows of one table in an epoch, counted per `_cdc_op`; values per key of `_cdc_raw`.

    `raw_types`: the type of the column that could not hold them, per key.
    """

    ops: Counter[str] = field(default_factory=Counter)
    raw_columns: Counter[str] = field(default_factory=Counter)
    raw_types: dict[str, pa.DataType] = field(default_factory=dict)

    @property
    def raw_values(self) -> int:
        """Count of values kept as text."""
        return self.raw_columns.total()

    def count(self, rows: pa.RecordBatch) -> None:
        """Add a batch of the change schema."""
        for item in rows.column("_cdc_op").value_counts():
            self.ops[item["values"].as_py()] += item["counts"].as_py()
        raw = rows.column("_cdc_raw")
        if raw.null_count < len(raw):
            start, end = raw.offsets[0].as_py(), raw.offsets[-1].as_py()
            for item in raw.keys.slice(start, end - start).value_counts():
                key = item["values"].as_py()
                self.raw_columns[key] += item["counts"].as_py()
                self.raw_types.setdefault(key, column_type(rows.schema, key))


def column_type(schema: pa.Schema, key: str) -> pa.DataType:
    """Return the type of the column that a key of `_cdc_raw` names (design section 2)."""
    if key in schema.names:
        return schema.field(key).type
    return schema.field("_cdc_before").type.field(key.removeprefix(OF_BEFORE)).type


@dataclass(slots=True)
class FillingEpoch:
    """The contents of `writer` so far.

    `start`: the end of the previous epoch. `floor`: the epoch must not close below this, the
    highest watermark in the lake (I4). `has_snapshot_rows`: it has rows of snapshots, so it closes
    only above `start`: the app transactions of its raw tables must grow. `snapshot_ids`, `splits`:
    the snapshots and the splits whose last rows are in it; `has_unlisted_rows`: the lake already
    has rows of it (`LakeState.unlisted`), which need no replay; `commit_times`: those set by this
    server's clock; `replicated`: count of transactions with another server's; `awaits`: snapshots
    that it must contain before it closes, unless it holds `patience_bytes`. Times are monotonic
    seconds.
    """

    writer: EpochWriter
    start: Lsn = ZERO
    floor: Lsn = ZERO
    position: Lsn = ZERO
    first_lsn: Lsn | None = None
    last_commit: datetime | None = None
    nbytes: int = 0
    ends_in_transaction: bool = False
    opened_at: float | None = None
    has_snapshot_rows: bool = False
    has_unlisted_rows: bool = False
    snapshot_ids: list[int] = field(default_factory=list)
    splits: list[QueuedSplitEnd] = field(default_factory=list)
    awaits: set[int] = field(default_factory=set)
    patience_bytes: int = 0
    transactions: int = 0
    replicated: int = 0
    commit_times: list[NDArray[np.int64]] = field(default_factory=list)
    tallies: dict[TableId, RowTally] = field(default_factory=dict)

    async def append_batch(self, batch: TableBatch, *, from_snapshot: bool = False) -> None:
        """Append rows to the writer and count them. Raises TableError as the writer does."""
        try:
            await self.writer.append_batch(batch, from_snapshot=from_snapshot)
        except TableError as error:
            if error.table != batch.table.id:  # the writer has these rows
                self.tallies.setdefault(batch.table.id, RowTally()).count(batch.rows)
            raise
        self.tallies.setdefault(batch.table.id, RowTally()).count(batch.rows)

    async def discard(self, table: TableId) -> None:
        """Drop the rows of a table."""
        await self.writer.discard(table)
        self.tallies.pop(table, None)

    def add_page(self, page: TableBatch, at: datetime, now: float) -> None:
        """Record that the writer has rows of a snapshot, taken at `at`."""
        self.nbytes += page.nbytes
        self.has_snapshot_rows = True
        if self.last_commit is None:
            self.last_commit = at
        if self.opened_at is None:
            self.opened_at = now

    def add_change_set(self, change_set: ChangeSet, now: float) -> None:
        """Record a change set whose rows the writer has."""
        self.position = max(self.position, change_set.position)
        self.ends_in_transaction = change_set.ends_in_transaction
        self.nbytes += change_set.nbytes
        if change_set.first_lsn is not None:
            first = change_set.first_lsn if self.first_lsn is None else self.first_lsn
            self.first_lsn = min(first, change_set.first_lsn)
        if change_set.transactions:
            own = change_set.own_commit_times
            if self.transactions < COMMIT_TIMES_KEPT and len(own):
                self.commit_times.append(own)
            self.transactions += change_set.transactions
            self.replicated += change_set.transactions - len(own)
            self.last_commit = _UNIX_EPOCH + timedelta(
                microseconds=int(change_set.commit_times[-1])
            )
        if self.opened_at is None and self.has_rows:
            self.opened_at = now

    def add_unlisted(self, unlisted: UnlistedRows) -> None:
        """Record rows that the lake already has and that belong to this epoch."""
        self.has_unlisted_rows = True
        self.first_lsn = min(unlisted.first, self.first_lsn or unlisted.first)
        self.last_commit = max(unlisted.at, self.last_commit or unlisted.at)

    @property
    def has_rows(self) -> bool:
        """True if its row in `_epochs` would list anything."""
        return self.has_unlisted_rows or bool(self.writer.rows)

    @property
    def oldest_us(self) -> int | None:
        """Commit time of its first transaction with this server's clock (us since 1970 UTC)."""
        return int(self.commit_times[0][0]) if self.commit_times else None

    @property
    def can_close(self) -> bool:
        """True if it ends between two transactions and at or above its floor (I2, I4)."""
        awaits = bool(self.awaits) and self.nbytes < self.patience_bytes
        if self.ends_in_transaction or awaits or self.position < self.floor:
            return False
        return self.position > self.start or not self.has_snapshot_rows

    @property
    def ends_reads(self) -> bool:
        """True if it has the last rows of a snapshot, or of a split of one."""
        return bool(self.snapshot_ids or self.splits)

    @property
    def is_idle(self) -> bool:
        """True if nothing captured is in it, so that only its position is recorded (I10)."""
        return self.can_close and not self.has_rows

    def is_due(self, now: float, policy: EpochPolicy, *, asked: bool = False) -> bool:
        """Return whether it must be committed now; if it ends a split, as soon as it can close.

        `asked`: something waits for it to be durable.
        """
        if self.opened_at is None or not self.can_close or not self.has_rows:
            return False
        full = self.ends_reads or self.nbytes >= policy.max_bytes
        return full or asked or now - self.opened_at >= policy.max_delay_s

    def wait_s(self, now: float, policy: EpochPolicy) -> float | None:
        """Return how long to wait for work; None: indefinitely."""
        if self.opened_at is None or not self.can_close:
            return None
        return max(0.0, self.opened_at + policy.max_delay_s - now)

    def summary(self) -> EpochSummary:
        """Return the contents of its row in `_epochs`."""
        assert self.last_commit is not None
        return EpochSummary(
            first_lsn=self.position if self.first_lsn is None else self.first_lsn,
            end_lsn=self.position,
            last_commit_ts=self.last_commit,
            transactions=self.transactions,
            nbytes=self.nbytes,
        )
