"""What a source provides that is captured: discovery, snapshots, changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ingestd.model.errors import TableError
from ingestd.model.lsn import ZERO

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
    from datetime import datetime

    from ingestd.model.changes import Chunk, TableBatch
    from ingestd.model.keys import Key
    from ingestd.model.lake_state import LakeState, Notice, RegisteredTable
    from ingestd.model.lsn import Lsn
    from ingestd.model.pg_snapshot import PgSnapshot
    from ingestd.model.schema import Table, TableId


@dataclass(frozen=True, slots=True)
class Refused:
    """A table that the config asks for and that can't be captured, with reason and remedy."""

    table: Table
    error: TableError


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the source was made ready for.

    `locked`: tables that it can't stream yet, because someone holds a lock: prepare them later.
    `storages`: what `_tables` is to have of tables that it has begun to send (`Table.storage`).
    """

    locked: frozenset[TableId] = frozenset()
    storages: Mapping[TableId, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Discovery:
    """What the source offers of what the config asks for.

    `tables`: those that can be captured. `refused`: those that can't, or are not there (oid 0).
    `origin`: names the server and its history, within which LSNs can be compared. `interrupted`:
    tables whose changes the source does not keep whole at present, or did not for a time, and why;
    if they were live there is a gap. `rewritten`: known tables whose rows have other values than
    the changes told of, and why. `lsn`: all this holds at that position; earlier changes may be of
    other definitions. `seen`: the transactions that it is after, which a commit below `lsn` may not
    be among yet; None where no stream tells of definitions. `doubts`: `Chunk.doubts` that it has
    not judged. `departed`: OIDs and names of known tables that were dropped or renamed since, whose
    last changes may be still to come. `notices`: what an operator should know of it, though nothing
    is refused for it.
    """

    tables: tuple[Table, ...]
    refused: tuple[Refused, ...]
    origin: str
    interrupted: Mapping[TableId, str] = field(default_factory=dict)
    rewritten: Mapping[TableId, str] = field(default_factory=dict)
    lsn: Lsn = ZERO
    seen: PgSnapshot | None = None
    doubts: Mapping[TableId, str] = field(default_factory=dict)
    departed: frozenset[tuple[int, TableId]] = frozenset()
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True, slots=True)
class Fresh:
    """Nothing in the lake yet, or nothing that a snapshot would not replace."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The source still has every change after the lake's position."""


@dataclass(frozen=True, slots=True)
class Lost:
    """There may be a gap between the lake's position and what the source still has.

    `is_behind`: the source is at a position below what the lake has, so tables can't be re-read
    before it has passed that; `remedy` says how.
    """

    reason: str
    remedy: str | None = None
    is_behind: bool = False


@dataclass(frozen=True, slots=True)
class LakeLost:
    """The source was read further than the lake says, or into another lake than this one.

    The source still has what follows for the lake that it was read into: nothing may be taken of it
    before someone has agreed to that.
    """

    reason: str


Continuity = Fresh | Resumed | Lost | LakeLost


@dataclass(frozen=True, slots=True)
class CaptureLag:
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
    seen: PgSnapshot | None = None


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
    against that (design section 8.9, docs/snapshots.md). A row that is read again, by this snapshot
    or by another one, has another position, on an idle source too.
    """

    @property
    def is_chunked(self) -> bool: ...

    @property
    def point(self) -> Lsn:
        """Position of the tables' `t`.

        At one point: changes with commit_lsn >= this are not in it; all below are. In chunks: all
        changes from here on must be taken from the stream.
        """
        ...

    @property
    def at(self) -> datetime:
        """When it was taken (aware)."""
        ...

    def items(self) -> AsyncGenerator[SnapshotItem, None]:
        """Yield every table's pages, tables and splits in any order or mixed.

        A TableError: that table failed, nothing more of it comes, the others go on (I8). Bounded
        memory. Ends when all tables are read. Call once.
        """
        ...

    def rows_of(self, table: Table, keys: Collection[Key]) -> AsyncGenerator[SnapshotPage, None]:
        """Yield the rows with these keys (of `Table.identifying`), in chunks; at least one page.

        For a chunked snapshot only. A key without a row is left out. Raises TableError.
        """
        ...

    def oldest(self) -> PgSnapshot | None:
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

        For `ChangeCapture.snapshot`; empty where it would have to begin again.
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

    Raises TransientError, OperatorError (see `ingestd.model.errors`) or ProtocolError from any
    call.
    """

    @property
    def supports_replay(self) -> bool:
        """Whether `live(after)` can start at any position not confirmed yet."""
        ...

    async def claim(self) -> None:
        """Become the only daemon on this source, until `close` (I5).

        Idempotent. Raises TransientError (reason ``claimed``) while another holds it. Should the
        claim be lost later, `hold`, `live` and `health` raise TransientError. It is lost within a
        bounded time when the event loop stands still (I11).
        """
        ...

    async def hold(self) -> None:
        """Wait until the claim is lost, and raise why (TransientError). Cancel it freely.

        After `claim`, which it does not take: the claim is kept with or without this.
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

    async def continuity(self, committed: LakeState) -> Continuity:
        """Return whether streaming can go on where the lake ends. Changes nothing."""
        ...

    async def prepare(
        self, tables: Sequence[Table], *, renew: bool = False, read_to: Lsn | None = None
    ) -> Prepared:
        """Make the source ready to stream these tables (slot, publication). Idempotent.

        `Prepared.locked` has those that it can't stream yet: someone holds a lock, or dropped one,
        or the source refuses it, which the next discovery tells (`Discovery.refused`). Prepare them
        later.

        While `live` runs: from its return on, `live` takes these tables' changes and no others'.
        With `renew` a position that was kept is given up and a new one begins: only after
        `continuity` said Lost. `read_to`: up to where tables were read of which the lake does not
        tell yet; what an earlier preparation began holds if that was before. Must come before
        `snapshot` and `live`.
        """
        ...

    async def chunked(self, tables: Sequence[Table], *, initial: bool) -> frozenset[TableId]:
        """Say which of these tables must be read in chunks rather than at one point.

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
        """Yield changes of transactions with commit_lsn >= `after`, in commit order, indefinitely.

        `after` must be durable: the source may take it as confirmed. None: from the confirmed
        position. Bounded memory: not asking for the next chunk holds the
        source back, but never breaks the connection. Now and then a chunk without batches says
        that nothing was captured up to its position (I10).
        """
        ...

    async def seen(self) -> PgSnapshot:
        """What a snapshot taken now sees; every chunk that begins later sees that as well."""
        ...

    def checkpoint_requested(self) -> bool:
        """Return whether to close the epoch: the source waits for it, or a backlog is all there."""
        ...

    async def confirm(self, position: Lsn) -> None:
        """Tell the source that it may discard what is below `position`.

        Cumulative; repeating or lowering it does nothing. Raises ValueError beyond what `live`
        or the snapshot's point has delivered.
        """
        ...

    async def lag(self) -> CaptureLag:
        """Measure the lag, on a connection of its own: works while `live` is blocked."""
        ...

    async def health(self) -> None:
        """Return if the connections and the claim are good; raise what is wrong otherwise.

        Cancel it freely.
        """
        ...

    async def close(self) -> None:
        """Free everything. At any time, twice, after any error."""
        ...
