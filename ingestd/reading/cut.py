"""A cut: all tables of a source as they were at the end of one epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingestd.lake.definitions import Definition, Registry
from ingestd.lake.delta.data_files import open_parquet
from ingestd.lake.delta.log import TableLog
from ingestd.lake.delta.read import conform, list_files
from ingestd.lake.epochs_table import SCHEMA as EPOCHS_SCHEMA
from ingestd.lake.layout import Layout
from ingestd.lake.registry_table import SCHEMA as TABLES_SCHEMA
from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.store import Store
from ingestd.model.errors import (
    ConfigError,
    FolderError,
    OperatorError,
    TableError,
    did_you_mean_table,
    resnapshot_command,
)
from ingestd.model.lake_state import TableState
from ingestd.model.schema import TableId

_NEVER_NULL = {"epoch", "end_lsn", "table", "state", "schema_version", "at_lsn", "at"}
"""Columns of `_epochs` and `_tables` that have a value in every row."""
_OF_CUT = pa.schema(
    [EPOCHS_SCHEMA.field(name) for name in ("epoch", "end_lsn", "committed_at", "tables")]
)
_NAMED = 20
"""Names of tables that an error lists at most."""


class SourceRecords:
    """What a lake records of a source: `_epochs` and `_tables`. Blocks; reads only what is new."""

    def __init__(self, store: Store, source: str) -> None:
        layout = Layout(source)
        self.source = source
        self._epochs = TableLog(store, layout.epochs, layout.app_id())
        self._tables = TableLog(store, layout.tables, layout.app_id())
        self._read: dict[tuple[str, ...], tuple[set[str], pa.Table]] = {}
        self._registry: tuple[pa.Table, Registry] | None = None

    def epochs(self, schema: pa.Schema = EPOCHS_SCHEMA) -> pa.Table:
        """Return the rows of `_epochs`, by epoch. Raise OperatorError without any."""
        rows = self._rows(self._epochs, schema, "epoch")
        if not rows.num_rows:
            raise OperatorError(
                f"lake {self._epochs.uri}: source {self.source} has no epoch yet",
                remedy="check the lake's URI and the source's name; `ingestd run` commits the first"
                " epoch",
            )
        return rows

    def events(self) -> pa.Table:
        """Return the rows of `_tables`, in the order in which they were recorded."""
        return self._rows(self._tables, TABLES_SCHEMA, "at")

    def registry(self) -> Registry:
        """Return the contents of `_tables`."""
        events = self.events()
        if self._registry is None or self._registry[0] is not events:
            self._registry = events, Registry(events.to_pylist())
        return self._registry[1]

    def _rows(self, log: TableLog, schema: pa.Schema, order: str) -> pa.Table:
        """Return the rows of the newest version, by a column.

        They are kept, so that only new files are read, unless others were removed.
        """
        log.load()
        if not log.exists:
            return schema.empty_table()
        needed = pa.schema([field for field in schema if field.name in _NEVER_NULL])
        log.ensure_fields(needed)
        own = (log.folder, *schema.names)
        known, rows = self._read.get(own, (set[str](), schema.empty_table()))
        with storage_faults(log.uri):
            paths = {path for path, _, _ in list_files(log.handle)}
            if paths == known:
                return rows
            if not known <= paths:
                known, rows = set(), schema.empty_table()
            new = [_file_rows(log, path, schema) for path in sorted(paths - known)]
        rows = pa.concat_tables([rows, *new])
        for name in needed.names:
            if rows[name].null_count:
                raise FolderError(
                    f"lake table {log.uri}: a row has no {name}: another program wrote it",
                    remedy="put the table's folder back from a copy",
                )
        self._read[own] = paths, rows.sort_by(order).combine_chunks()
        return self._read[own][1]

    def cut(self, at: int | None = None) -> SourceCut:
        """Return the cut at an epoch; None: at the last one. Raise ConfigError if it is unknown."""
        epochs = self.epochs(_OF_CUT)
        numbers = epochs["epoch"].to_numpy()
        first, last = int(numbers[0]), int(numbers[-1])
        number = last if at is None else at
        if type(number) is not int or not first <= number <= last:
            cleared = "" if first == 1 else f": maintenance removed those before {first}"
            msg = f"at: the lake of source {self.source} has the epochs {first} to {last}{cleared}"
            raise ConfigError(f"{msg}, not {number!r}")
        epochs = epochs.slice(0, int(np.searchsorted(numbers, number, side="right")))
        if epochs.num_rows != number - first + 1:
            raise OperatorError(
                f"lake {self._epochs.uri}: epochs are missing below {number}: it has only"
                f" {epochs.num_rows} of {number - first + 1}",
                remedy="put `_epochs` back from a copy of the lake",
            )
        return SourceCut(self, number, epochs, self.registry())

    def last_epoch(self) -> int:
        """Return the number of the last epoch. Raise OperatorError without any."""
        return int(self.epochs(_OF_CUT)["epoch"][-1].as_py())


@dataclass(frozen=True)
class SourceCut:
    """All tables of a source at the end of an epoch.

    `epochs`: the rows of `_epochs` up to it, by epoch, with the columns that a cut needs.
    """

    records: SourceRecords
    epoch: int
    epochs: pa.Table
    registry: Registry
    _is_last: list[bool] = field(default_factory=list)

    @property
    def end_lsn(self) -> int:
        """The position at which the epoch ends."""
        return int(self.epochs["end_lsn"][-1].as_py())

    def end_of(self, epoch: int) -> tuple[int, str] | None:
        """Return an epoch's end_lsn and when it was committed; None if it is above this one.

        Another lake, or an older copy that has continued, has other epochs of the same numbers.
        """
        found = self.epochs.filter(pc.equal(self.epochs["epoch"], epoch))
        if not found.num_rows:
            return None
        return found["end_lsn"][0].as_py(), str(found["committed_at"][0].as_py())

    def tables(self) -> dict[str, Definition]:
        """Return every table that was known by then, by name."""
        found = {name: self._definition(name) for name in self.registry.tables}
        return {name: each for name, each in found.items() if each is not None}

    def _definition(self, table: str) -> Definition | None:
        """Return the definition at the end of the epoch.

        While no later epoch exists, that of a table that has become complete since is the newest.
        """
        found = self.registry.at(table, self.end_lsn)
        if found is not None and found.is_complete_at_every_epoch:
            return found
        return self.registry.at_epoch(table, self.end_lsn, self._is_newest)

    def _is_newest(self) -> bool:
        if not self._is_last:
            self._is_last.append(self.records.last_epoch() == self.epoch)
        return self._is_last[0]

    def known(self, table: TableId) -> Definition:
        """Return a table. Raise ConfigError if the lake did not have it by then."""
        found = self._definition(str(table))
        if found is None:
            raise self._unknown(table)
        return found

    def complete(self, table: TableId) -> Definition:
        """Return a table that the lake has completely at this cut.

        Raise as `known`, and TableError for a table that is not complete.
        """
        found = self.known(table)
        if not found.is_complete_at_every_epoch:
            raise TableError(table, self._why_incomplete(found), remedy=self._remedy(found))
        if found.snapshot_lsn is None:
            raise TableError(
                table,
                'its rows were never read (snapshot = "never"): the lake has only its changes',
                remedy=f"{resnapshot_command(self.records.source, table)} reads them",
            )
        return found

    def ensure_all_rows(
        self, table: TableId, rows: int, by_epoch: Callable[[], Mapping[int, int]], above: int
    ) -> None:
        """Raise TableError if the raw table lacks rows of epochs that end above a position.

        `rows`: how many it has up to this cut; `by_epoch` returns them by epoch.
        """
        wanted, total = self._rows_of(table)
        if rows < total:
            self._ensure_rows(
                table, wanted.filter(pc.greater(wanted["end_lsn"], above)), by_epoch()
            )

    def ensure_rows_since(self, table: TableId, epoch: int, rows: Mapping[int, int]) -> None:
        """Raise TableError if the raw table lacks rows of epochs above one. `rows`: by epoch."""
        wanted, _ = self._rows_of(table)
        self._ensure_rows(table, wanted.filter(pc.greater(wanted["epoch"], epoch)), rows)

    def _rows_of(self, table: TableId) -> tuple[pa.Table, int]:
        """Return the epochs that changed a table (epoch, end_lsn, rows), and the sum of rows."""
        (entries,) = self.epochs["tables"].chunks
        parents, flat = pc.list_parent_indices(entries), pc.list_flatten(entries)
        is_own = pc.equal(pc.struct_field(flat, "table"), str(table))
        own = self.epochs.select(["epoch", "end_lsn"]).take(parents.filter(is_own))
        rows = pc.struct_field(flat, "rows").filter(is_own)
        return own.append_column("rows", rows), pc.sum(rows).as_py() or 0

    def _ensure_rows(self, table: TableId, wanted: pa.Table, rows: Mapping[int, int]) -> None:
        for epoch in wanted.to_pylist():
            if rows.get(epoch["epoch"], 0) < epoch["rows"]:
                raise TableError(
                    table,
                    f"rows of epoch {epoch['epoch']} are missing from its raw table: they were"
                    " removed, by maintenance or by another program",
                    remedy="put the table's folder back from a copy; or re-read it:"
                    f" {resnapshot_command(self.records.source, table)}",
                )

    def ensure_same_key(self, table: TableId, definition: Definition, changed_from: int) -> None:
        """Raise TableError if a change at a position may identify its row by another key."""
        if changed_from < definition.key_since_lsn:
            raise TableError(
                table,
                f"its replica identity changed at {definition.key_since_lsn}, and earlier changes"
                " identify rows by the previous one",
                remedy=f"re-read it: {resnapshot_command(self.records.source, table)}",
            )

    def _unknown(self, table: TableId) -> ConfigError:
        known = [TableId.parse(name) for name in self.tables()]
        shown = ", ".join(map(str, known[:_NAMED])) + ", ..." * (len(known) > _NAMED)
        return ConfigError(
            f"{table}: source {self.records.source} has no such table at epoch {self.epoch}:"
            f" {did_you_mean_table(table, known)}the lake has {shown or 'none'}"
        )

    def _why_incomplete(self, definition: Definition) -> str:
        at = f"at epoch {self.epoch}"
        if definition.state is TableState.STOPPED:
            return f"is stopped {at}: {definition.reason}"
        if definition.state is TableState.DROPPED:
            return f"is dropped {at}: {definition.reason or 'the source no longer has it'}"
        return f"is being read by the daemon {at}: the lake does not have all of its rows"

    def _remedy(self, definition: Definition) -> str:
        if definition.state is TableState.STOPPED:
            return "`ingestd check` says what to do; or read it at an earlier epoch"
        if definition.state is TableState.DROPPED:
            return "read it at an earlier epoch"
        return f"`ingestd status` shows its progress; then read it at an epoch above {self.epoch}"


def _file_rows(log: TableLog, path: str, schema: pa.Schema) -> pa.Table:
    with open_parquet(log.store, f"{log.folder}/{path}") as file:
        names = [name for name in schema.names if name in file.schema.names]
        parts = [conform(pa.Table.from_batches([batch]), schema) for batch in file.batches(names)]
    return pa.concat_tables([schema.empty_table(), *parts])
