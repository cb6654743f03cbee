"""A capture of an in-memory source that fulfils the complete contract."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence

import numpy as np

from ingestd.model.changes import ChangeSet, idle_change_set
from ingestd.model.errors import TransientError
from ingestd.model.lake_state import LakeState, RegisteredTable
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import Table, TableId
from ingestd.ports import (
    CaptureLag,
    Continuity,
    Discovery,
    Fresh,
    LakeLost,
    Lost,
    Prepared,
    Resumed,
    ServerEnd,
    Snapshot,
)
from ingestd.testing.fakes.database import RECORD_BYTES, FakeChange, FakeDatabase, FakeTransaction
from ingestd.testing.fakes.rows import numbered, stream_batches
from ingestd.testing.fakes.snapshot import FakeSnapshot, Reach, remainder_of

__all__ = ["FakeCapture", "FakeChange", "FakeDatabase", "FakeTransaction"]


class FakeCapture:
    """A ChangeCapture of a `FakeDatabase`.

    `change_set_rows`: larger transactions are delivered in several, open change sets.
    `is_incremental`: tables are read incrementally. `reach`: the sizes of splits. `make_snapshot`:
    creates a `FakeSnapshot`.
    """

    supports_replay = True
    make_snapshot: Callable[..., FakeSnapshot] = FakeSnapshot

    def __init__(
        self,
        database: FakeDatabase,
        *,
        change_set_rows: int = 1000,
        is_incremental: bool = False,
        reach: Reach | None = None,
    ) -> None:
        self.database = database
        self._is_incremental = is_incremental
        self._reach = reach or Reach()
        self._change_set_rows = change_set_rows
        self.tables: dict[TableId, Table] = {}
        self._discovered: tuple[object, ...] = ()
        self._delivered = ZERO

    async def claim(self) -> None:
        """Take the database's only claim."""
        if self.database.holder not in {None, self}:
            raise TransientError("another daemon works on the fake", reason="claimed")
        self.database.holder = self

    async def hold(self) -> None:
        """Wait until another capture has the claim."""
        while self.database.holder is self:
            await self.database.growth.wait()
        self._check_claim()

    async def discover(self, known: Mapping[TableId, RegisteredTable]) -> Discovery:
        """Return all tables."""
        base = self.database
        self._discovered = self._seen()
        rewritten = {
            table.id: "rewritten"
            for table in base.tables
            if table.id in known and table.fingerprint != known[table.id].fingerprint
        }
        return Discovery(
            tuple(base.tables),
            tuple(base.refused),
            base.server_id,
            rewritten=rewritten,
            lsn=base.current,
        )

    async def tables_changed(self) -> None:
        """Return when the tables differ from those last discovered; check after every write."""
        while self._seen() == self._discovered:
            await self.database.growth.wait()

    def retry(self, tables: Collection[TableId]) -> Collection[TableId]:
        """Return nothing: no table is refused for some time."""
        del tables
        return ()

    async def server_end(self, committed: LakeState) -> ServerEnd:
        """Return the end of the log."""
        del committed
        return ServerEnd(self.database.current)

    async def end_position(self) -> Lsn:
        """Return the end of the log."""
        return self.database.current

    async def continuity(self, committed: LakeState) -> Continuity:
        """Compare the slot with the lake."""
        slot = self.database.slot
        if committed.has_nothing and slot is not None:
            return LakeLost("the lake has nothing, and the fake has a slot")
        if committed.position is None or not any(map(committed.is_live, committed.tables)):
            return Fresh()
        if slot is None:
            return Lost("the fake has no slot")
        if slot > committed.position:
            return LakeLost(f"the fake's slot is at {slot}")
        return Resumed()

    async def prepare(
        self, tables: Sequence[Table], *, renew: bool = False, read_to: Lsn | None = None
    ) -> Prepared:
        """Create the slot."""
        del read_to
        locked = frozenset(t.id for t in tables if t.id in self.database.locked)
        self.tables = {t.id: t for t in tables if t.id not in locked}
        if renew or self.database.slot is None:
            self.database.slot = self.database.current
        return Prepared(locked, begins=self.database.slot)

    async def choose_incremental(
        self, tables: Sequence[Table], *, initial: bool
    ) -> frozenset[TableId]:
        """Return all tables with a key, or none."""
        del initial
        return frozenset(t.id for t in tables if t.identifying and self._is_incremental)

    async def snapshot(
        self,
        tables: Sequence[Table],
        *,
        incremental: bool = False,
        newly_published: bool = False,
        remainder: str = "",
        where: str | None = None,
    ) -> Snapshot:
        """Read at the current end of the log, or from there on."""
        base = self.database
        if incremental:
            await self._wait_for_commits(tables, newly_published=newly_published)
        self._delivered = max(self._delivered, base.current)
        return self.make_snapshot(
            base,
            tables,
            self._reach,
            is_incremental=incremental,
            remainder=remainder_of(base, tables[0], remainder) if remainder else None,
            where=where,
        )

    async def _wait_for_commits(self, tables: Sequence[Table], *, newly_published: bool) -> None:
        """Wait for transactions that an earlier run may have streamed but that are not visible."""
        base = self.database
        if newly_published:
            await base.ended(base.running)
        for table in tables:
            await base.ended(base.writers(table.id))

    async def current_pg_snapshot(self) -> PgSnapshot:
        """Return the database's current visibility."""
        return self.database.visibility()

    async def changes(self, after: Lsn | None) -> AsyncGenerator[ChangeSet, None]:
        """Yield one change set for each transaction, or several open ones for a large one."""
        base = self.database
        self._check_claim()
        assert base.slot is not None
        position = max(after or ZERO, base.slot)
        yield self._deliver(idle_change_set(position))
        while True:
            self._check_claim()
            found = [t for t in base.log if t.commit_lsn >= position]
            growth, end = base.growth, base.current
            for transaction in found:
                for change_set in self._change_sets(transaction, position):
                    yield self._deliver(change_set)
                position = transaction.end_lsn
            if position < end:
                position = end
                yield self._deliver(idle_change_set(position))
            await growth.wait()

    def commit_requested(self) -> bool:
        """Return whether the test requested one."""
        return self.database.asks_for_checkpoint

    async def confirm(self, position: Lsn) -> None:
        """Advance the slot."""
        if position > self._delivered:
            msg = f"{position} was not delivered"
            raise ValueError(msg)
        slot = self.database.slot
        assert slot is not None
        self.database.slot = max(slot, position)

    async def lag(self) -> CaptureLag:
        """Compare the slot with the end of the log."""
        base = self.database
        behind = None if base.slot is None else base.current - base.slot
        return CaptureLag(base.current, base.slot, behind, behind, None)

    async def health(self) -> None:
        """Check that the claim is still held."""
        self._check_claim()

    async def close(self) -> None:
        """Release the claim."""
        if self.database.holder is self:
            self.database.holder = None

    def _check_claim(self) -> None:
        if self.database.holder is not self:
            raise TransientError("the claim on the fake is lost", reason="connection_lost")

    def _seen(self) -> tuple[object, ...]:
        return tuple(self.database.tables), tuple(self.database.refused)

    def _deliver(self, change_set: ChangeSet) -> ChangeSet:
        self._delivered = max(self._delivered, change_set.position)
        return change_set

    def _change_sets(self, transaction: FakeTransaction, position: Lsn) -> list[ChangeSet]:
        changes = numbered(transaction, self.tables)
        if not changes:
            return [idle_change_set(transaction.end_lsn)]
        size = self._change_set_rows
        parts = [changes[i : i + size] for i in range(0, len(changes), size)]
        last = len(parts) - 1
        return [
            ChangeSet(
                batches=tuple(stream_batches(transaction, part, self.tables)),
                position=transaction.end_lsn if number == last else position,
                ends_in_transaction=number < last,
                first_lsn=transaction.commit_lsn,
                commit_times=np.array([transaction.at_us] * (number == last), np.int64),
                nbytes=RECORD_BYTES * len(part),
            )
            for number, part in enumerate(parts)
        ]
