"""The record of a source in the lake: its tables, its positions (design section 2)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from ingestd.model.schema import ReplicaIdentity, lake_type_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from ingestd.model.errors import TableError
    from ingestd.model.lsn import Lsn
    from ingestd.model.schema import Table, TableId


class TableState(StrEnum):
    """State of a table in `_tables`."""

    SNAPSHOTTING = "snapshotting"
    LIVE = "live"
    STOPPED = "stopped"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class TableEvent:
    """A row to append to `_tables`: the table's current state and schema.

    `snapshot_lsn`: the point its rows were read at (None before the first). `at_lsn`: the position
    from which this holds. `remedy` is for display and not recorded. `progress`: the part of the
    snapshot at `snapshot_lsn` still to be read (`Snapshot.remainder`), empty if nothing of it is
    kept. A table without columns here keeps those of the previous event.
    """

    table: Table
    state: TableState
    at: datetime
    at_lsn: Lsn
    snapshot_lsn: Lsn | None = None
    reason: str | None = None
    remedy: str | None = None
    progress: str = ""


@dataclass(frozen=True, slots=True)
class RegisteredColumn:
    """A column of a table as recorded in `_tables`; `name` is the lake column's."""

    name: str
    source_name: str
    type_oid: int
    typmod: int
    lake_type: str
    missing: str | None = None
    identity: bool = False
    key: bool = False


def registered_columns(table: Table) -> tuple[RegisteredColumn, ...]:
    """Return the table's columns as `_tables` would record them, to detect changes."""
    key = table.captured_key
    return tuple(
        RegisteredColumn(
            name=c.lake_name,
            source_name=c.name,
            type_oid=c.type_oid,
            typmod=c.typmod,
            lake_type=lake_type_name(c.type),
            missing=c.missing,
            identity=c.identity,
            key=c.name in key,
        )
        for c in table.columns
    )


_EARLIER = 16
"""Count of former tables of one name that are kept: the lake has the changes of older ones."""


@dataclass(frozen=True, slots=True)
class RegisteredTable:
    """The last row of a table in `_tables`, as far as a start needs it.

    `columns`: those of the last row that has any. `lake_columns`: the newest entry of every lake
    column that the table ever had, by name: a column dropped in the source stays in the lake.
    `resume`: the last durable `TableBatch.resume`, from the raw table; empty without one.
    `earlier`: the tables that had this name before, as last registered. `at`: time of that row.
    """

    table: TableId
    oid: int
    schema_version: int
    state: TableState
    reason: str | None
    snapshot_lsn: Lsn | None
    columns: tuple[RegisteredColumn, ...] = ()
    lake_columns: Mapping[str, RegisteredColumn] = field(default_factory=dict)
    fingerprint: str = ""
    replica_identity: ReplicaIdentity = "d"
    progress: str = ""
    resume: str = ""
    earlier: tuple[RegisteredTable, ...] = ()
    at: datetime | None = field(default=None, compare=False)

    def carrying(self, before: RegisteredTable | None) -> RegisteredTable:
        """Return this entry with gaps filled from an earlier row."""
        if before is None:
            return replace(self, lake_columns={c.name: c for c in self.columns})
        columns = self.columns or before.columns
        ever = {**before.lake_columns, **{c.name: c for c in columns}}
        fingerprint = self.fingerprint or before.fingerprint
        earlier = before.earlier
        if before.oid not in {0, self.oid}:
            earlier = (*earlier, replace(before, earlier=()))[-_EARLIER:]
        return replace(
            self, columns=columns, lake_columns=ever, fingerprint=fingerprint, earlier=earlier
        )


def registered(event: TableEvent, before: RegisteredTable | None) -> RegisteredTable:
    """Return the registered state of a table after an event."""
    table = event.table
    found = RegisteredTable(
        table=table.id,
        oid=table.oid,
        schema_version=1,
        state=event.state,
        reason=event.reason,
        snapshot_lsn=event.snapshot_lsn,
        columns=registered_columns(table),
        fingerprint=table.fingerprint,
        replica_identity=table.replica_identity,
        progress=event.progress,
        at=event.at,
    ).carrying(before)
    if before is None:
        return found
    had = (before.oid, before.replica_identity, before.columns)
    same = had == (found.oid, found.replica_identity, found.columns)
    return replace(found, schema_version=before.schema_version + (0 if same else 1))


@dataclass(frozen=True, slots=True)
class UnlistedRows:
    """Rows of one table beyond the last epoch: not listed in `_epochs` yet.

    `first`, `reach`: the lowest and the highest position (`_cdc_lsn`) among them; `at`: the latest
    time (`_cdc_ts`, aware), or up to a millisecond later.
    """

    first: Lsn
    reach: Lsn
    at: datetime


RAW_TABLE_MISSING = "its raw table is missing from the lake"
"""Reason for re-reading a table."""


@dataclass(frozen=True, slots=True)
class Notice:
    """An operator notice about the state of the lake. `event`: its name in the log."""

    event: str
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class LakeState:
    """The durable state of a source in the lake.

    `epoch`: number of the last epoch, 0 if none. `position`: where streaming continues: the end_lsn
    of the last epoch or a later position with nothing captured between (`Sink.advance`); None in an
    empty lake. `watermarks`: per table, the position below which its raw table is complete, which
    may be above `position` after a crash between two commits. `server_id`: the server (its system
    identifier) these rows come from. `unlisted`: per table, its rows beyond the last epoch.
    `missing`: tables that an epoch lists and whose raw table does not exist; `tables` has them as
    stopped. `damaged`: tables whose raw table can't be used, and why: only they stop (I8); they are
    in neither `watermarks` nor `unlisted`. `lake_id`: that of the lake, None without one.
    `removed`: if the lake has nothing of the source, the evidence that it once had something; None
    without any.
    """

    epoch: int = 0
    position: Lsn | None = None
    watermarks: Mapping[TableId, Lsn] = field(default_factory=dict)
    tables: Mapping[TableId, RegisteredTable] = field(default_factory=dict)
    server_id: str | None = None
    unlisted: Mapping[TableId, UnlistedRows] = field(default_factory=dict)
    missing: frozenset[TableId] = frozenset()
    damaged: Mapping[TableId, TableError] = field(default_factory=dict)
    notices: tuple[Notice, ...] = ()
    lake_id: str | None = None
    removed: str | None = None

    @property
    def has_nothing(self) -> bool:
        """True if the lake has nothing of the source: its server is recorded first of all."""
        has_rows = bool(self.watermarks or self.tables)
        return self.server_id is None and self.position is None and not has_rows

    @property
    def floor(self) -> Lsn | None:
        """The first epoch does not close below this (I4)."""
        return max(self.reaches.values(), default=None)

    @property
    def reaches(self) -> Mapping[TableId, Lsn]:
        """Per table, the highest position that its raw table claims to have."""
        found = dict(self.watermarks)
        for table, rows in self.unlisted.items():
            found[table] = max(rows.reach, found.get(table, rows.reach))
        return found

    @property
    def needs_continuity(self) -> bool:
        """True if the lake has rows that stay correct only without a gap."""
        return any(map(self.is_active, self.tables))

    def without(self, damaged: Mapping[TableId, TableError]) -> LakeState:
        """Return the state with these tables damaged: no position of theirs counts (I8)."""
        return replace(
            self,
            watermarks={t: lsn for t, lsn in self.watermarks.items() if t not in damaged},
            unlisted={t: rows for t, rows in self.unlisted.items() if t not in damaged},
            damaged={**self.damaged, **damaged},
        )

    def is_active(self, table: TableId) -> bool:
        """Return whether the table's rows are correct only without a gap."""
        found = self.tables.get(table)
        return found is not None and (found.state is TableState.LIVE or bool(found.progress))

    def is_live(self, table: TableId) -> bool:
        """Return whether the table's snapshot is complete and its changes are applied."""
        found = self.tables.get(table)
        return found is not None and found.state is TableState.LIVE
