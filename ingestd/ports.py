"""The ports: what `run/` drives and a capture or a sink provides.

Their docstrings are the contract; `tests/contract/` holds every implementation to it, the in-memory
ones of `ingestd.fakes` like the real ones.

The order of a source's life, and who moves which position::

    capture.claim -> sink.open -> capture.discover -> capture.continuity -> sink.adopt
      -> capture.prepare -> capture.snapshot -> capture.live ... capture.confirm -> close

    received    the capture, as bytes arrive
    whole       the decoder, at a commit: Chunk.position
    durable     the sink, when EpochWriter.commit or Sink.advance returns
    confirmed   the pipeline alone, by ChangeCapture.confirm, and only to a durable position (I1)

All async methods may be cancelled at any await and leave nothing half done that a next `claim` and
`open` would not put right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
    from datetime import datetime

    import pyarrow as pa
    from pydantic import BaseModel

    from ingestd.changes import Chunk, CommittedEpoch, EpochSummary, TableBatch
    from ingestd.checks import CheckLine
    from ingestd.keys import Key
    from ingestd.predicates import Predicate
    from ingestd.recorded import Committed, RegisteredTable, TableEvent
    from ingestd.schema import Table, TableId
    from ingestd.visibility import Visibility

from ingestd.errors import IngestdError, OperatorError, TableError
from ingestd.positions import ZERO, Lsn

# --- capture ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refused:
    """A table that the config asks for and that can't be captured, with reason and remedy."""

    table: Table
    error: TableError


@dataclass(frozen=True, slots=True)
class Discovery:
    """What the source offers of what the config asks for.

    `tables`: those that can be captured. `refused`: those that can't, or are not there (oid 0).
    `origin`: names the server and its history, within which LSNs can be compared. `interrupted`:
    tables whose changes the source does not keep whole at present; if they were live there is a
    gap. `rewritten`: known tables whose rows have other values than the changes told of, and why.
    `lsn`: all this holds at that position; earlier changes may be of other definitions.
    """

    tables: tuple[Table, ...]
    refused: tuple[Refused, ...]
    origin: str
    interrupted: frozenset[TableId] = frozenset()
    rewritten: Mapping[TableId, str] = field(default_factory=dict)
    lsn: Lsn = ZERO


@dataclass(frozen=True, slots=True)
class Fresh:
    """Nothing in the lake yet, or nothing that a snapshot would not replace."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The source still has every change after the lake's position."""


@dataclass(frozen=True, slots=True)
class Lost:
    """There may be a gap between the lake's position and what the source still has.

    `is_behind`: the source is at a position below what the lake has, so tables can't be read anew
    before it has passed that; `remedy` says how.
    """

    reason: str
    remedy: str | None = None
    is_behind: bool = False


Continuity = Fresh | Resumed | Lost


@dataclass(frozen=True, slots=True)
class Lag:
    """How far the source is ahead. Bytes of WAL; None where the server does not tell.

    `current_lsn`: the server's own position. `lag_bytes`: from the confirmed position to there.
    `retained_bytes`: WAL the slot holds back. `safe_bytes`: WAL that may still be written before
    the slot is in danger. `seconds`: age of the oldest change that was not given yet, where the
    capture can tell (else the pipeline goes by what was delivered). `wal_status`: what the server
    says of the slot's WAL, pg_replication_slots.wal_status.
    """

    current_lsn: Lsn
    confirmed_lsn: Lsn | None
    lag_bytes: int | None
    retained_bytes: int | None
    safe_bytes: int | None
    seconds: float | None = None
    wal_status: str | None = None


@dataclass(frozen=True, slots=True)
class SnapshotPage:
    """Rows of a table as `r` rows at (`position`, 0).

    `seen`: what the snapshot saw that they were read in; None where that is all that committed
    below `position` and nothing else. Nothing visible in it commits at or above `position`.
    """

    batch: TableBatch
    position: Lsn
    seen: Visibility | None = None


@dataclass(frozen=True, slots=True)
class SplitRead:
    """All pages of a table's split `where` have been given before this."""

    table: TableId
    where: str


@dataclass(frozen=True, slots=True)
class TableRead:
    """All splits of a table have been read."""

    table: TableId


SnapshotItem = SnapshotPage | SplitRead | TableRead | TableError


class Snapshot(Protocol):
    """Tables being read, at one consistent point or in chunks. Close it always; twice is fine.

    At one point: every row is at (`point`, 0). In chunks (`is_chunked`): each page has its own
    position above `point` and says what its snapshot saw; the stream's changes have to be held
    against that (design section 8.9, docs/snapshots.md).
    """

    @property
    def is_chunked(self) -> bool: ...

    @property
    def point(self) -> Lsn:
        """Position of the tables' `t`.

        At one point: changes with commit_lsn >= this are not in it; all below are. In chunks: all
        changes from here on are to be taken from the stream.
        """
        ...

    @property
    def at(self) -> datetime:
        """When it was taken (aware)."""
        ...

    def items(self) -> AsyncGenerator[SnapshotItem, None]:
        """Give every table's pages, tables and splits in any order or mixed.

        A TableError: that table failed, nothing more of it comes, the others go on (I8). Bounded
        memory. Ends when all tables are read. Call once.
        """
        ...

    def rows_of(self, table: Table, keys: Collection[Key]) -> AsyncGenerator[SnapshotPage, None]:
        """Give the rows with these keys (of `Table.identifying`), in chunks; at least one page.

        For a chunked snapshot only. A key without a row is left out. Raises TableError.
        """
        ...

    def oldest(self) -> Visibility | None:
        """A snapshot that is older than that of any page which comes after what was given last.

        None where pages do not say what was seen.
        """
        ...

    def abandon(self, table: TableId) -> None:
        """Begin to read nothing more of a table; what is under way may still be given."""
        ...

    def progress(self, table: TableId) -> float:
        """How much of a table has been given, by the source's estimate of its size: 0 to 1."""
        ...

    def left(self, table: TableId, done: Collection[str]) -> str:
        """Write what a later snapshot has to read if these splits (`where`) are durable.

        For `ChangeCapture.snapshot`; empty where it would have to begin anew.
        """
        ...

    async def move_on(self) -> None:
        """See to it that `live` passes the source's present position soon, were it idle for ever.

        An epoch with rows that were read is closed only when the position has grown.
        """
        ...

    async def close(self) -> None: ...


class ChangeCapture(Protocol):
    """Changes of one source. One user at a time, all calls from one event loop.

    Raises TransientError, OperatorError (see `ingestd.errors`) or ProtocolError from any call.
    """

    @property
    def supports_replay(self) -> bool:
        """Whether `live(after)` can start at any position not confirmed yet."""
        ...

    async def claim(self) -> None:
        """Become the only daemon on this source, until `close` (I5).

        Idempotent. Raises TransientError (reason ``claimed``) while another holds it. Should the
        claim be lost later, `live` and `health` raise TransientError.
        """
        ...

    async def discover(self, known: Mapping[TableId, RegisteredTable]) -> Discovery:
        """Ask the source what there is to capture, given what the lake has of it (I7).

        `known` decides which lake column takes a column's values: one whose type is another than
        before gets a new one. Changes nothing in the source; needs no claim. Also while `live`
        runs. What is interrupted or rewritten is told once: the caller keeps it.
        """
        ...

    async def tables_changed(self) -> None:
        """Return when the tables may be others than `discover` last said. Cancel it freely."""
        ...

    async def continuity(self, committed: Committed) -> Continuity:
        """Say whether streaming can go on where the lake ends. Changes nothing."""
        ...

    async def prepare(self, tables: Sequence[Table], *, renew: bool = False) -> frozenset[TableId]:
        """Make the source ready to stream these tables (slot, publication). Idempotent.

        Gives those that it can't stream yet, because somebody holds a lock: prepare them later.
        Raises TransientError (``table_gone``) if one is not there any more: discover again.

        While `live` runs: from its return on, `live` takes these tables' changes and no others'.
        With `renew` a position that was kept is given up and a new one begins: only after
        `continuity` said Lost. Must come before `snapshot` and `live`.
        """
        ...

    async def chunked(self, tables: Sequence[Table], *, initial: bool) -> frozenset[TableId]:
        """Say which of these tables are to be read in chunks rather than at one point.

        `initial`: the lake has nothing of them. Raises nothing that a snapshot would not.
        """
        ...

    async def snapshot(
        self,
        tables: Sequence[Table],
        *,
        chunked: bool = False,
        are_new: bool = False,
        left: str = "",
        where: str | None = None,
    ) -> Snapshot:
        """Begin to read these prepared tables at a point that `live` will reach and pass.

        `chunked`: in chunks, of which `chunked` above is true, and only while `live` runs. `left`:
        of one table, what an earlier snapshot left (`Snapshot.left`); its `point` is that one's.
        `are_new`: the source sends their changes only since a moment ago, perhaps not all of the
        transactions that run: those are waited for.
        `where`: of one table, only the rows for which this SQL condition holds. Several may be open
        at once. Before `live` or while it runs; a chunk taken from `live` later may lie below the
        point. Raises TableReplacedError where `left` does not hold any more (or gives it in
        `items`), TableError for a `where` that is no condition.
        """
        ...

    def live(self, after: Lsn | None) -> AsyncGenerator[Chunk, None]:
        """Give the changes of transactions with commit_lsn >= `after`, in commit order, for ever.

        `after` must be durable: the source may take it as confirmed. None: from the confirmed
        position. Bounded memory: not asking for the next chunk holds the
        source back, but never breaks the connection. Now and then a chunk without batches says
        that nothing was captured up to its position (I10).
        """
        ...

    async def seen(self) -> Visibility:
        """What a snapshot taken now sees; every chunk that begins later sees that as well."""
        ...

    def checkpoint_requested(self) -> bool:
        """Whether the source waits for a confirmation (a server shutting down): close the epoch."""
        ...

    async def confirm(self, position: Lsn) -> None:
        """Tell the source that it may discard what is below `position`.

        Cumulative; repeating or lowering it does nothing. Raises ValueError beyond what `live`
        or the snapshot's point has delivered.
        """
        ...

    async def lag(self) -> Lag:
        """Measure the lag, on a connection of its own: works while `live` is blocked."""
        ...

    async def health(self) -> None:
        """Return if the connections and the claim are good; raise what is wrong otherwise."""
        ...

    async def close(self) -> None:
        """Free everything. At any time, twice, after any error."""
        ...


class ChangeLog(Protocol):
    """What the lake has of a source's changes."""

    def changes(
        self, table: TableId, columns: Sequence[str]
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Give the durable change rows of a table, in any order: these columns of its raw table.

        As of when the call is made; nothing of a table that the lake has not. A column that it
        lacks is left out. Bounded memory. Close it always. Raises TransientError, OperatorError.
        """
        ...


# --- reading a table -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ColumnInfo:
    """A column for a person to look at; statistics are the server's estimates, None if none."""

    name: str
    pg_type: str
    nullable: bool
    comment: str | None
    null_fraction: float | None
    distinct: float | None


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table for a person to look at; `rows` and `bytes` are the server's estimates."""

    id: TableId
    columns: tuple[ColumnInfo, ...]
    key: tuple[str, ...]
    replica_identity: str
    comment: str | None
    rows: int | None
    bytes: int | None


class Metadata(Protocol):
    """What is in the database, asked within `timeout_s` (TransientError ``timeout`` beyond it).

    Needs no right but to connect; statistics that the role may not see are None. Waits for nobody
    who holds a table.
    """

    async def schemas(self) -> Sequence[str]:
        """Names of the schemas that hold user tables, sorted."""
        ...

    async def tables(self, schema: str | None = None) -> Sequence[TableInfo]:
        """Tables of a schema, sorted by name; empty for an unknown one. None: of all, in order."""
        ...


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which of the tables that the config asks for are captured as things stand, and which not.

    `tables` as they are captured; `refused` may not be there (oid 0). `faults`: what keeps the
    source from being captured at all.
    """

    tables: Sequence[Table]
    refused: Sequence[Refused]
    faults: Sequence[OperatorError] = ()


@dataclass(frozen=True, slots=True)
class Split:
    """An independent piece of a table at one snapshot; only its `SplitManager` knows `where`.

    Picklable, so that another process can read it.
    """

    table: Table
    snapshot: str
    where: str
    estimated_bytes: int


class SplitManager(Protocol):
    """Cuts tables into splits: together every row once, whatever the number of them."""

    async def splits(self, table: Table, snapshot: str, target_bytes: int) -> Sequence[Split]:
        """Cut `table` into splits of about `target_bytes` each; at least one."""
        ...


class PageSource(Protocol):
    """A split's rows as Arrow batches. Always closed; not reusable."""

    @property
    def remaining(self) -> Sequence[Predicate]:
        """Predicates that it was given and does not apply: the reader must.

        Known from the start. The others are applied exactly as the reader would do it.
        """
        ...

    def batches(self) -> AsyncIterator[pa.RecordBatch]:
        """Give the rows: the projected columns, lake names and types, plus `_cdc_raw`.

        Bounded memory.
        """
        ...

    async def close(self) -> None: ...


class Connector(Protocol):
    """One source: everything that can be asked of it. `close` closes all it gave."""

    def metadata(self, timeout_s: float = 10.0) -> Metadata: ...

    async def coverage(
        self, known: Mapping[TableId, RegisteredTable], timeout_s: float = 10.0
    ) -> Coverage:
        """Say which tables are captured, given what the lake has of them. Changes nothing.

        Needs no right but to connect. Raises OperatorError, TransientError (``timeout``).
        """
        ...

    def capture(self, log: ChangeLog | None = None) -> ChangeCapture:
        """Make a capture. `log`: the lake that its changes go to, for one that looks back."""
        ...

    def splits(self, *, resumable: bool = False) -> SplitManager:
        """Give what cuts tables in the way that is read fastest.

        With `resumable` a split has the same rows under a later snapshot too, but for those that
        came, went or changed; the price is slower reading, and one split for each table or
        partition where nothing could be cut like that.
        """
        ...

    def page_source(
        self,
        split: Split,
        columns: Sequence[str] | None = None,
        predicates: Sequence[Predicate] = (),
    ) -> PageSource:
        """Read a split: `columns` None for all, else by the source's names, in this order.

        Rows for which one of the `predicates` is not true are left out, as far as it can be done
        (`PageSource.remaining`). KeyError for a column that the table has not.
        """
        ...

    async def check(self) -> Sequence[CheckLine]:
        """Look for everything that would make a run fail. Changes nothing."""
        ...

    async def close(self) -> None: ...


class ConnectorFactory(Protocol):
    """Makes connectors of one kind; found by `kind` in the registry."""

    @property
    def name(self) -> str:
        """The config's `kind`."""
        ...

    @property
    def config_model(self) -> type[BaseModel]:
        """Model of the `[sources.NAME]` section; it refuses unknown keys."""
        ...

    def create(self, source: str, config: BaseModel, *, memory_bytes: int) -> Connector:
        """Make a connector whose buffers stay under `memory_bytes`; does no I/O.

        Raises TypeError for another kind's config.
        """
        ...


class ReferenceTableSource(Protocol):
    """Current rows of one table: a snapshot, then what changed.

    One user at a time. Raises TransientError, OperatorError or TableError from any async method;
    what it gave until then stays given.
    """

    @property
    def key(self) -> Sequence[str]:
        """Lake names of the columns that changes find their rows by, known with the first batch.

        Empty for a source that gives no changes.
        """
        ...

    @property
    def position(self) -> int:
        """A number that grows with what is given: what was given up to it need not be given again.

        Of a snapshot, known with its first batch, then of the changes polled last. 0 for a source
        that gives no changes.
        """
        ...

    async def poll_snapshot(self) -> pa.RecordBatch | None:
        """Give the next batch of the snapshot, None for good after the last.

        All batches together are the table at one moment, each row once. Each has the table's
        columns, lake names and types, and nothing else; the first may be empty, so that an empty
        table too tells its columns. An empty batch is not the end: an empty first poll is not the
        completion of a table. Nor is an error: the next poll goes on where it was, or raises
        TransientError (``snapshot_gone``), each time: then another source is to begin anew.
        """
        ...

    def is_snapshot_complete(self) -> bool:
        """Whether `poll_snapshot` has given None.

        No longer so when the snapshot is void (the table was truncated, read anew or altered):
        then `poll_snapshot` gives another one, which takes the place of all that was given.
        """
        ...

    async def poll_changes(self) -> pa.RecordBatch | None:
        """Give what changed since the last poll, or since the snapshot: one row a key.

        None while the snapshot is not complete, also when it has just become void. The table's
        columns, and ``_cdc_op``: `u`, the row as it is now, or `d`, the key of one that is gone.
        There may be ``_cdc_unchanged``, names of columns whose value is that which the row had
        before these changes, and ``_cdc_before``, the key that it had then if that was another. A
        source that sees no changes gives an empty batch, always.
        """
        ...

    def checkpoint(self) -> bytes:
        """Give the state from which `restore` goes on. Changes nothing."""
        ...

    def restore(self, checkpoint: bytes) -> bool:
        """Go on from there, before the first poll.

        False if the snapshot can't be gone on with (whoever held it has ended): it begins anew, and
        the batches given before the checkpoint are void.
        """
        ...

    async def close(self) -> None:
        """Free everything. At any time, twice."""
        ...


# --- sink ------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class ReferenceState:
    """What the lake has of a reference table: its Delta version, rows and columns.

    `position`: up to which source position its rows are (`ReferenceTableSource.position`), None if
    that was never told. `is_new`: the call that gave this has made a version.
    """

    version: int
    rows: int
    schema: pa.Schema
    position: int | None = None
    is_new: bool = False


class ReferenceSink(Protocol):
    """The current rows of one reference table in the lake; every version of it is whole.

    One user at a time. Raises TransientError (storage), OperatorError (disk full, another writer);
    after an error what is there is either that of before or that of after the call.
    """

    async def open(self) -> ReferenceState | None:
        """Read what the lake has, None if nothing; make it durable. Creates nothing."""
        ...

    async def replace(
        self, batches: AsyncIterator[pa.RecordBatch], *, position: int | None = None
    ) -> ReferenceState:
        """Put these rows, and their columns, in the place of all there is: one version.

        At least one batch, all of one schema. With the same rows (in any order) and columns as
        there are, and no `position`, nothing is written. If `batches` raises, nothing is either.
        """
        ...

    async def merge(
        self, changes: pa.RecordBatch, key: Sequence[str], *, position: int
    ) -> ReferenceState:
        """Apply changes as `ReferenceTableSource.poll_changes` gives them: one version.

        Nothing if `position` is not above the state's. Raises ValueError for other columns than the
        table has; TransientError (``row_missing``) if a value is to stay as it was in a row that is
        not there: replace all rows.
        """
        ...

    async def close(self) -> None:
        """Return when nothing is written any more. At any time, twice."""
        ...


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
        """Forget the table's rows of this epoch: it was stopped."""
        ...

    async def commit(self, summary: EpochSummary) -> CommittedEpoch:
        """Make all tables' rows durable, then the epoch's row in `_epochs`.

        Closed to `append` from the call on, before its first await.
        Epochs are committed in the order of their numbers; the next may be filled meanwhile, and
        numbered, before this one is durable. After any error the sink must be opened anew: the
        lake then holds any subset of the tables' commits, which `Committed.watermarks` tells.
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
    """The lake of one source."""

    async def open(self) -> Committed:
        """Read what the lake holds; forget all that was not committed. Creates nothing."""
        ...

    async def fence(self) -> None:
        """Have every commit fail of whoever opened this lake before: TransientError (``claimed``).

        Once after `open`, before anything is written and before the source is asked where it
        stands: what `open` gave stays true. Raises TransientError if somebody committed since.
        """
        ...

    async def adopt(self, origin: str) -> None:
        """Record the server these rows come from. Idempotent; makes `_epochs` and `_tables`."""
        ...

    def begin(self) -> EpochWriter:
        """Start to fill the next epoch; the one before must be committing or over. No I/O."""
        ...

    async def record(self, events: Sequence[TableEvent]) -> None:
        """Append to `_tables`, durably, one row an event."""
        ...

    async def unsent(self, table: Table, since: Lsn) -> Sequence[pa.RecordBatch]:
        """Give the durable changes with `_cdc_lsn` >= `since` that lack values that were not sent.

        Of the change schema, the columns of `ingestd.keys.key_columns` and `_cdc_unchanged`.
        """
        ...

    async def has_marker(self, table: Table, point: Lsn) -> bool:
        """Whether the `t` of a snapshot at `point` is durable in the raw table."""
        ...

    async def advance(self, position: Lsn) -> None:
        """Record, durably, that nothing captured lies between the last epoch and `position`."""
        ...

    async def close(self) -> None:
        """Free everything. At any time, twice."""
        ...
