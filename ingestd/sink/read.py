"""Reading a Delta table's rows by its files.

Not by `DeltaTable.to_pyarrow_table`, which with pyarrow 26 aborts the interpreter at exit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from ingestd.schema import TableId
from ingestd.sink.arrow_types import conformed
from ingestd.sink.commit_actions import parse_statistics
from ingestd.sink.faults import storage_faults
from ingestd.sink.paths import Layout
from ingestd.sink.store import Store, open_store

BATCH_ROWS = 1 << 15
_BUFFER_BYTES = 1 << 20
"""Of a column that is read: else all of it in a row group is, compressed or not."""
_RELEASED_EVERY = 8
"""Batches: what was allocated for them and freed elsewhere is given back to the system."""
KeepFile = Callable[[Mapping[str, Any]], bool]
"""Whether to read a file, by its statistics (empty if it has none)."""


def read_raw(
    uri: str,
    source: str,
    table: TableId,
    *,
    version: int | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> pa.Table:
    """Read the raw table of `table` in the lake at `uri`, at a Delta version or the newest.

    Row order is that of the files, not of positions. Raises deltalake's TableNotFoundError.
    """
    store = open_store(uri, storage_options)
    folder = Layout(source).raw(table)
    handle = DeltaTable(store.uri(folder), version=version, storage_options=store.storage_options)
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

    `schema`: what is wanted, if it is more than the table has. Columns and fields of structs that
    a file lacks are null. Raises what `storage_fault` makes of an error.
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
    """Give the rows file by file, as `read_files` does; not of files where a column is all null."""
    with storage_faults(store.uri(folder)):
        for path, statistics, _ in list_files(handle):
            if keep is None or keep(statistics):
                found = _read_file(store, f"{folder}/{path}", schema, unless_null)
                if found is not None:
                    yield conform(found, schema)


def read_batches(
    store: Store, folder: str, columns: Sequence[str]
) -> Generator[pa.RecordBatch, None, None]:
    """Give these columns of the newest version, in batches of BATCH_ROWS; none without a table.

    What the table lacks of them is left out.
    """
    uri = store.uri(folder)
    with storage_faults(uri):
        try:
            handle = DeltaTable(uri, storage_options=store.storage_options)
        except TableNotFoundError:
            return
        whole = pa.schema(handle.schema().to_arrow())
        schema = pa.schema([whole.field(name) for name in columns if name in whole.names])
        for path in pa.table(handle.get_add_actions())["path"].to_pylist():
            with (
                store.open(f"{folder}/{path}") as source,
                pq.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file,
            ):
                present = [name for name in schema.names if name in file.schema_arrow.names]
                batches = file.iter_batches(BATCH_ROWS, columns=present, use_threads=False)
                for number, batch in enumerate(batches, 1):
                    yield from conform(pa.Table.from_batches([batch]), schema).to_batches()
                    if number % _RELEASED_EVERY == 0:
                        pa.default_memory_pool().release_unused()


def list_files(handle: DeltaTable) -> list[tuple[str, dict[str, Any], int]]:
    """Give each file's path inside the table, its statistics (empty if it has none) and bytes."""
    return [(path, statistics, size) for path, statistics, size, _ in list_actions(handle)]


def list_actions(handle: DeltaTable) -> list[tuple[str, dict[str, Any], int, int]]:
    """Give what `list_files` does, and when each file was written (ms)."""
    actions = pa.table(handle.get_add_actions()).to_pylist()
    return [(a["path"], _statistics(a), a["size_bytes"], _milliseconds(a)) for a in actions]


def _milliseconds(action: Mapping[str, Any]) -> int:
    at = action["modification_time"]
    return int(at.timestamp() * 1000) if isinstance(at, datetime) else int(at)


def _statistics(action: Mapping[str, Any]) -> dict[str, Any]:
    if "stats" in action:
        return parse_statistics(action["stats"])
    return {
        "numRecords": action.get("num_records"),
        "minValues": action.get("min") or {},
        "maxValues": action.get("max") or {},
    }


def _read_file(
    store: Store, path: str, schema: pa.Schema, unless_null: str | None
) -> pa.Table | None:
    with store.open(path) as source, pq.ParquetFile(source) as file:
        present = set(file.schema_arrow.names)
        if unless_null is not None:
            looked_at = file.read(columns=[unless_null])
            if looked_at.column(0).null_count == looked_at.num_rows:
                return None
        return file.read(columns=[n for n in schema.names if n in present])


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Give the table the schema: missing columns, and missing fields of structs, become null."""
    columns = []
    for field in schema:
        index = table.schema.get_field_index(field.name)
        if index < 0:
            columns.append(pa.nulls(table.num_rows, field.type))
        else:
            column = table.column(index)
            columns.append(
                pa.chunked_array([conformed(c, field.type) for c in column.chunks], field.type)
            )
    return pa.Table.from_arrays(columns, schema=schema)
