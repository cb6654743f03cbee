"""What a lake provides that takes the epochs of a source, and its maintenance."""

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
    """A data file written and not committed yet: path inside the table, and what is in it."""

    path: str
    size_bytes: int
    rows: int
    stats_json: str
    modification_time_ms: int


class PageSink(Protocol):
    """Writes one table's rows to fragments, which its owner commits. `finish` or `abort`, once."""

    async def append(self, rows: pa.RecordBatch) -> None:
        """Take rows of any schema version; returns when there is room for more (backpressure)."""
        ...

    async def finish(self) -> Sequence[Fragment]:
        """Make all fragments durable and give them."""
        ...

    async def abort(self) -> None:
        """Remove what was written. At any time, twice."""
        ...


class StoppedTables(Protocol):
    """Records tables as stopped, and takes nothing more of them."""

    async def __call__(self, errors: Sequence[TableError], /) -> None: ...


class EpochWriter(Protocol):
    """One epoch being filled. `commit` or `abort`, once."""

    @property
    def number(self) -> int:
        """The epoch's number: one more than the last."""
        ...

    @property
    def rows(self) -> int:
        """Rows taken so far, including those the lake had already (I3)."""
        ...

    async def append(self, batch: TableBatch, *, is_read: bool = False) -> None:
        """Take rows; those the table's raw table holds already are counted and dropped (I3).

        A row is held already when its `_cdc_lsn` is below the table's watermark at `Sink.open`; but
        not one that was read (`is_read`): no replay brings that again. The newest `resume` of the
        table's batches is kept with their commit, also of a batch without rows; if none of an
        epoch's has one, that of before stays.
        Returns when there is room for more. Raises TableError if this table can't take them.
        """
        ...

    async def discard(self, table: TableId) -> None:
        """Forget the table's rows of this epoch: it was stopped. Files that stay are orphans."""
        ...

    async def commit(
        self, summary: EpochSummary, stop: StoppedTables | None = None
    ) -> CommittedEpoch:
        """Make all tables' rows durable, then the epoch's row in `_epochs`.

        `stop` is called before that row is written, if the raw tables of some can't be written:
        it records them in `_tables` as stopped, since the row confirms their changes too (I8).
        None of their rows is listed. Without `stop` the first such TableError is raised.

        Closed to `append` from the call on, before its first await.
        Epochs are committed in the order of their numbers; the next may be filled meanwhile, and
        numbered, before this one is durable. After any error the sink must be opened again: the
        lake then holds any subset of the tables' commits, which `LakeState.watermarks` tells.
        Raises TransientError (storage), OperatorError (disk full, another writer: I5).
        """
        ...

    async def abort(self) -> None:
        """Drop the epoch and its files. At any time, twice."""
        ...


@dataclass(frozen=True, slots=True)
class MaintainedTable:
    """What maintenance did to a table of the lake, by its name ("schema.table", "_epochs").

    `small_files`: how many are left, None where that was not looked at. `error`: what kept it from
    the table; the others are not concerned.
    """

    table: str
    small_files: int | None = None
    joined_files: int = 0
    written_bytes: int = 0
    removed_files: int = 0
    error: IngestdError | None = None


class LakeMaintenance(Protocol):
    """Keeps the lake of one source in shape, beside its `Sink`: no row, position or state changes.

    What readers of the last retention need stays. May be ended at any step.
    """

    def run(
        self, *, joins: bool, cleans: bool, only: Collection[str] | None = None
    ) -> AsyncGenerator[MaintainedTable, None]:
        """Join small files, remove what is out of retention; `only`: of these tables.

        Gives each table when it is done. Close it always: nothing goes on after that. Raises
        TransientError, OperatorError.
        """
        ...


class Sink(ChangeLog, Protocol):
    """The lake of one source. `look_every_s`: how often to ask, at most, whether it is there."""

    @property
    def look_every_s(self) -> float: ...

    async def open(self) -> LakeState:
        """Read what the lake holds; forget all that was not committed. Creates nothing.

        A sink that this process has fenced before may raise OperatorError: another has taken over
        since, by a claim that does not exclude this one's (I5).
        """
        ...

    async def mark(self, lake: str | None = None) -> str:
        """Write the lake's marker where there is none, and give the id that is there. Idempotent.

        Before anything else is written, once it is known that this is the source's lake, or that
        the source has none yet. `lake`: the id that it had. Makes the lake's folder, which nothing
        else does; from here on every other call that makes something fails (LakeLostError) if the
        marker is not there any more.
        """
        ...

    async def ensure_there(self) -> None:
        """Raise LakeLostError if the marker that `open` or `mark` saw is not there any more.

        Or if an older copy of the lake, which has the same marker, took its place.
        """
        ...

    async def fence(self) -> Mapping[TableId, TableError]:
        """Have every commit fail of whoever opened this lake before: TransientError (``claimed``).

        Once after `open`, before anything is written and before the source is asked where it
        stands: what `open` gave stays true. Raises TransientError if someone committed since; who
        then opens it again, and fences, finds nothing new. Returns the tables whose raw table can't
        be written, which are now as those in `LakeState.damaged`.
        """
        ...

    async def adopt(self, origin: str) -> None:
        """Record the server these rows come from. Idempotent; makes `_epochs` and `_tables`."""
        ...

    def begin(self) -> EpochWriter:
        """Start to fill the next epoch; the one before must be committing or over. No I/O."""
        ...

    async def record(self, events: Sequence[TableEvent]) -> None:
        """Append to `_tables`, durably, one row an event.

        What is kept of a table may be made from nothing when its reading begins (an event with
        `snapshotting` after another state): all its rows come again.
        """
        ...

    async def unsent(self, table: Table, since: Lsn) -> Sequence[pa.RecordBatch]:
        """Give the durable changes with `_cdc_lsn` >= `since` that lack values that were not sent.

        Of the change schema, the columns of `ingestd.model.keys.key_columns` and `_cdc_unchanged`.
        """
        ...

    async def has_marker(self, table: Table, point: Lsn) -> bool:
        """Return whether the `t` of a snapshot at `point` is durable in the raw table."""
        ...

    async def advance(self, position: Lsn) -> None:
        """Record, durably, that nothing captured lies between the last epoch and `position`."""
        ...

    async def close(self) -> None:
        """Free everything. At any time, twice."""
        ...
