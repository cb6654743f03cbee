"""The port of a source that is captured: discovery, snapshots, changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ingestd.model.errors import TableError
from ingestd.model.lsn import ZERO

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
    from datetime import datetime

    from ingestd.model.changes import ChangeSet, TableBatch
    from ingestd.model.keys import Key
    from ingestd.model.lake_state import LakeState, Notice, RegisteredTable
    from ingestd.model.lsn import Lsn
    from ingestd.model.pg_snapshot import PgSnapshot
    from ingestd.model.schema import Table, TableId


@dataclass(frozen=True, slots=True)
class Refused:
    """A table that the config asks for but that can't be captured, with reason and remedy."""

    table: Table
    error: TableError


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of preparing a source.

    `locked`: tables that it can't stream yet because another session holds a lock; prepare them
    again later. `fingerprints`: for tables whose streaming has begun, the `Table.fingerprint` that
    must be recorded in `_tables`. `is_moved`: the stream continues behind what was given up, while
    transactions are open that a consistent point would have to wait for: tables are read beside it.
    `begins`: the position before which nothing is streamed, for the sink to record before a table
    that needs all changes from there on; None while `live` runs, or if any position will do.
    """

    locked: frozenset[TableId] = frozenset()
    fingerprints: Mapping[TableId, str] = field(default_factory=dict)
    is_moved: bool = False
    begins: Lsn | None = None


@dataclass(frozen=True, slots=True)
class Discovery:
    """The source's answer to what the config asks for.

    `tables`: the tables that can be captured. `refused`: the tables that can't, or that don't exist
    (oid 0). `server_id`: identifies the server and its history; LSNs are comparable only within it.
    `interrupted`: tables whose changes the source does not retain completely, now or for some time
    in the past, and why; if such a table was live, there is a gap. `rewritten`: known tables whose
    rows have values that no change reported, and why. `lsn`: the position at which all this holds;
    earlier changes may have other definitions. `seen`: the transactions that precede the discovery;
    a commit below `lsn` may not be among them yet. None if the stream does not send definitions.
    `doubts`: the `ChangeSet.doubts` that this discovery has not resolved. `dropped`: OIDs and names
    of known tables that have been dropped or renamed; their last changes may still arrive.
    `notices`: facts that an operator should know although nothing is refused for them.
    """

    tables: tuple[Table, ...]
    refused: tuple[Refused, ...]
    server_id: str
    interrupted: Mapping[TableId, str] = field(default_factory=dict)
    rewritten: Mapping[TableId, str] = field(default_factory=dict)
    lsn: Lsn = ZERO
    seen: PgSnapshot | None = None
    doubts: Mapping[TableId, str] = field(default_factory=dict)
    dropped: frozenset[tuple[int, TableId]] = frozenset()
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True, slots=True)
class Fresh:
    """The lake is empty, or holds nothing that a snapshot would not replace."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The source still has every change after the lake's position."""


@dataclass(frozen=True, slots=True)
class Lost:
    """There may be a gap between the lake's position and the first change the source still has.

    `is_behind`: the source's position precedes the lake's, so tables can't be re-read until the
    source has passed it; `remedy` says how.
    """

    reason: str
    remedy: str | None = None
    is_behind: bool = False


@dataclass(frozen=True, slots=True)
class LakeLost:
    """The source was read further than this lake says, or into another lake.

    The source still has the changes that the other lake needs next. They must not be consumed
    before an operator agrees.
    """

    reason: str


Continuity = Fresh | Resumed | Lost | LakeLost


@dataclass(frozen=True, slots=True)
class ServerEnd:
    """A position beyond which the server can't have sent anything to this lake.

    `in_recovery`: the server is a standby, which may receive more at any time.
    """

    lsn: Lsn
    in_recovery: bool = False


@dataclass(frozen=True, slots=True)
class CaptureLag:
    """How far the source is ahead. Bytes of WAL; None where the server does not report it.

    `current_lsn`: the server's own position. `lag_bytes`: from the confirmed position to there.
    `retained_bytes`: WAL the slot retains. `safe_bytes`: WAL that may still be written before the
    slot is in danger. `seconds`: age of the oldest change not yielded yet, if the capture knows it
    (otherwise the pipeline derives it from delivered changes). `wal_status`: the state of the
    slot's WAL, pg_replication_slots.wal_status.
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

    `seen`: the snapshot that the rows were read in; None if that saw exactly what committed below
    `position`. Nothing visible in it commits at or above `position`.
    """

    batch: TableBatch
    position: Lsn
    seen: PgSnapshot | None = None


@dataclass(frozen=True, slots=True)
class SplitRead:
    """All pages of a table's split `where` have been yielded before this."""

    table: TableId
    where: str


@dataclass(frozen=True, slots=True)
class TableRead:
    """All splits of a table have been read."""

    table: TableId


SnapshotItem = SnapshotPage | SplitRead | TableRead | TableError


class Snapshot(Protocol):
    """Tables being read, at one consistent point or incrementally. Always close it; twice is fine.

    At a consistent point: every row is at (`point`, 0). Incrementally (`is_incremental`): each page
    has its own position above `point` and carries the snapshot it was read in; the stream's changes
    must be compared with that (design section 8.9, docs/snapshots.md). A row that is read again, by
    this or another snapshot, gets a new position, even on an idle source.
    """

    @property
    def is_incremental(self) -> bool: ...

    @property
    def point(self) -> Lsn:
        """Position of the tables' `t`.

        At a consistent point: changes with commit_lsn below this are in the snapshot, all others
        are not. Incrementally: all changes from here on must be taken from the stream.
        """
        ...

    @property
    def at(self) -> datetime:
        """Time of the snapshot (aware)."""
        ...

    def items(self) -> AsyncGenerator[SnapshotItem, None]:
        """Yield every table's pages, tables and splits in any order or mixed.

        After a TableError nothing more of that table is yielded; the other tables continue (I8).
        Memory is bounded. Ends when all tables are read. Call once.
        """
        ...

    def rows_of(self, table: Table, keys: Collection[Key]) -> AsyncGenerator[SnapshotPage, None]:
        """Yield the rows with these keys (of `Table.identifying`) in pages; at least one page.

        For an incremental snapshot only. A key without a row is omitted. Raises TableError.
        """
        ...

    def oldest(self) -> PgSnapshot | None:
        """Return a snapshot older than that of any page after the one yielded last.

        None where pages don't carry the snapshot they were read in.
        """
        ...

    def abandon(self, table: TableId) -> None:
        """Stop reading a table; pages in flight may still be yielded."""
        ...

    def ratio_read(self, table: TableId) -> float:
        """Return the ratio of a table yielded so far, 0 to 1, by the source's size estimate."""
        ...

    def remainder(self, table: TableId, done: Collection[str]) -> str:
        """Return what a later snapshot must read if these splits (`where`) are durable.

        For `ChangeCapture.snapshot`; empty if it would have to start over.
        """
        ...

    async def advance_source(self) -> None:
        """Make `changes` pass the source's current position soon, even on an idle source.

        An epoch that holds snapshot rows is closed only after the position has grown.
        """
        ...

    async def close(self) -> None: ...


class ChangeCapture(Protocol):
    """Changes of one source. One user at a time, all calls from one event loop.

    Any call may raise TransientError, OperatorError (see `ingestd.model.errors`) or ProtocolError.
    """

    @property
    def supports_replay(self) -> bool:
        """True if `changes(after)` can start at any position not confirmed yet."""
        ...

    async def claim(self) -> None:
        """Become the only daemon on this source, until `close` (I5).

        Idempotent. Raises TransientError (reason ``claimed``) while another daemon holds the claim.
        If the claim is lost later, `hold`, `changes` and `health` raise TransientError. It is lost
        within a bounded time if the event loop stalls (I11).
        """
        ...

    async def hold(self) -> None:
        """Wait until the claim is lost, then raise the cause (TransientError). Safe to cancel.

        Call it after `claim`: it does not acquire the claim, and the claim lasts with or without
        it.
        """
        ...

    async def discover(self, known: Mapping[TableId, RegisteredTable]) -> Discovery:
        """Return what the source has to capture, given what the lake has of it (I7).

        `known` decides which lake column takes a column's values: a column whose type changed gets
        a new one. Changes nothing in the source and needs no claim; may also run while `changes`
        does. Interrupted and rewritten tables are reported once; the caller must remember them.
        """
        ...

    async def tables_changed(self) -> None:
        """Return when the result of `discover` may have changed. Safe to cancel."""
        ...

    def retry(self, tables: Collection[TableId]) -> Collection[TableId]:
        """Retry at the next discovery those tables that are refused for some time after a fault.

        Return which of them are.
        """
        ...

    async def server_end(self, committed: LakeState) -> ServerEnd:
        """Return the end of what this server can have sent to this lake. Changes nothing.

        On a server that was promoted, it is where its history left that of the lake.
        """
        ...

    async def end_position(self) -> Lsn:
        """Return a position below which `live` delivers all that was committed before the call.

        Safe to cancel; may wait until it has been read.
        """
        ...

    async def continuity(self, committed: LakeState) -> Continuity:
        """Return whether streaming can continue where the lake ends. Changes nothing."""
        ...

    async def prepare(
        self, tables: Sequence[Table], *, renew: bool = False, read_to: Lsn | None = None
    ) -> Prepared:
        """Make the source ready to stream these tables (slot, publication). Idempotent.

        `Prepared.locked` lists the tables that it can't stream yet: a session holds a lock, a table
        was dropped, or the source refuses it, which the next discovery reports
        (`Discovery.refused`). Prepare them again later.

        While `changes` runs: once this returns, `changes` yields the changes of these tables and no
        others. `renew` gives up the retained position and begins a new one: only after `continuity`
        returned Lost. `read_to`: the position up to which tables were read that the lake does not
        record yet; what an earlier preparation began is kept if it does not lie above that. Must
        come before `snapshot` and `changes`.
        """
        ...

    async def choose_incremental(
        self, tables: Sequence[Table], *, initial: bool
    ) -> frozenset[TableId]:
        """Return the tables that must be read incrementally, not at a consistent point.

        `initial`: the lake has nothing of them. Raises nothing that a snapshot would not.
        """
        ...

    async def snapshot(
        self,
        tables: Sequence[Table],
        *,
        incremental: bool = False,
        newly_published: bool = False,
        remainder: str = "",
        where: str | None = None,
    ) -> Snapshot:
        """Start reading these prepared tables at a point that `changes` will reach and pass.

        `incremental`: only for tables that `choose_incremental` returned, and only while `changes`
        runs. `remainder`: for one table, what an earlier snapshot left to read
        (`Snapshot.remainder`); the new snapshot has that one's `point`. `newly_published`: the
        source has begun to send the tables' changes only just now, and running transactions may not
        be covered: wait for these. `where`: for one table, read only the rows for which this SQL
        condition holds. Several snapshots may be open at once. Call before `changes` or while it
        runs; a change set that `changes` yields later may precede the point. Raises
        TableReplacedError if `remainder` is no longer valid (or yields it in `items`), TableError
        if `where` is not a condition.
        """
        ...

    def changes(self, after: Lsn | None) -> AsyncGenerator[ChangeSet, None]:
        """Yield changes of transactions with commit_lsn >= `after`, in commit order, indefinitely.

        `after` must be durable: the source may treat it as confirmed. None: from the confirmed
        position. Memory is bounded: a caller that does not ask for the next change set slows the
        source down, but the connection stays up. From time to time a change set without batches
        reports that nothing was captured up to its position (I10).
        """
        ...

    async def current_pg_snapshot(self) -> PgSnapshot:
        """Return the snapshot as of now; every chunk that begins later sees at least as much."""
        ...

    def commit_requested(self) -> bool:
        """Return True to close the epoch: the source waits for it, or a backlog has arrived."""
        ...

    async def confirm(self, position: Lsn) -> None:
        """Allow the source to discard what precedes `position`.

        Cumulative; repeating or lowering it has no effect. Raises ValueError for a position beyond
        what `changes` or the snapshot's point has delivered.
        """
        ...

    async def lag(self) -> CaptureLag:
        """Measure the lag on a separate connection: works while `changes` is blocked."""
        ...

    async def health(self) -> None:
        """Return if the connections and the claim are good; raise the fault otherwise.

        Safe to cancel.
        """
        ...

    async def close(self) -> None:
        """Release everything. May be called at any time, twice, and after any error."""
        ...
