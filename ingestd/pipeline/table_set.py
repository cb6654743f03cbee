"""The tables of one pipeline run, by name; `ingestd.pipeline.table_state` is the life of one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NoReturn

from ingestd.model.errors import OperatorError, did_you_mean_table
from ingestd.model.lake_state import (
    LakeState,
    RegisteredTable,
    TableEvent,
    TableState,
    registered,
    registered_columns,
)
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table, TableId
from ingestd.pipeline.removed_tables import removed
from ingestd.pipeline.table_state import TrackedTable, differs
from ingestd.ports import Discovery, Prepared


@dataclass(slots=True)
class TableSet:
    """The tables of one pipeline run. Decides, does no I/O.

    `resnapshot_rewritten`: re-read a table whose rows got other values without a change.
    """

    committed: LakeState
    resnapshot_rewritten: bool = True
    known: dict[TableId, RegisteredTable] = field(init=False)
    _entries: dict[TableId, TrackedTable] = field(init=False, default_factory=dict)
    _discovery: Discovery = field(init=False)
    _doubts: Mapping[TableId, str] = field(init=False, default_factory=dict)
    _is_recorded: bool = field(init=False, default=False)
    _absent: set[TableId] = field(init=False, default_factory=set)
    """Tables that the newest discovery lacks; their last changes may still arrive."""
    _dropped: frozenset[tuple[int, TableId]] = field(init=False, default=frozenset())
    """As `Discovery.dropped`."""
    _postponed: set[TableId] = field(init=False, default_factory=set)
    _with_rows: set[TableId] = field(init=False)
    _last_snapshot_id: int = field(init=False, default=0)
    _partial: dict[int, TableId] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Start with what the lake has."""
        self.known = dict(self.committed.tables)
        self._with_rows = {*self.committed.watermarks, *self.committed.damaged}

    # --- discovery ----------------------------------------------------------------------------

    def update(self, discovery: Discovery) -> None:
        """Apply a discovery."""
        before, self._entries = self._entries, {}
        self._absent |= {name for name, entry in before.items() if not entry.is_stopped}
        self._absent -= {table.id for table in discovery.tables}
        self._absent -= {refused.table.id for refused in discovery.refused}
        self._discovery, self._doubts = discovery, discovery.doubts
        self._is_recorded = False
        self._dropped = discovery.dropped
        self._postponed.clear()
        for table in discovery.tables:
            entry = before.get(table.id)
            if entry is None or entry.table.oid != table.oid:
                entry = TrackedTable(table, is_newly_published=bool(before))
                entry.resume(self.known.get(table.id))
            elif _definition(entry.table) != _definition(table):
                entry.redefine()
            entry.table = table
            if not entry.streamed.is_newer_than(discovery):
                entry.streamed.relation_xact = None  # 2^31 xids later it would count as newer
            entry.rewritten = discovery.rewritten.get(table.id) or entry.rewritten
            if (cause := self._gap(table.id)) is not None:
                entry.miss(cause if self._is_live(table) else entry.cause)
                entry.is_newly_published |= table.id in discovery.interrupted
            entry.expect_live(is_live=self._is_live(table))
            self._entries[table.id] = entry

    def _gap(self, name: TableId) -> str | None:
        """Return why the lake's copy of a table differs from what its changes would produce."""
        rewritten = self._discovery.rewritten.get(name) if self.resnapshot_rewritten else None
        return rewritten or self._discovery.interrupted.get(name)

    def _is_live(self, table: Table) -> bool:
        """Return whether the same table (same OID) is live in the lake."""
        known = self.known.get(table.id)
        return known is not None and known.oid == table.oid and known.state is TableState.LIVE

    @property
    def lsn(self) -> Lsn:
        """The position at which the discovery holds."""
        return self._discovery.lsn

    def request(self, names: Iterable[TableId], retried: Collection[TableId] = ()) -> None:
        """Request that tables be re-read. Raises OperatorError for one that is not captured.

        `retried`: those that the next discovery may not refuse any more; they are read after it.
        """
        chosen = list(names)
        for name in chosen:
            if name not in self._entries and name not in retried:
                self._refuse_unknown(name, chosen)
        for name in chosen:
            if name in self._entries:
                self._entries[name].request(self._snapshot_lsn(name))

    def _refuse_unknown(self, name: TableId, chosen: Sequence[TableId]) -> NoReturn:
        for refused in self._discovery.refused:
            if refused.table.id == name:
                raise OperatorError(
                    f"table {name} can't be captured: {refused.error.reason}",
                    remedy=f"{refused.error.remedy or 'fix the cause'}; it is checked again"
                    " every `discover_interval`, and then read",
                )
        hint = did_you_mean_table(name, [t for t in self._entries if t not in chosen])
        raise OperatorError(
            f"table {name} is not captured",
            remedy=f"{hint}`ingestd check` and `ingestd status` list what is captured, and why"
            " others are not",
        )

    def cancel(self, names: Iterable[TableId]) -> tuple[list[Table], list[TableId]]:
        """Cancel the reads of tables, requested or running.

        Return the tables that are complete without them, and the others. Raises OperatorError for a
        table that need not be read, or that has no key and whose read has begun: rows that were
        already read would be duplicated.
        """
        chosen = list(names)
        for name in chosen:
            entry = self._entries.get(name)
            if name not in self._partial.values() and (
                entry is None or entry.is_stopped or entry.is_live
            ):
                raise OperatorError(
                    f"table {name} has no snapshot to cancel",
                    remedy="`ingestd status` shows which tables are being read",
                )
            if entry is not None and entry.is_being_read and not entry.table.identifying:
                raise OperatorError(
                    f"table {name} has no key: its snapshot has begun and must be read to the end",
                    remedy="wait for it; `ingestd status` shows its progress",
                )
        live, others = [], []
        for name in chosen:
            self._partial = {n: t for n, t in self._partial.items() if t != name}
            entry = self._entries[name]
            if entry.is_live:
                continue
            if entry.snapshot.is_requested:
                entry.cancel()
                live.append(entry.table)
            else:
                others.append(name)
        return live, others

    def to_read(self) -> list[Table]:
        """Return the tables whose rows must be read."""
        found = self._entries.values()
        return [e.table for e in found if e.is_queued and e.table.id not in self._postponed]

    def apply_prepared(self, prepared: Prepared) -> None:
        """Apply the result of preparing the source."""
        for name, fingerprint in prepared.fingerprints.items():
            entry = self._entries[name]
            entry.table = replace(entry.table, fingerprint=fingerprint)
        self.postpone(prepared.locked)

    def postpone(self, names: Iterable[TableId]) -> None:
        """Postpone tables that the source can't send yet, until the next discovery."""
        for name in names:
            self._entries[name].postpone()
            self._postponed.add(name)

    @property
    def has_postponed(self) -> bool:
        """True if there are tables that the source can't send yet."""
        return bool(self._postponed)

    def interrupt(self, name: TableId) -> Table | None:
        """Record a gap in a table's changes; return the table if its rows were kept so far."""
        entry = self._entries.get(name)
        if entry is None or entry.is_stopped:
            return None
        is_kept = entry.is_live or bool(entry.snapshot.remainder)
        entry.miss("changes came with columns that the config can't be kept with")
        entry.is_newly_published = True
        return entry.table if is_kept else None

    def doubt_events(
        self, doubts: Mapping[TableId, str], at: datetime, at_lsn: Lsn
    ) -> list[TableEvent]:
        """Return the events for doubted tables (`ChangeSet.doubts`) that are not recorded as such.

        The next start re-reads them, unless a discovery has resolved them before. The events name
        no columns, so that the recorded ones stay: the discovery's may be ahead of the stream.
        """
        self._doubts = doubts
        events = []
        for name, fingerprint in doubts.items():
            entry, known = self._entries.get(name), self.known.get(name)
            if (
                entry is None
                or known is None
                or entry.is_stopped
                or known.fingerprint == fingerprint
            ):
                continue
            if known.oid == entry.table.oid:  # otherwise it will be read from the start
                identity = known.replica_identity
                table = replace(
                    entry.table, columns=(), replica_identity=identity, fingerprint=fingerprint
                )
                events += self.events([table], self.state(name), at, at_lsn)
        return events

    def _doubted(self, table: Table) -> Table:
        return replace(table, fingerprint=self._doubts.get(table.id, table.fingerprint))

    def record_altered(self, name: TableId, *, from_the_start: bool) -> int:
        """Record that a table was altered while it was read; a partial read may be void.

        Return how often that has happened since it was complete.
        """
        entry = self._entries.get(name)
        if entry is None:
            return 0
        entry.fail_snapshot()
        if from_the_start:
            entry.snapshot.remainder = ""
        entry.snapshot.failures += 1
        return entry.snapshot.failures

    def often_altered(self, times: int) -> TableId | None:
        """Return a table that was altered so many times in a row while it was read."""
        found = (n for n, e in self._entries.items() if e.snapshot.failures >= times)
        return next(found, None)

    def unknown(self) -> list[Table]:
        """Return the tables that the lake has never seen under this name and oid."""
        found = [e.table for e in self._entries.values() if not e.is_stopped]
        return [t for t in found if t.id not in self.known or self.known[t.id].oid != t.oid]

    def discovery_events(self, at: datetime, position: Lsn) -> list[TableEvent]:
        """Return the events for changes in the discovery that `_tables` lacks, of complete tables.

        Once, and not before the stream has reached the discovery: until then, rows of earlier
        definitions may arrive.
        """
        if self._is_recorded or position < self._discovery.lsn:
            return []
        self._is_recorded = True
        return [*self._removal_events(at, position), *self._definition_events(at, position)]

    def _definition_events(self, at: datetime, position: Lsn) -> list[TableEvent]:
        live = [e for e in self._entries.values() if e.is_live]
        found = [(e, self._doubted(e.table)) for e in live]
        news = [
            table for e, table in found if self._has_new_definition(table) and not self._is_stale(e)
        ]
        events = [
            replace(e, reason=self._entries[e.table.id].rewritten)
            for e in self.events(news, TableState.LIVE, at, position)
        ]
        for event in events:
            self._entries[event.table.id].rewritten = None
        return events

    def _has_new_definition(self, table: Table) -> bool:
        known = self.known[table.id]
        then = (known.columns, known.replica_identity, known.fingerprint)
        now = (registered_columns(table), table.replica_identity, table.fingerprint)
        return then != now or self._entries[table.id].rewritten is not None

    def _is_stale(self, entry: TrackedTable) -> bool:
        """Return whether the stream sent columns after the discovery: the next one has more."""
        if not entry.streamed.is_newer_than(self._discovery):
            return False
        return differs(entry.table, self.known.get(entry.table.id))

    def removal_events(self, at: datetime, at_lsn: Lsn) -> list[TableEvent]:
        """Return the events for tables that can't or need not be captured any more.

        A drop is reported once the stream has reached the discovery (`discovery_events`): until
        then, the table's last changes may arrive.
        """
        found = self._removal_events(at, at_lsn)
        if at_lsn >= self._discovery.lsn:
            return found
        return [event for event in found if event.state is not TableState.DROPPED]

    def _removal_events(self, at: datetime, at_lsn: Lsn) -> list[TableEvent]:
        return removed(self._discovery, self.known, self._entries.keys(), at, at_lsn)

    def record_events(self, events: Sequence[TableEvent]) -> None:
        """Apply events that have been recorded in `_tables`."""
        for event in events:
            name = event.table.id
            self.known[name] = registered(event, self.known.get(name))

    # --- reading ------------------------------------------------------------------------------

    def begin_snapshot(self, tables: Sequence[Table]) -> dict[TableId, int]:
        """Mark snapshots of these tables as begun; return the id of each."""
        ids = {}
        for entry in self._of(tables):
            self._last_snapshot_id += 1
            has_rows = entry.table.id in self._with_rows
            entry.begin_snapshot(self._last_snapshot_id, has_rows=has_rows)
            ids[entry.table.id] = self._last_snapshot_id
        return ids

    def table(self, name: TableId) -> Table:
        """Return a table as last discovered."""
        return self._entries[name].table

    def mark_newly_published(self) -> None:
        """Record that the source may not have sent all past changes of the tables to be read."""
        for entry in self._entries.values():
            is_unread = entry.is_queued or entry.is_stopped
            entry.is_newly_published = is_unread and not entry.snapshot.remainder

    @property
    def has_partial(self) -> bool:
        """True while rows that a condition selects are read, or not durable yet."""
        return bool(self._partial)

    def request_partial(self, names: Iterable[TableId]) -> None:
        """Check that tables can be read in part. Raises OperatorError if not."""
        chosen = list(names)
        for name in chosen:
            entry = self._entries.get(name)
            if entry is None:
                self._refuse_unknown(name, chosen)
            elif not entry.is_live:
                raise OperatorError(
                    f"table {name} is not live, and a partial snapshot would not make it live",
                    remedy="run `ingestd snapshot` without --where to read all of it",
                )

    def begin_partial(self, name: TableId) -> int:
        """Mark a partial snapshot as begun, which leaves the table's state; return its id."""
        self._last_snapshot_id += 1
        self._partial[self._last_snapshot_id] = name
        return self._last_snapshot_id

    def end_partial(self, snapshot_id: int) -> TableId | None:
        """Mark a partial snapshot as durable; return its table, None if it was not partial."""
        return self._partial.pop(snapshot_id, None)

    def being_read(self, ids: Mapping[TableId, int]) -> list[Table]:
        """Return the tables of these snapshots that are still being read."""
        return [
            entry.table
            for name, snapshot_id in ids.items()
            if (entry := self._entries.get(name)) is not None and entry.snapshot.id == snapshot_id
        ]

    def latest(self, tables: Sequence[Table]) -> list[Table]:
        """Return the tables as `_tables` must record them: by the stream if that is newer."""
        return [entry.latest(self._discovery) for entry in self._of(tables)]

    def remainder(self, name: TableId) -> str:
        """Return what is left to read of a table's snapshot; empty: everything."""
        return self._entries[name].snapshot.remainder

    def is_new(self, name: TableId) -> bool:
        """Return whether the source may not have sent all changes of transactions that run."""
        return self._entries[name].is_newly_published

    def record_progress(self, name: TableId, snapshot_id: int, remainder: str) -> Table | None:
        """Note what a snapshot has left to read; return the table if `_tables` must record it."""
        entry = self._entries.get(name)
        if entry is None or entry.snapshot.id != snapshot_id or entry.is_queued:
            return None  # requested again: the remainder of this snapshot is void
        if entry.snapshot.remainder == remainder:
            return None
        entry.snapshot.remainder = remainder
        return entry.latest(self._discovery)

    def is_read_by(self, name: TableId, snapshot_id: int) -> bool:
        """Return whether rows of this snapshot are appended: neither superseded nor stopped."""
        entry = self._entries.get(name)
        if self._partial.get(snapshot_id) == name:
            return entry is not None and not entry.is_stopped
        return entry is not None and entry.snapshot.id == snapshot_id

    def record_rows(self, name: TableId) -> None:
        """Record that the lake has rows of a table that were read."""
        self._with_rows.add(name)

    def has_marker_first(self, name: TableId) -> bool:
        """Return whether the table's `t` comes before its rows: the lake has none of it."""
        entry = self._entries.get(name)
        if entry is None:
            return False
        return not (entry.snapshot.has_marker_last or entry.snapshot.remainder)

    def has_marker_last(self, name: TableId) -> bool:
        """Return whether the table's `t` comes after its rows: the old ones remain until then."""
        entry = self._entries.get(name)
        return entry is not None and entry.snapshot.has_marker_last

    def record_point(self, tables: Sequence[Table], point: Lsn) -> None:
        """Record the point at which the rows are read."""
        for entry in self._of(tables):
            entry.snapshot.point = point

    def end_snapshots(self, ids: Iterable[int]) -> list[Table]:
        """Record that all rows of these snapshots are durable; return the tables then live."""
        ended = set(ids)
        read = [e for e in self._entries.values() if e.snapshot.id in ended]
        for entry in read:
            entry.end_snapshot()
        return [e.latest(self._discovery) for e in read if e.is_live]

    def fail_snapshots(self, ids: Mapping[TableId, int]) -> None:
        """Record that snapshots failed: their tables, or the remainders, must be read again."""
        for name, snapshot_id in ids.items():
            entry = self._entries.get(name)
            if entry is not None and entry.snapshot.id == snapshot_id:
                entry.fail_snapshot()

    @property
    def is_loading(self) -> bool:
        """True if a table's rows must be read, or are not durable yet."""
        return any(not (e.is_live or e.is_stopped) for e in self._entries.values())

    def _of(self, tables: Sequence[Table]) -> list[TrackedTable]:
        return [self._entries[t.id] for t in tables if t.id in self._entries]

    # --- the stream ---------------------------------------------------------------------------

    def is_captured(self, name: TableId) -> bool:
        """Return whether this table's rows are accepted.

        All of them, also during a read: a snapshot's `t` voids the rows below it, and omitting a
        table's changes would leave gaps in the `_cdc_seq` of the others. Rows of a table that has
        just been dropped are accepted too: they are in flight.
        """
        entry = self._entries.get(name)
        return name in self._absent if entry is None else not entry.is_stopped

    def accepts_changes(self, table: Table) -> bool:
        """Return whether changes of the same table are accepted, even if it was dropped."""
        return self.is_dropped(table) or self.is_captured(table.id)

    def is_dropped(self, table: Table) -> bool:
        """Return whether it was dropped or renamed."""
        return (table.oid, table.id) in self._dropped

    def has_successor(self, table: Table) -> bool:
        """Return whether another table now has the name of this dropped one."""
        return self.is_dropped(table) and table.id in self._entries

    def is_later_version(self, table: Table) -> bool:
        """Return whether a dropped table arrived with other columns than `_tables` has."""
        known = self.known.get(table.id)
        is_this = known is not None and known.oid == table.oid
        return is_this and not self.has_successor(table) and differs(table, known)

    def note_incomplete(self, name: TableId, lsn: Lsn) -> bool:
        """Record a row that lacks values, if a read may void it; return False otherwise."""
        entry = self._entries.get(name)
        return entry is not None and entry.accept_incomplete(lsn)

    def is_incomplete(self, name: TableId) -> bool:
        """Return whether a row that lacks values is above what its read voided."""
        entry = self._entries.get(name)
        return entry is not None and entry.is_incomplete

    def is_new_version(self, table: Table) -> bool:
        """Return whether the stream sent other columns than `_tables` has, of an existing table."""
        entry = self._entries.get(table.id)
        return entry is not None and entry.streamed.is_new_version(table, self.known.get(table.id))

    def is_ambiguous(self, table: Table, first: Lsn, xid: int | None) -> bool:
        """Return whether the table must be re-read: see `StreamedRelation.is_ambiguous`."""
        entry, known = self._entries[table.id], self.known.get(table.id)
        entry.streamed.relation_xact = first, xid
        if not self.resnapshot_rewritten or known is None:
            return False
        if entry.streamed.is_ambiguous(table, known, first):
            entry.miss("columns were added, returned or moved between rows that the stream sent")
            return True
        return False

    def record_change(self, name: TableId, last: Lsn) -> None:
        """Record the transaction of a table's last accepted change."""
        if name in self._entries:
            self._entries[name].streamed.last_change = last

    def state(self, name: TableId) -> TableState:
        """Return its state in `_tables`: not live before its snapshot is durable."""
        entry = self._entries.get(name)
        if entry is None:
            return self.known[name].state
        return TableState.LIVE if entry.is_live else TableState.SNAPSHOTTING

    def is_present(self, name: TableId) -> bool:
        """Return whether the source offers the table."""
        return name in self._entries

    def stop(self, name: TableId) -> Table:
        """Stop this table; return its schema."""
        if name not in self._entries:
            self._absent.discard(name)
            return Table(name, self.known[name].oid if name in self.known else 0, ())
        entry = self._entries[name]
        entry.stop()
        return entry.table

    # --- events -------------------------------------------------------------------------------

    def events(
        self, tables: Sequence[Table], state: TableState, at: datetime, at_lsn: Lsn
    ) -> list[TableEvent]:
        """Return the events of tables that entered a state together."""
        return [
            TableEvent(
                t,
                state,
                at,
                at_lsn,
                self._snapshot_lsn(t.id),
                self.cause(t.id) if state is TableState.SNAPSHOTTING else None,
                progress=self._progress(t.id, state),
            )
            for t in tables
        ]

    def loss_events(
        self, names: Iterable[TableId], cause: str, at: datetime, at_lsn: Lsn
    ) -> list[TableEvent]:
        """Return the events of tables that must be re-read, and record why.

        Also of those that are not captured any more, or refused: what else is recorded of them
        comes later (`discovery_events`).
        """
        tables = []
        for name in names:
            entry = self._entries.get(name)
            if entry is None:
                tables.append(Table(name, self.known[name].oid, ()))
            else:
                entry.cause = cause
                tables.append(entry.table)
        events = self.events(tables, TableState.SNAPSHOTTING, at, at_lsn)
        return [replace(event, reason=cause) for event in events]

    def cause(self, name: TableId) -> str | None:
        """Return why a table is re-read, until it is complete; None for any other."""
        entry = self._entries.get(name)
        return None if entry is None else entry.cause

    def _progress(self, name: TableId, state: TableState) -> str:
        entry = self._entries.get(name)
        if entry is None or state is not TableState.SNAPSHOTTING:
            return ""
        return entry.recorded_progress

    def _snapshot_lsn(self, name: TableId) -> Lsn | None:
        entry, known = self._entries.get(name), self.known.get(name)
        if entry is not None and entry.snapshot.point is not None:
            return entry.snapshot.point
        return known.snapshot_lsn if known is not None else None


def _definition(table: Table) -> tuple[object, ...]:
    """Return the properties whose change allows a stopped table to be retried."""
    return table.columns, table.replica_identity, table.key
