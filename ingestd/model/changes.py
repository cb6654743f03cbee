"""Change rows: the batches of a capture and the contents of a raw table (design section 2).

A capture's batches have the *change schema*: the source's columns, then the `_cdc_*` columns except
`_cdc_epoch`, which only the sink knows. The *raw schema* adds `_cdc_epoch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingestd.model.lsn import Lsn
from ingestd.model.schema import TIMESTAMP

if TYPE_CHECKING:
    from datetime import datetime

    from numpy.typing import NDArray

    from ingestd.model.errors import TableError
    from ingestd.model.schema import Table, TableId

SNAPSHOT, INSERT, UPDATE, DELETE, TRUNCATE = "r", "c", "u", "d", "t"

RESERVED_PREFIX = "_cdc_"
"""A source column with this prefix is refused; only its table is affected."""
OF_BEFORE = "_cdc_before."
"""In `_cdc_raw`: the prefix of a column's name for a value of the old row."""

_OP = pa.field("_cdc_op", pa.string())
_LSN = pa.field("_cdc_lsn", pa.int64())
_SEQ = pa.field("_cdc_seq", pa.int64())
_XID = pa.field("_cdc_xid", pa.int64())
_TS = pa.field("_cdc_ts", TIMESTAMP)
EPOCH_FIELD = pa.field("_cdc_epoch", pa.int64())
_UNCHANGED = pa.field("_cdc_unchanged", pa.list_(pa.field("element", pa.string())))
_RAW = pa.field("_cdc_raw", pa.map_(pa.string(), pa.string()))

SNAPSHOT_SEQ = 0
"""`_cdc_seq` of an `r` row."""
MARKER_SEQ = -1
"""`_cdc_seq` of the `t` row of a snapshot: below its rows, above all rows that it voids."""


def change_schema(table: Table) -> pa.Schema:
    """Return the Arrow schema of a capture's batches of this table (all fields nullable)."""
    columns = [pa.field(c.lake_name, c.type) for c in table.columns]
    old = [pa.field(c.lake_name, c.type) for c in table.before_columns]
    before = pa.field("_cdc_before", pa.struct(old))
    return pa.schema([*columns, _OP, _LSN, _SEQ, _XID, _TS, before, _UNCHANGED, _RAW])


@dataclass(frozen=True, slots=True)
class TableBatch:
    """Change rows of one table in the order of (`_cdc_lsn`, `_cdc_seq`).

    `rows` has the change schema of `table`; `nbytes` is the size that the source sent for them.
    `resume`: where the capture of this table continues once these rows, and all before, are
    durable; opaque to all but the capture. It is committed together with the rows
    (`RegisteredTable.resume`).
    """

    table: Table
    rows: pa.RecordBatch
    nbytes: int
    resume: str | None = None


@dataclass(frozen=True, slots=True)
class ChangeSet:
    """An item of `ChangeCapture.changes`: rows of any number of tables, and a position.

    `position`: every captured change of every transaction with commit_lsn below it has been
    yielded, in this change set or before. It never decreases. `ends_in_transaction`: the change set
    ends inside a transaction whose rows (all of its last rows) are not below `position`: an epoch
    can't be closed after it. `first_lsn`: commit_lsn of the first transaction with captured changes
    in this change set, which may have begun in an earlier, open change set; None if there is none.
    `commit_times`: commit time at the source, in us since 1970 UTC (int64), one for each
    transaction with captured changes that *ended* in this change set. `are_replicated`: which of
    them have a replication origin, so that another server set their commit time; None: none of
    them. `decode_s`: CPU-bound seconds spent on decoding. `interrupted`: captured tables with
    missing changes from here on; they must be re-read. `refused`: errors that stop tables because a
    change can't be accepted, at most one for each; `batches` lack those changes. `doubts`: captured
    tables for which the stream has shown something that no discovery has resolved yet, with the
    `Table.fingerprint` to record before anything beyond this change set can be confirmed.
    `ignored_messages`: count of logical messages written by others.
    """

    batches: tuple[TableBatch, ...]
    position: Lsn
    ends_in_transaction: bool
    first_lsn: Lsn | None
    commit_times: NDArray[np.int64]
    nbytes: int
    decode_s: float = 0.0
    interrupted: frozenset[TableId] = frozenset()
    refused: tuple[TableError, ...] = ()
    doubts: Mapping[TableId, str] = field(default_factory=dict)
    ignored_messages: int = 0
    are_replicated: NDArray[np.bool_] | None = None

    @property
    def transactions(self) -> int:
        """Count of transactions with captured changes that ended in this change set."""
        return len(self.commit_times)

    @property
    def own_commit_times(self) -> NDArray[np.int64]:
        """The commit times set by this server's clock."""
        if self.are_replicated is None:
            return self.commit_times
        return self.commit_times[~self.are_replicated]


NO_COMMITS: NDArray[np.int64] = np.empty(0, np.int64)


def field_of(values: pa.Array | pa.ChunkedArray, name: str) -> pa.Array | pa.ChunkedArray:
    """Return a field of structs, such as `_cdc_before`; null where they are.

    By its index: Arrow parses a name that begins with a dot as a path.
    """
    return pc.struct_field(values, values.type.get_field_index(name))


def idle_change_set(position: Lsn) -> ChangeSet:
    """Return a change set that reports nothing captured up to `position`."""
    return ChangeSet(
        (), position, ends_in_transaction=False, first_lsn=None, commit_times=NO_COMMITS, nbytes=0
    )


def marker_batch(table: Table, point: Lsn, at: datetime) -> TableBatch:
    """Return the one-row batch with the `t` that marks a snapshot at `point` (aware time `at`)."""
    schema = change_schema(table)
    values: dict[str, Any] = {
        "_cdc_op": TRUNCATE,
        "_cdc_lsn": int(point),
        "_cdc_seq": MARKER_SEQ,
        "_cdc_ts": at,
    }
    arrays = [pa.array([values.get(f.name)], f.type) for f in schema]
    return TableBatch(table, pa.RecordBatch.from_arrays(arrays, schema=schema), 0)


@dataclass(frozen=True, slots=True)
class EpochSummary:
    """The contents of an epoch, for its row in `_epochs` (design section 2)."""

    first_lsn: Lsn
    end_lsn: Lsn
    last_commit_ts: datetime
    transactions: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TableInEpoch:
    """A table's part of an epoch: its raw table's version and rows."""

    table: TableId
    version: int
    rows: int


@dataclass(frozen=True, slots=True)
class CommittedEpoch:
    """An epoch whose raw tables and `_epochs` row are durable."""

    epoch: int
    summary: EpochSummary
    committed_at: datetime
    tables: tuple[TableInEpoch, ...]
