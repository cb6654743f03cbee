"""Readers for the rows of a Delta table, file by file.

They avoid `DeltaTable.to_pyarrow_table`, which with pyarrow 26 aborts the interpreter at exit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from ingestd.lake.delta.arrow_types import conformed
from ingestd.lake.delta.commit import checked_statistics, statistics_of
from ingestd.lake.delta.data_files import open_parquet
from ingestd.lake.delta.log_files import open_table
from ingestd.lake.delta.log_paths import file_of
from ingestd.lake.delta.table_features import FILES_BY_NAME
from ingestd.lake.layout import Layout
from ingestd.lake.store.errors import FeatureError, storage_faults, unreadable
from ingestd.lake.store.store import Store, open_store
from ingestd.model.errors import DamagedError
from ingestd.model.schema import TableId

_RELEASED_EVERY = 8
"""Batches after which memory that was allocated for them and freed is returned to the system."""
_SIZES = range(1 << 50)
_VECTORS = "deletionVectors"
_PHYSICAL_NAME = b"delta.columnMapping.physicalName"
KeepFile = Callable[[Mapping[str, Any]], bool]
"""Decides from a file's statistics (empty if it has none) whether to read the file."""


def read_raw(
    uri: str,
    source: str,
    table: TableId,
    *,
    version: int | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> pa.Table:
    """Read the raw table of `table` in the lake at `uri`, at a Delta version or the newest.

    Rows come in the order of the files, not of positions. Raise deltalake's TableNotFoundError.
    """
    store = open_store(uri, storage_options)
    folder = Layout(source).raw(table)
    handle = open_table(store, folder, version)
    return read_files(handle, store, folder)


def read_files(
    handle: DeltaTable,
    store: Store,
    folder: str,
    *,
    columns: Sequence[str] | None = None,
    keep: KeepFile | None = None,
    schema: pa.Schema | None = None,
) -> pa.Table:
    """Read the handle's version of the table in `folder`: all rows, or those of some files.

    `schema`: the wanted schema if it has more columns than the table. Columns and struct fields
    that a file lacks are null. Raise whatever `storage_fault` makes of an error.
    """
    if schema is None:
        schema = pa.schema(handle.schema().to_arrow())
    if columns is not None:
        schema = pa.schema([schema.field(name) for name in columns])
    parts = list(read_each(handle, store, folder, schema, keep=keep))
    return pa.concat_tables(parts) if parts else schema.empty_table()


def read_each(
    handle: DeltaTable,
    store: Store,
    folder: str,
    schema: pa.Schema,
    *,
    keep: KeepFile | None = None,
    unless_null: str | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows in batches, as `read_files` does; skip files where `unless_null` is null."""
    with storage_faults(store.uri(folder)):
        for path, statistics, _ in list_files(handle):
            if keep is None or keep(statistics):
                for batch in _read_file(store, f"{folder}/{path}", schema, unless_null):
                    yield conform(pa.Table.from_batches([batch]), schema)


def read_batches(
    store: Store, folder: str, columns: Sequence[str]
) -> Generator[pa.RecordBatch, None, None]:
    """Yield these columns of the newest version, in batches; none without a table.

    Columns that the table lacks are left out.
    """
    uri = store.uri(folder)
    with storage_faults(uri):
        try:
            handle = open_table(store, folder)
        except TableNotFoundError:
            return
        whole = pa.schema(handle.schema().to_arrow())
        schema = pa.schema([whole.field(name) for name in columns if name in whole.names])
        for path, _, _ in list_files(handle):
            with open_parquet(store, f"{folder}/{path}") as file:
                present = [name for name in schema.names if name in file.schema.names]
                for number, batch in enumerate(file.batches(present), 1):
                    yield from conform(pa.Table.from_batches([batch]), schema).to_batches()
                    if number % _RELEASED_EVERY == 0:
                        pa.default_memory_pool().release_unused()


def list_files(handle: DeltaTable) -> list[tuple[str, dict[str, Any], int]]:
    """Return each file's path inside the table, its statistics (empty if it has none) and bytes."""
    return [(path, statistics, size) for path, statistics, size, _ in list_actions(handle)]


def list_actions(handle: DeltaTable) -> list[tuple[str, dict[str, Any], int, int]]:
    """Return the same as `list_files`, plus when each file was written (ms).

    Raise FeatureError if the files alone do not determine the rows, and FolderError for numbers
    that no file has.
    """
    refuse_unread(handle)
    uri = handle.table_uri.removeprefix("file://")
    with unreadable(uri):
        return [
            (file_of(a["path"], uri), _statistics(a), _size(a), _milliseconds(a))
            for a in pa.table(handle.get_add_actions()).to_pylist()
        ]


def refuse_unread(handle: DeltaTable) -> None:
    """Raise FeatureError if a table's files can't be read as they are.

    A file with a deletion vector contains deleted rows. The files of a table with column mapping
    have the names from before columns were renamed. Source: Delta protocol, "Deletion Vectors" and
    "Column Mapping".
    """
    uri = handle.table_uri
    if _VECTORS in (handle.protocol().reader_features or ()):
        vectors = pa.table(handle.deletion_vectors())
        if vectors.num_rows:
            name = vectors["filepath"][0].as_py().rpartition("/")[2]
            what = f"the data file {name} has a deletion vector, which ingestd does not read"
            raise FeatureError(uri, what, "REORG TABLE {t} APPLY (PURGE)")
    renamed = _renamed(pa.schema(handle.schema().to_arrow()))
    if renamed is not None:
        name, stored = renamed
        what = (
            f"the column {name} is {stored} in the data files (column mapping), which ingestd does"
            " not read"
        )
        raise FeatureError(uri, what, FILES_BY_NAME)


def _renamed(fields: Iterable[pa.Field], inside: str = "") -> tuple[str, str] | None:
    """Return the first column, or struct field, that has another name in the files."""
    for field in fields:
        stored = (field.metadata or {}).get(_PHYSICAL_NAME)
        if stored is not None and stored.decode() != field.name:
            return f"{inside}{field.name}", stored.decode()
        if pa.types.is_struct(field.type):
            found = _renamed(field.type, f"{inside}{field.name}.")
            if found is not None:
                return found
    return None


def _size(action: Mapping[str, Any]) -> int:
    """Raise ValueError for a size that no file has."""
    nbytes = int(action["size_bytes"])
    if nbytes not in _SIZES:
        msg = f"a file of {nbytes} bytes"
        raise ValueError(msg)
    return nbytes


def _milliseconds(action: Mapping[str, Any]) -> int:
    at = action["modification_time"]
    return int(at.timestamp() * 1000) if isinstance(at, datetime) else int(at)


def _statistics(action: Mapping[str, Any]) -> dict[str, Any]:
    if "stats" in action:
        return statistics_of(action["stats"])
    stated = {
        "numRecords": action.get("num_records"),
        "minValues": action.get("min") or {},
        "maxValues": action.get("max") or {},
    }
    return checked_statistics(stated)


def _read_file(
    store: Store, path: str, schema: pa.Schema, unless_null: str | None
) -> Iterator[pa.RecordBatch]:
    with open_parquet(store, path) as file:
        present = set(file.schema.names)
        if unless_null is not None and all(
            batch.column(0).null_count == batch.num_rows for batch in file.batches([unless_null])
        ):
            return
        yield from file.batches([n for n in schema.names if n in present])


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table in this schema: missing columns and missing struct fields become null.

    Raise DamagedError for a column of another type whose values don't fit.
    """
    columns = []
    for field in schema:
        index = table.schema.get_field_index(field.name)
        if index < 0:
            columns.append(pa.nulls(table.num_rows, field.type))
        else:
            columns.append(_conform_column(table.column(index), field))
    return pa.Table.from_arrays(columns, schema=schema)


def _conform_column(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    try:
        return pa.chunked_array([conformed(c, field.type) for c in column.chunks], field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:  # their text quotes values
        what = f"a data file has column {field.name!r} as {column.type}, the table as {field.type}"
        raise DamagedError(what) from error
