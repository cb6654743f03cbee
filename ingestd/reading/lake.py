"""The public API: a lake, its sources, and their tables. Reads only; blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ingestd.lake.definitions import Definition
from ingestd.lake.lake_id import read_lake_id
from ingestd.lake.layout import OWN_FOLDERS, name_of
from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.store import Store, open_store
from ingestd.model.errors import ConfigError, OperatorError, did_you_mean
from ingestd.model.schema import TableId
from ingestd.reading.change_rows import ChangeRows
from ingestd.reading.current_rows import CurrentRows, ReadOptions
from ingestd.reading.cut import SourceRecords
from ingestd.reading.frames import optional_library
from ingestd.reading.output_columns import output_columns
from ingestd.reading.row_cache import TableCache


@dataclass(frozen=True, slots=True)
class TableDescription:
    """A table at the end of an epoch.

    `name`: "schema.table". `state`: as in `_tables`. `is_complete`: its current rows can be read.
    `reason`: why it stopped or was dropped. `columns`: names and types of the source's columns, as
    `LakeTable.current` returns them, without `_cdc_raw`. `key`: the columns that identify a row;
    empty: rows are a multiset.
    """

    name: str
    state: str
    is_complete: bool
    reason: str | None
    columns: pa.Schema
    key: tuple[str, ...]


class Lake:
    """A lake, as `ingestd.open_lake` opens it. `name`: see `TableCache`."""

    def __init__(self, store: Store, name: str, cache: str | None = None) -> None:
        self._store, self._name, self._cache = store, name, cache

    def sources(self) -> list[str]:
        """Return the names of the sources, sorted."""
        with storage_faults(self._store.uri("")):
            found = map(name_of, self._store.folders(""))
            return sorted(name for name in found if name is not None)

    def source(self, name: str) -> LakeSource:
        """Return a source. Raise ConfigError if the lake does not have it."""
        known = self.sources()
        if name not in known:
            hint = did_you_mean(name, known)
            has = ", ".join(known) or "no source"
            msg = f"source {name!r} is not in the lake {self._store.uri('')}: {hint}it has {has}"
            raise ConfigError(msg)
        return LakeSource(self._store, name, self._name, self._cache)


class LakeSource:
    """A source of a lake. `name`: its name.

    All tables read at one epoch are one cut: they are transactionally consistent. A daemon commits
    epochs meanwhile, so pass the same `at` to read several tables: `last_epoch` returns one.
    """

    def __init__(self, store: Store, name: str, lake: str, cache: str | None) -> None:
        self.name = name
        self._lake, self._cache = lake, cache
        self._store = store
        self._records = SourceRecords(store, name)

    def epochs(self) -> pa.Table:
        """Return the rows of `_epochs`, by epoch (docs: design section 2)."""
        return self._records.epochs()

    def last_epoch(self) -> int:
        """Return the number of the last epoch. Raise OperatorError if there is none yet."""
        return self._records.last_epoch()

    def schema_history(self) -> pa.Table:
        """Return the rows of `_tables`, in the order in which they were recorded."""
        return self._records.events()

    def tables(self, at: int | None = None) -> list[TableDescription]:
        """Return the tables at the end of an epoch, by name; None: of the last epoch.

        Raise ConfigError for an epoch that the lake does not have.
        """
        return [_described(name, each) for name, each in self._records.cut(at).tables().items()]

    def changes(self, table: str, since: int = 0, until: int | None = None) -> pa.RecordBatchReader:
        """Return the changes of a table by its name: see `LakeTable.changes`."""
        return self.table(table).changes(since, until)

    def table(self, name: str) -> LakeTable:
        """Return a table, by its name "schema.table". It is looked up when it is read.

        Raise ConfigError if that is not the form of a name.
        """
        try:
            table = TableId.parse(name)
        except ValueError as error:
            raise ConfigError(f"{name}: write it as schema.table, like public.orders") from error
        root = self._cache
        cache = None if root is None else TableCache(root, self._lake, self.name, table)
        return LakeTable(self._store, self._records, table, cache)


class LakeTable:
    """A table of a source in a lake."""

    def __init__(
        self, store: Store, records: SourceRecords, table: TableId, cache: TableCache | None = None
    ) -> None:
        self._store, self._records, self._table, self._cache = store, records, table, cache

    def __str__(self) -> str:
        return str(self._table)

    def current(
        self,
        at: int | None = None,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
        *,
        merge_versions: bool = True,
    ) -> pa.Table:
        """Return the rows that the source's table had at the end of an epoch, in no order.

        `at`: the epoch; None: the last one. `columns`: names of the columns, in order; by default
        the source's, and `_cdc_raw`: a value that its column can't hold is null there, and its text
        is in `_cdc_raw` by the column's name. For a table with a key, also `_cdc_lsn`, `_cdc_seq`
        and `_cdc_ts` of a row's newest change. `where`: a condition on these columns, such as
        ``pyarrow.compute.field("id") > 5``; of the key, it also saves reading. `merge_versions`:
        whether a column whose type changed is one column of the newest type; else each lake column
        (`amount`, `amount__v2`) is one, except those of the key.

        Raise ConfigError for an epoch, table or column that does not exist, and a condition that is
        not valid; TableError for a table that is not complete at that epoch, or of which rows were
        removed; OperatorError and TransientError for faults of the lake.
        """
        options = ReadOptions(columns, where, merge_versions)
        rows = self._rows(at, options)
        return pa.Table.from_batches(rows.batches(), rows.schema)

    def current_batches(
        self,
        at: int | None = None,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
        *,
        merge_versions: bool = True,
        memory_bytes: int | None = None,
        spill_folder: str | None = None,
    ) -> pa.RecordBatchReader:
        """Return the same rows as `current`, in batches of at most 65,536 rows.

        `memory_bytes`: Arrow bytes held at most, 256 MB by default; above that, rows are spilled to
        a temporary folder in `spill_folder` (by default the system's), which is removed at the end.
        """
        options = ReadOptions(columns, where, merge_versions, folder=spill_folder)
        if memory_bytes is not None:
            options = ReadOptions(columns, where, merge_versions, memory_bytes, spill_folder)
        rows = self._rows(at, options)
        return pa.RecordBatchReader.from_batches(rows.schema, rows.batches())

    def to_pandas(
        self,
        at: int | None = None,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
    ) -> Any:  # noqa: ANN401 - pandas.DataFrame
        """Return the rows of `current` as a pandas DataFrame. Raise OperatorError without pandas.

        Columns keep their Arrow types: numpy has no integer that is null, and no decimal.
        """
        pandas = optional_library("pandas", "to_pandas", "pandas")
        return self.current(at, columns, where).to_pandas(types_mapper=pandas.ArrowDtype)

    def to_polars(
        self,
        at: int | None = None,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
    ) -> Any:  # noqa: ANN401 - polars.DataFrame
        """Return the rows of `current` as a polars DataFrame.

        Raise OperatorError without polars.
        """
        polars = optional_library("polars", "to_polars", "polars")
        return polars.from_arrow(self.current(at, columns, where))

    def to_duckdb(
        self,
        at: int | None = None,
        columns: Sequence[str] | None = None,
        where: pc.Expression | None = None,
        *,
        connection: Any = None,  # noqa: ANN401 - duckdb.DuckDBPyConnection
    ) -> Any:  # noqa: ANN401 - duckdb.DuckDBPyRelation
        """Return the rows of `current` as a DuckDB relation. Raise OperatorError without DuckDB.

        `connection`: that of the relation; None: DuckDB's default one.
        """
        duckdb = optional_library("duckdb", "to_duckdb", "ingestd[query]")
        rows = self.current(at, columns, where)
        return duckdb.from_arrow(rows) if connection is None else connection.from_arrow(rows)

    def changes(self, since: int = 0, until: int | None = None) -> pa.RecordBatchReader:
        """Return the changes of the epochs above `since`, up to `until` (None: the last one).

        They are the rows of the raw table, in no order: sort them by (`_cdc_lsn`, `_cdc_seq`).
        Their columns have the names and types that the source has at the end of `until`; unsent
        values are null and named in `_cdc_unchanged`. They may also be read of a table that is
        not complete. Raise as `current` does.
        """
        cut = self._records.cut(until)
        if type(since) is not int or not 0 <= since <= cut.epoch:
            msg = f"since: {since!r} is no epoch from 0 (the beginning) to {cut.epoch}"
            raise ConfigError(msg)
        rows = ChangeRows(self._store, cut, self._table, since)
        return pa.RecordBatchReader.from_batches(rows.schema, rows.batches())

    def history(self, key: Mapping[str, Any], at: int | None = None) -> pa.Table:
        """Return all changes of the row with a key, up to an epoch (None: the last), by position.

        `key`: the value of each key column. Also returned are updates by which a row left this key,
        and the markers (`t`), below which all rows are void. Values that were not sent are those of
        the change before; what no change has is named in `_cdc_unchanged`. In memory. Raise as
        `current` does, and ConfigError for a wrong key.
        """
        return ChangeRows(self._store, self._records.cut(at), self._table).of_row(key)

    def schema_history(self) -> pa.Table:
        """Return the rows of `_tables` that are of this table, in the order of recording."""
        events = self._records.events()
        return events.filter(pc.equal(events["table"], str(self._table)))

    def _rows(self, at: int | None, options: ReadOptions) -> CurrentRows:
        options = replace(options, cache=self._cache)
        return CurrentRows(self._store, self._records.cut(at), self._table, options)


def open_lake(
    uri: str, storage_options: Mapping[str, str] | None = None, *, cache: str | None = None
) -> Lake:
    """Open a lake: see `ingestd.open_lake`."""
    store = open_store(uri, storage_options)
    lake_id = read_lake_id(store)
    if lake_id is None:
        with storage_faults(store.uri("")):
            is_lake = any(
                OWN_FOLDERS.intersection(store.folders(folder)) for folder in store.folders("")
            )
        if not is_lake:
            raise OperatorError(
                f"lake {store.uri('')}: there is no lake: _ingestd.json is missing",
                remedy="check the URI, and that the file system is mounted; `ingestd run` creates a"
                " lake",
            )
    return Lake(store, f"{store.uri('')} {lake_id}", cache)


def _described(name: str, definition: Definition) -> TableDescription:
    columns = output_columns(definition, merge_versions=True)
    return TableDescription(
        name,
        str(definition.state),
        definition.is_complete_at_every_epoch and definition.snapshot_lsn is not None,
        definition.reason,
        pa.schema([(c.name, c.type) for c in columns]),
        tuple(c.name for c in columns if c.newest in definition.key),
    )
