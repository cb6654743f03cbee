"""Current rows of tables at one epoch each, kept as Parquet outside the lake.

A later read takes them from here, and from the lake only the changes since. An entry is one file
and `cache.json`, which is replaced last. It is used only for the epoch, columns and key it names.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ingestd.lake.delta.data_files import DataFileReader
from ingestd.lake.fold.row_keys import RowKeys
from ingestd.lake.layout import Layout
from ingestd.lake.reference.raw_changes import KeepGroup
from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.store import open_store
from ingestd.model.changes import SNAPSHOT
from ingestd.model.errors import FolderError, IngestdError, OperatorError
from ingestd.model.schema import TableId
from ingestd.process.file_creation import append, create_binary, make_private_folder, replace
from ingestd.reading.output_columns import OutputColumn
from ingestd.reading.raw_files import old_keys

_FORMAT = 1
_META = "cache.json"
_META_TYPES = {"signature": dict, "epoch": int, "end": list, "file": str, "rows": int}
_LOCK = "lock"
_FILE = re.compile(r"[0-9a-f]{16}\.parquet\Z")


@dataclass(frozen=True, slots=True)
class CachedRows:
    """A table's current rows at the end of `epoch`, in an open file; `rows`: their number.

    `end`: what `_epochs` said of the epoch (`SourceCut.end_of`). `signature`: see `signature_of`.
    The file may be replaced meanwhile: an open one can still be read.
    """

    path: Path
    epoch: int
    end: tuple[Any, ...]
    rows: int
    signature: Mapping[str, Any]
    file: DataFileReader

    def tables(self, schema: pa.Schema, keep: KeepGroup | None) -> Iterator[pa.Table]:
        """Yield the rows in batches, with the columns of a schema.

        Raise OperatorError for a damaged file, which is removed.
        """
        try:
            with storage_faults(str(self.path)):
                for group in range(self.file.num_row_groups):
                    if keep is None or keep(self.file, group):
                        for batch in self.file.batches(schema.names, group):
                            yield pa.Table.from_batches([batch]).select(schema.names).cast(schema)
        except FolderError as error:
            self.path.unlink(missing_ok=True)
            raise OperatorError(
                f"cache {self.path}: the file is damaged and was removed: {error.what}",
                remedy="read again: the next read creates it from the lake",
            ) from error


class TableCache:
    """The entry of one table. Raises OperatorError if the folder can't be used.

    `lake`: where the lake is, and its id, which others may have: that of a copy, or a forged one.
    """

    def __init__(self, root: str, lake: str, source: str, table: TableId) -> None:
        self._root = Path(root)
        self._lake = hashlib.sha256(lake.encode()).hexdigest()[:16]
        self._folder = self._root / self._lake / Layout(source).raw(table)

    @contextmanager
    def _folder_faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OperatorError(
                f"cache {self._folder}: {error}",
                remedy="choose another folder for `cache`, or read without one",
            ) from error

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Wait until no other reader, of any process, fills this entry; then keep them out."""
        with self._folder_faults():
            make_private_folder(self._root)
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = append(self._folder / _LOCK)
        with lock:  # released when it is closed, also by the end of the process
            with self._folder_faults():
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def find(self) -> CachedRows | None:
        """Return the entry; None if it is missing, damaged, or of another version of ingestd."""
        with self._folder_faults():
            make_private_folder(self._root)
        found = self._read_meta()
        if found is None:
            return None
        with suppress(IngestdError):
            return self._open(found)
        return None

    def _open(self, meta: Mapping[str, Any]) -> CachedRows:
        """Return the entry with its file open. Raise FolderError if it has other rows."""
        path = self._folder / meta["file"]
        store = open_store(str(self._folder), None)
        with storage_faults(str(path)):
            file = DataFileReader(store.open(path.name), str(path), meta["rows"])
        end = tuple(meta["end"])
        return CachedRows(path, meta["epoch"], end, meta["rows"], meta["signature"], file)

    def _read_meta(self) -> dict[str, Any] | None:
        """Return what the entry says of itself; None if it is missing or damaged."""
        with suppress(OSError, ValueError):
            found = json.loads((self._folder / _META).read_bytes())
            if isinstance(found, dict) and all(
                isinstance(found.get(name), kind) for name, kind in _META_TYPES.items()
            ):
                is_ours = found["signature"].get("format") == _FORMAT
                return found if is_ours and _FILE.match(found["file"]) else None
        return None

    def write(
        self,
        signature: Mapping[str, Any],
        epoch: int,
        end: Sequence[Any],
        batches: Iterator[pa.RecordBatch],
        schema: pa.Schema,
    ) -> CachedRows:
        """Replace the entry with these rows, and return it. Only while `filling`."""
        with self._folder_faults():
            path = self._folder / f"{secrets.token_hex(8)}.parquet"
            try:
                rows = _write_file(path, batches, schema)
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            meta = {"signature": signature, "epoch": epoch, "end": end}
            meta |= {"file": path.name, "rows": rows}
            replace(self._folder / _META, json.dumps(meta))
            for other in self._folder.glob("*.parquet"):
                if other != path:
                    other.unlink(missing_ok=True)
        return self._open(meta)


def _write_file(path: Path, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> int:
    """Write rows to a new file, durably; return their number."""
    rows = 0
    with create_binary(path) as file:
        with pq.ParquetWriter(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
                rows += batch.num_rows
        file.flush()
        os.fsync(file.fileno())
    return rows


def signature_of(columns: Sequence[OutputColumn], key: Sequence[str], key_since: int) -> Any:  # noqa: ANN401 - JSON
    """Return what an entry's rows depend on, besides the lake."""
    described = [
        [c.name, {n: str(kind) for n, kind in c.stored.items()}, c.since_lsn, c.missing]
        for c in columns
    ]
    found = {"format": _FORMAT, "columns": described, "key": list(key), "key_since": key_since}
    return json.loads(json.dumps(found))


class TouchedKeys:
    """The keys that some changes add, change or remove."""

    def __init__(self, changes: pa.Table, key: Sequence[str]) -> None:
        self._key = list(key)
        sides = changes.select(self._key), old_keys(changes, key)
        own = [
            pa.concat_arrays([*(side[name].cast(kind).combine_chunks() for side in sides)])
            for name, kind in ((n, changes.schema.field(n).type) for n in self._key)
        ]
        self._keys = RowKeys(own)

    def find(self, rows: pa.Table) -> NDArray[np.bool_]:
        """Return which rows have one of the keys, or a key with a null, which may be a text."""
        found = self._keys.find([rows[name] for name in self._key]) >= 0
        for name in self._key:
            if rows[name].null_count:
                found |= rows[name].is_null().to_numpy()
        touched: NDArray[np.bool_] = found
        return touched


def as_changes(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return current rows as the `r` rows of a change log with this schema."""
    count = rows.num_rows
    columns = []
    for field in schema:
        if field.name == "_cdc_op":
            columns.append(pa.array([SNAPSHOT] * count, field.type))
        elif field.name in rows.column_names:
            columns.append(rows[field.name].cast(field.type))
        else:
            columns.append(pa.nulls(count, field.type))
    return pa.Table.from_arrays(columns, schema=schema)
