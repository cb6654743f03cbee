"""What a pipeline knows of its tables: which are taken, from where, and which were stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from ingestd.changes import TableBatch, rows_from
from ingestd.errors import TableError
from ingestd.ports import Committed, Discovery, TableEvent, TableState, registered_columns
from ingestd.positions import Lsn
from ingestd.schema import Table, TableId


class TableBook:
    """The tables of one pipeline run. Decides, does no I/O."""

    def __init__(self, committed: Committed, discovery: Discovery) -> None:
        self._committed = committed
        self._tables = {t.id: t for t in discovery.tables}
        self._refused = discovery.refused
        self._interrupted = discovery.interrupted
        self._points: dict[TableId, Lsn] = {}
        self._stopped: set[TableId] = set()
        self._loading: list[TableId] = []

    @property
    def captured(self) -> list[Table]:
        """The tables whose changes are taken."""
        return [t for t in self._tables.values() if t.id not in self._stopped]

    def is_captured(self, name: TableId) -> bool:
        """Whether this table's rows are taken."""
        return name in self._tables and name not in self._stopped

    def not_live(self) -> list[Table]:
        """The tables whose rows the lake does not have whole."""
        return [t for t in self.captured if not self._is_whole(t)]

    def unknown(self) -> list[Table]:
        """The tables that the lake has never seen, under this name and oid."""
        known = self._committed.tables
        return [t for t in self.captured if t.id not in known or known[t.id].oid != t.oid]

    def changed(self) -> list[Table]:
        """The live tables whose columns are others than `_tables` says."""
        known = self._committed.tables
        return [
            t
            for t in self.captured
            if self._is_whole(t) and known[t.id].columns != registered_columns(t)
        ]

    def _is_whole(self, table: Table) -> bool:
        """Whether the lake has it live: this very table, not one before it of the same name."""
        known = self._committed.tables.get(table.id)
        is_same = known is not None and known.oid == table.oid
        return is_same and self._committed.is_live(table.id) and table.id not in self._interrupted

    def departures(self, at: datetime, at_lsn: Lsn) -> list[TableEvent]:
        """Give the events for tables that can't or need not be captured any more.

        Only what is news: a refusal that `_tables` has already is not repeated.
        """
        events = []
        for refused in self._refused:
            known = self._committed.tables.get(refused.table.id)
            event = stopped(refused.table, refused.error, at, at_lsn)
            if known is not None and refused.table.oid == 0:  # it was there once
                gone = Table(known.table, known.oid, ())
                event = replace(event, table=gone, state=TableState.DROPPED)
            if known is None or (known.state, known.reason) != (event.state, event.reason):
                events.append(event)
        present = set(self._tables) | {r.table.id for r in self._refused}
        for name, known in self._committed.tables.items():
            if name not in present and known.state is not TableState.DROPPED:
                gone = Table(name, known.oid, ())
                reason = "not in the source any more, or not matched by `tables`"
                events.append(
                    TableEvent(gone, TableState.DROPPED, at, at_lsn, known.snapshot_lsn, reason)
                )
        return events

    def read_at(self, tables: Sequence[Table], point: Lsn) -> None:
        """Note that these tables' rows are read at `point`: earlier changes are in them."""
        self._points.update((t.id, point) for t in tables)
        self._loading = [t.id for t in tables]

    @property
    def is_loading(self) -> bool:
        """Whether a snapshot was read that is not durable yet."""
        return any(name not in self._stopped for name in self._loading)

    def loaded(self) -> list[Table]:
        """Give the tables whose snapshot has just become durable, once."""
        loaded, self._loading = self._loading, []
        return [self._tables[name] for name in loaded if name not in self._stopped]

    def state(self, name: TableId) -> TableState:
        """Its state in `_tables`: not live before its snapshot is durable."""
        return TableState.SNAPSHOTTING if name in self._loading else TableState.LIVE

    def stop(self, name: TableId) -> Table:
        """Take nothing more of this table in this run; gives its schema."""
        self._stopped.add(name)
        self._points.pop(name, None)
        return self._tables[name]

    def events(
        self, tables: Sequence[Table], state: TableState, at: datetime, at_lsn: Lsn
    ) -> list[TableEvent]:
        """Make the events of tables that entered a state together."""
        return [TableEvent(t, state, at, at_lsn, self._snapshot_lsn(t.id)) for t in tables]

    def _snapshot_lsn(self, table: TableId) -> Lsn | None:
        known = self._committed.tables.get(table)
        return self._points.get(table, known.snapshot_lsn if known else None)

    def admit(self, batch: TableBatch) -> TableBatch | None:
        """Cut a batch of the stream to what is to be taken of it."""
        name = batch.table.id
        if not self.is_captured(name):
            return None
        point = self._points.get(name)
        return batch if point is None else rows_from(batch, point)

    def is_new_version(self, table: Table) -> bool:
        """Whether the stream brought another schema than the last; notes it."""
        known = self._tables[table.id]
        if known.columns == table.columns and known.replica_identity == table.replica_identity:
            return False
        self._tables[table.id] = table
        return True


def stopped(table: Table, error: TableError, at: datetime, at_lsn: Lsn) -> TableEvent:
    """Make the event of a table that can't go on."""
    state = TableState.STOPPED
    return TableEvent(table, state, at, at_lsn, reason=error.reason, remedy=error.remedy)
