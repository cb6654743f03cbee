"""The ports of a lake that stores the epochs of a source, and of its maintenance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ingestd.ports.change_log import ChangeLog

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Mapping, Sequence

    import pyarrow as pa

    from ingestd.model.changes import CommittedEpoch, EpochSummary, TableBatch
    from ingestd.model.errors import IngestdError, TableError
    from ingestd.model.lake_state import LakeState, TableEvent
    from ingestd.model.lsn import Lsn
    from ingestd.model.schema import Table, TableId


@dataclass(frozen=True, slots=True)
class Fragment:
    """A data file that is written but not committed: path inside the table, and contents.

    `statistics`: a text that only the lake that wrote the file interprets.
    """

    path: str
    size_bytes: int
    rows: int
    statistics: str
    modification_time_ms: int


class PageSink(Protocol):
    """Writes one table's rows to fragments, which the caller commits. `finish` or `abort`, once."""

    async def append_rows(self, rows: pa.RecordBatch) -> None:
        """Accept rows of any schema version; returns when there is room for more (backpressure)."""
        ...

    async def finish(self) -> Sequence[Fragment]:
        """Make all fragments durable and return them."""
        ...

    async def abort(self) -> None:
        """Remove what was written. May be called at any time, twice."""
        ...


class StoppedTables(Protocol):
    """Records tables as stopped and accepts nothing more for them."""

    async def __call__(self, errors: Sequence[TableError], /) -> None: ...


class EpochWriter(Protocol):
    """One epoch being filled. `commit` or `abort`, once."""

    @property
    def number(self) -> int:
        """Number of this epoch: one more than the last."""
        ...

    @property
    def rows(self) -> int:
        """Rows accepted so far, including those the lake already had (I3)."""
        ...

    async def append_batch(self, batch: TableBatch, *, from_snapshot: bool = False) -> None:
        """Accept rows; those already in the table's raw table are counted and dropped (I3).

        A row is already there if its `_cdc_lsn` precedes the table's watermark at `Sink.open`;
        except snapshot rows (`from_snapshot`), which no replay sends again. The newest `resume` of
        the table's batches is committed with the rows, also that of a batch without rows; if no
        batch of the epoch has one, the earlier one stays. Returns when there is room for more.
        Raises TableError if this table can't accept them.
        """
        ...

    async def discard(self, table: TableId) -> None:
        """Drop this epoch's rows of a table that was stopped. Remaining files are orphans."""
        ...

    async def commit(
        self, summary: EpochSummary, stop: StoppedTables | None = None
    ) -> CommittedEpoch:
        """Make all tables' rows durable, then the epoch's row in `_epochs`.

        If some raw tables can't be written, `stop` is called before that row is written. It records
        the tables in `_tables` as stopped, since the row confirms their changes too (I8). None of
        their rows is listed. Without `stop` the first such TableError is raised.

        Closed to `append_batch` from the call on, before its first await. Epochs are committed in
        the order of their numbers; the next may be numbered and filled before this one is durable.
        After any error the sink must be opened again. The lake then holds any subset of the tables'
        commits; `LakeState.watermarks` reports which. Raises TransientError (storage),
        OperatorError (disk full, another writer: I5).
        """
        ...

    async def abort(self) -> None:
        """Drop the epoch and its files. May be called at any time, twice."""
        ...


@dataclass(frozen=True, slots=True)
class MaintainedTable:
    """What maintenance did to a table of the lake, by its name ("schema.table", "_epochs").

    `small_files`: how many remain, None if not counted. `error`: what prevented the maintenance of
    this table; other tables are not affected.
    """

    table: str
    small_files: int | None = None
    joined_files: int = 0
    written_bytes: int = 0
    removed_files: int = 0
    error: IngestdError | None = None


class LakeMaintenance(Protocol):
    """Maintains one source's lake alongside its `Sink`; changes no row, position or state.

    Files that readers need within the retention period stay. May be stopped at any step.
    """

    def run(
        self, *, joins: bool, cleans: bool, only: Collection[str] | None = None
    ) -> AsyncGenerator[MaintainedTable, None]:
        """Compact small files, remove files past the retention period; `only`: for these tables.

        Yields each table when it is done. Always close it: nothing continues after that. Raises
        TransientError, OperatorError.
        """
        ...


class Sink(ChangeLog, Protocol):
    """The lake of one source. `check_interval_s`: the time between calls of `ensure_exists`."""

    @property
    def check_interval_s(self) -> float: ...

    async def open(self) -> LakeState:
        """Read what the lake holds; drop everything uncommitted. Creates nothing.

        A sink that this process has fenced before may raise OperatorError: another process has
        taken over since, by a claim that does not exclude this one's (I5).
        """
        ...

    def refuse_beyond(self, end: Lsn) -> Mapping[TableId, TableError]:
        """Treat tables that hold a position above `end` as damaged; return their errors. No I/O.

        Call it after `open`, with the end of what the server can have sent: such a position was not
        written by ingestd, or the server lost it. The rest of the lake does not depend on these
        tables (I8). They accept nothing until their raw table has no such position any more.
        """
        ...

    async def write_lake_id(self, lake_id: str | None = None) -> str:
        """Write the lake's id if it has none, and return its id. Idempotent.

        Call it before anything else is written, once this is known to be the source's lake, or the
        source to have none yet. `lake_id`: the id that it had. Creates the lake's folder; nothing
        else does. From here on every other call that creates something raises LakeLostError if the
        id is missing.
        """
        ...

    async def ensure_exists(self) -> None:
        """Raise LakeLostError if the id that `open` or `write_lake_id` saw is missing.

        Also if an older copy of the lake, which has the same id, has replaced it.
        """
        ...

    async def fence(self) -> Mapping[TableId, TableError]:
        """Make every commit of earlier openers of this lake fail: TransientError (``claimed``).

        Call it once after `open`, before anything is written and before the source's position is
        read: the state that `open` returned stays true. Raises TransientError if another process
        committed since; a second `open` and `fence` then find nothing new. Returns the tables whose
        raw table can't be written; treat them like those in `LakeState.damaged`.
        """
        ...

    async def adopt(self, server_id: str) -> None:
        """Record the server these rows come from; creates `_epochs` and `_tables`. Idempotent."""
        ...

    def begin_epoch(self) -> EpochWriter:
        """Start the next epoch; the last one must be committing or closed. No I/O."""
        ...

    async def record(self, events: Sequence[TableEvent]) -> None:
        """Append to `_tables`, durably, one row per event.

        An event with `snapshotting` after another state may re-create the table's data from
        nothing: all its rows are sent again.
        """
        ...

    async def unsent(self, table: Table, since: Lsn) -> Sequence[pa.RecordBatch]:
        """Return the durable changes with `_cdc_lsn` >= `since` that lack values not sent.

        In the change schema, the columns of `ingestd.model.keys.key_columns` and `_cdc_unchanged`.
        """
        ...

    async def has_marker(self, table: Table, point: Lsn) -> bool:
        """Return whether the `t` of a snapshot at `point` is durable in the raw table."""
        ...

    async def advance(self, position: Lsn) -> None:
        """Record, durably, that nothing captured lies between the last epoch and `position`."""
        ...

    async def close(self) -> None:
        """Release everything. May be called at any time, twice."""
        ...
