"""What a pipeline knows of its tables: which are taken, which are to be read, which were stopped.

States of a table in a run, and what moves it::

    (not taken) --update--> to be read --begin--> loading --live--> whole
         ^                      ^                    |                |
         |  update: gone or     |   update: remade, rewritten,        |
         |  refused             |   a gap; request                    |
         +----------------------+----------- stop <------------------ +

A stopped table stays so until its definition changes, somebody asks for it, or the next run.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from ingestd.errors import OperatorError, TableError
from ingestd.ports import Discovery
from ingestd.positions import Lsn
from ingestd.recorded import (
    Committed,
    RegisteredTable,
    TableEvent,
    TableState,
    registered,
    registered_columns,
)
from ingestd.schema import Table, TableId


@dataclass(slots=True)
class _Entry:
    """A table of the last discovery.

    `is_wanted`: its rows are to be read. `load`: which reading of them is not durable yet, None if
    none is under way; a later one makes an earlier one void. `point`: where they are read.
    `last`: transaction of the stream's last change of it; `told`: of the last that told of columns.
    `replaces`: the lake has rows of before this reading. `rewritten`: why its old rows are not what
    the source has, until that is recorded. `is_postponed`: the source can't send it yet. `version`:
    what the stream brought last, which is as `compared` says.
    """

    table: Table
    is_stopped: bool = False
    is_wanted: bool = False
    load: int | None = None
    point: Lsn | None = None
    last: Lsn | None = None
    told: Lsn | None = None
    replaces: bool = False
    rewritten: str | None = None
    is_postponed: bool = False
    version: Table | None = None
    compared: RegisteredTable | None = None

    @property
    def is_whole(self) -> bool:
        return not (self.is_stopped or self.is_wanted or self.load is not None)


@dataclass(slots=True)
class TableBook:
    """The tables of one pipeline run. Decides, does no I/O.

    `resnapshot_rewritten`: read a table anew whose rows were given other values without a change.
    """

    committed: Committed
    resnapshot_rewritten: bool = True
    known: dict[TableId, RegisteredTable] = field(init=False)
    _entries: dict[TableId, _Entry] = field(init=False, default_factory=dict)
    _discovery: Discovery = field(init=False)
    _is_recorded: bool = field(init=False, default=False)
    _gone: set[TableId] = field(init=False, default_factory=set)
    _with_rows: set[TableId] = field(init=False)
    _loads: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Begin with what the lake has."""
        self.known = dict(self.committed.tables)
        self._with_rows = set(self.committed.watermarks)

    # --- what there is ------------------------------------------------------------------------

    def update(self, discovery: Discovery) -> None:
        """Take what the source offers now."""
        before, self._entries = self._entries, {}
        self._gone |= {name for name, entry in before.items() if not entry.is_stopped}
        self._gone -= {table.id for table in discovery.tables}
        self._gone -= {refused.table.id for refused in discovery.refused}
        self._discovery = discovery
        self._is_recorded = False
        for table in discovery.tables:
            entry = before.get(table.id)
            if entry is None or entry.table.oid != table.oid:
                entry = _Entry(table)
            elif entry.is_stopped and _definition(entry.table) != _definition(table):
                entry.is_stopped = False
            entry.table, entry.is_postponed = table, False
            entry.rewritten = discovery.rewritten.get(table.id) or entry.rewritten
            entry.is_wanted |= self._has_gap(table.id)
            entry.is_wanted |= entry.load is None and not self._is_live(table)
            self._entries[table.id] = entry

    def _has_gap(self, name: TableId) -> bool:
        is_rewritten = self.resnapshot_rewritten and name in self._discovery.rewritten
        return is_rewritten or name in self._discovery.interrupted

    def _is_live(self, table: Table) -> bool:
        """Whether the lake has it live: this very table, not one before it of the same name."""
        known = self.known.get(table.id)
        return known is not None and known.oid == table.oid and known.state is TableState.LIVE

    @property
    def lsn(self) -> Lsn:
        """Where what the source offers holds."""
        return self._discovery.lsn

    def request(self, names: Iterable[TableId]) -> None:
        """Have tables read anew. Raises OperatorError for one that is not captured."""
        chosen = list(names)
        for name in chosen:
            if name not in self._entries:
                self._refuse_request(name)
                near = difflib.get_close_matches(str(name), map(str, self._entries), n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise OperatorError(
                    f"table {name} is not captured",
                    remedy=f"{hint}`ingestd check` and `ingestd status` say what is, and why not",
                )
        for name in chosen:
            entry = self._entries[name]
            entry.is_wanted, entry.is_stopped = True, False

    def _refuse_request(self, name: TableId) -> None:
        for refused in self._discovery.refused:
            if refused.table.id == name:
                raise OperatorError(
                    f"table {name} can't be captured: {refused.error.reason}",
                    remedy=f"{refused.error.remedy or 'mend the cause'}; it is looked for again"
                    " every `discover_interval`, and read then",
                )

    def to_read(self) -> list[Table]:
        """The tables whose rows are to be read."""
        found = self._entries.values()
        return [e.table for e in found if e.is_wanted and not (e.is_stopped or e.is_postponed)]

    def postpone(self, names: Iterable[TableId]) -> None:
        """Take that the source can't send these yet: until the next discovery."""
        for name in names:
            self._entries[name].is_postponed = self._entries[name].is_wanted = True

    @property
    def has_postponed(self) -> bool:
        """Whether there are tables that the source can't send yet."""
        return any(entry.is_postponed for entry in self._entries.values())

    def leave_out(self, name: TableId) -> Table | None:
        """Take that changes of a table were left out; give it if it was whole until now."""
        entry = self._entries.get(name)
        if entry is None or entry.is_stopped:
            return None
        was_whole, entry.is_wanted = entry.is_whole, True
        return entry.table if was_whole else None

    def read_again(self, name: TableId) -> None:
        """Take that a table was altered while it was read."""
        entry = self._entries.get(name)
        if entry is not None:
            entry.load, entry.point, entry.is_wanted = None, None, True

    def unknown(self) -> list[Table]:
        """The tables that the lake has never seen, under this name and oid."""
        found = [e.table for e in self._entries.values() if not e.is_stopped]
        return [t for t in found if t.id not in self.known or self.known[t.id].oid != t.oid]

    def changed(self, at: datetime, position: Lsn) -> list[TableEvent]:
        """Give what the discovery told that `_tables` does not know, of tables that are whole.

        Once, and not before the stream has reached the discovery: until then, rows of earlier
        definitions may come.
        """
        if self._is_recorded or position < self._discovery.lsn:
            return []
        self._is_recorded = True
        whole = [e for e in self._entries.values() if e.is_whole]
        news = [e.table for e in whole if self._is_news(e.table) and not self._is_stale(e)]
        events = self.events(news, TableState.LIVE, at, position)
        found = [replace(e, reason=self._entries[e.table.id].rewritten) for e in events]
        for event in found:
            self._entries[event.table.id].rewritten = None
        return found

    def _is_news(self, table: Table) -> bool:
        known = self.known[table.id]
        then = (known.columns, known.replica_identity, known.storage)
        now = (registered_columns(table), table.replica_identity, table.storage)
        return then != now or self._entries[table.id].rewritten is not None

    def _is_stale(self, entry: _Entry) -> bool:
        """Whether the stream has told of columns since the discovery: the next one tells more."""
        is_newer = entry.told is not None and entry.told >= self._discovery.lsn
        return is_newer and self._differs(entry.table, self.known.get(entry.table.id))

    def departures(self, at: datetime, at_lsn: Lsn) -> list[TableEvent]:
        """Give the events for tables that can't or need not be captured any more.

        Only what is news: a refusal that `_tables` has already is not repeated.
        """
        events = []
        for refused in self._discovery.refused:
            known = self.known.get(refused.table.id)
            event = stopped(refused.table, refused.error, at, at_lsn)
            if known is not None and known.oid and not refused.table.oid:  # it was there once
                gone = Table(known.table, known.oid, ())
                event = replace(event, table=gone, state=TableState.DROPPED)
            if known is None or (known.state, known.reason) != (event.state, event.reason):
                events.append(event)
        present = set(self._entries) | {r.table.id for r in self._discovery.refused}
        for name, known in self.known.items():
            if name not in present and known.state is not TableState.DROPPED:
                gone = Table(name, known.oid, ())
                reason = "not in the source any more, or not matched by `tables`"
                events.append(
                    TableEvent(gone, TableState.DROPPED, at, at_lsn, known.snapshot_lsn, reason)
                )
        return events

    def note(self, events: Sequence[TableEvent]) -> None:
        """Take what has been recorded in `_tables`."""
        for event in events:
            name = event.table.id
            self.known[name] = registered(event, self.known.get(name))

    # --- reading ------------------------------------------------------------------------------

    def begin(self, tables: Sequence[Table]) -> int:
        """Note that these tables' rows are being read; gives the number of this reading."""
        self._loads += 1
        for entry in self._of(tables):
            entry.is_wanted, entry.rewritten = False, None
            entry.load, entry.point = self._loads, None
            entry.replaces = entry.table.id in self._with_rows
        return self._loads

    def being_read(self, load: int) -> list[Table]:
        """The tables that this reading is still to give."""
        return [e.table for e in self._entries.values() if e.load == load]

    def is_read_by(self, name: TableId, load: int) -> bool:
        """Whether rows of this reading are to be taken: no later one, no stop has come between."""
        entry = self._entries.get(name)
        return entry is not None and entry.load == load

    def took_rows(self, name: TableId) -> None:
        """Note that the lake has rows of a table that were read."""
        self._with_rows.add(name)

    def replaces(self, name: TableId) -> bool:
        """Whether the lake has rows of a table from before its reading."""
        entry = self._entries.get(name)
        return entry is not None and entry.replaces

    def read_at(self, tables: Sequence[Table], point: Lsn) -> None:
        """Note the point at which the rows are read."""
        for entry in self._of(tables):
            entry.point = point

    def loaded(self, loads: Iterable[int]) -> list[Table]:
        """Take that all rows of these readings are durable; give the tables that are whole now."""
        read = {e.table.id: e for e in self._entries.values() if e.load in set(loads)}
        for entry in read.values():
            entry.load = None
        return [self._latest(e) for e in read.values() if e.is_whole]

    def _latest(self, entry: _Entry) -> Table:
        """Give its columns as the stream told after the discovery, or as that did."""
        if entry.version is None or entry.told is None or entry.told < self._discovery.lsn:
            return entry.table
        return replace(entry.version, storage=entry.table.storage)

    def give_up(self, load: int) -> None:
        """Take that a reading failed: its tables are to be read again."""
        for entry in self._entries.values():
            if entry.load == load:
                entry.load, entry.point, entry.is_wanted = None, None, True

    @property
    def is_loading(self) -> bool:
        """Whether a table's rows are to be read, or are not durable yet."""
        return any(not (e.is_whole or e.is_stopped) for e in self._entries.values())

    def _of(self, tables: Sequence[Table]) -> list[_Entry]:
        return [self._entries[t.id] for t in tables if t.id in self._entries]

    # --- the stream ---------------------------------------------------------------------------

    def is_captured(self, name: TableId) -> bool:
        """Whether this table's rows are taken.

        All of them, whatever is being read: a snapshot's `t` voids what lies below it, and leaving
        out a table's changes would leave gaps in the `_cdc_seq` of the others. So are rows of a
        table that has just gone, which are under way.
        """
        entry = self._entries.get(name)
        return name in self._gone if entry is None else not entry.is_stopped

    def is_new_version(self, table: Table) -> bool:
        """Whether the stream brought other columns than `_tables` has, of a table that is there."""
        if table.id not in self._entries:
            return False
        entry, known = self._entries[table.id], self.known.get(table.id)
        if entry.version is table and entry.compared is known:
            return False
        entry.version = table
        if self._differs(table, known):
            return True
        entry.compared = known
        return False

    @staticmethod
    def _differs(table: Table, known: RegisteredTable | None) -> bool:
        if known is None or known.columns != registered_columns(table):
            return True
        return known.replica_identity != table.replica_identity

    def is_ambiguous(self, table: Table, first: Lsn) -> bool:
        """Whether rows of one transaction, parted by DDL in it, could be taken for each other.

        A column was added with a default after the first of them: they have it in the source, and
        `_tables` tells only of earlier transactions' rows. Or a column returns that was away: what
        was written meanwhile lies under another name or type. Then the table is to be read anew.
        """
        entry, known = self._entries[table.id], self.known.get(table.id)
        entry.told = first
        if not self.resnapshot_rewritten or known is None:
            return False
        before = {c.name for c in known.columns}
        new = [c for c in table.columns if c.lake_name not in before]
        returns = any(c.lake_name in known.lake_columns for c in new)
        if returns or (entry.last == first and any(c.missing is not None for c in new)):
            entry.is_wanted = True
            return True
        return False

    def took(self, name: TableId, last: Lsn) -> None:
        """Note the transaction of the last change of a table that was taken."""
        if name in self._entries:
            self._entries[name].last = last

    def state(self, name: TableId) -> TableState:
        """Its state in `_tables`: not live before its snapshot is durable."""
        entry = self._entries[name]
        return TableState.LIVE if entry.is_whole else TableState.SNAPSHOTTING

    def stop(self, name: TableId) -> Table:
        """Take nothing more of this table; gives its schema."""
        if name not in self._entries:
            self._gone.discard(name)
            return Table(name, self.known[name].oid if name in self.known else 0, ())
        entry = self._entries[name]
        entry.is_stopped, entry.is_wanted, entry.load, entry.point = True, True, None, None
        return entry.table

    # --- events -------------------------------------------------------------------------------

    def events(
        self, tables: Sequence[Table], state: TableState, at: datetime, at_lsn: Lsn
    ) -> list[TableEvent]:
        """Make the events of tables that entered a state together."""
        return [TableEvent(t, state, at, at_lsn, self._snapshot_lsn(t.id)) for t in tables]

    def _snapshot_lsn(self, name: TableId) -> Lsn | None:
        entry, known = self._entries.get(name), self.known.get(name)
        if entry is not None and entry.point is not None:
            return entry.point
        return known.snapshot_lsn if known is not None else None


def _definition(table: Table) -> tuple[object, ...]:
    """Give what, when it changes, may let a stopped table go on."""
    return table.columns, table.replica_identity, table.key


def stopped(table: Table, error: TableError, at: datetime, at_lsn: Lsn) -> TableEvent:
    """Make the event of a table that can't go on."""
    state = TableState.STOPPED
    return TableEvent(table, state, at, at_lsn, reason=error.reason, remedy=error.remedy)
