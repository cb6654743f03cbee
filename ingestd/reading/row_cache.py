"""Current rows of tables at one epoch each, kept as Arrow IPC files outside the lake.

A later read takes them from here, and from the lake only the changes since. An entry is one file
and `cache.json`, which is replaced last. It is used only for the epoch, columns and key it names.

The file is mapped into memory, not read: rows that did not change are returned without a copy.
Beside its rows each batch has the hashes of their keys, ascending, and the number of each one's
row, so the rows of some keys are found without reading the others.
"""

from __future__ import annotations

import errno
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
from numpy.typing import NDArray

from ingestd.digests.value_hashes import Hashes
from ingestd.lake.fold.row_keys import RowKeys
from ingestd.lake.layout import Layout
from ingestd.lake.reference.raw_changes import key_hashes
from ingestd.model.changes import SNAPSHOT
from ingestd.model.errors import OperatorError
from ingestd.model.schema import TableId
from ingestd.process.file_creation import append, create_binary, make_private_folder, replace
from ingestd.reading.output_columns import OutputColumn
from ingestd.reading.raw_files import old_keys

_FORMAT = 2
_META = "cache.json"
_META_TYPES = {
    "signature": dict,
    "epoch": int,
    "end": list,
    "file": str,
    "rows": int,
    "state": list,
}
_LOCK = "lock"
_SUFFIX = ".arrow"
_FILE = re.compile(r"[0-9a-f]{16}\.arrow\Z")
_HASH, _ROW = "_cdc_key_hash", "_cdc_key_row"
_INDEX = [(_HASH, pa.uint64()), (_ROW, pa.uint32())]
_NO_HASH = np.uint64(2**64 - 1)
"""In place of the hash of a key with a null: such a row is always looked at."""
_SLICED_SHARE = 256
"""A batch is cut at its changed rows if they are fewer than one in so many; else it is copied."""


@dataclass(frozen=True, slots=True)
class CachedRows:
    """A table's current rows at the end of `epoch`, in a mapped file; `rows`: their number.

    `end`: what `_epochs` said of the epoch (`SourceCut.end_of`). `signature`: see `signature_of`.
    The file may be replaced meanwhile: a mapped one can still be read.
    """

    epoch: int
    end: tuple[Any, ...]
    rows: int
    signature: Mapping[str, Any]
    file: pa.RecordBatchFileReader

    def split(self, schema: pa.Schema, keys: TouchedKeys) -> Iterator[tuple[pa.Table, bool]]:
        """Yield all rows, with the columns of a schema, and whether they have one of the keys."""
        for number in range(self.file.num_record_batches):
            batch = self.file.get_batch(number)
            rows = pa.Table.from_batches([batch]).select(schema.names).cast(schema)
            touched = keys.find_rows(batch, rows)
            if len(touched):
                yield rows.take(pa.array(touched)), True
            if len(touched) * _SLICED_SHARE > rows.num_rows:
                is_kept = np.ones(rows.num_rows, bool)
                is_kept[touched] = False
                yield rows.filter(pa.array(is_kept)), False
            else:
                begins = [0, *(touched + 1)]
                for begin, end in zip(begins, [*touched, rows.num_rows], strict=True):
                    if end > begin:
                        yield rows.slice(begin, end - begin), False


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
        with suppress(OSError, pa.ArrowInvalid):
            return self._open(found)
        return None

    def _open(self, meta: Mapping[str, Any]) -> CachedRows | None:
        """Return the entry with its file mapped; None if that was altered since it was written."""
        path = self._folder / meta["file"]
        if _state(path) != meta["state"]:
            return None
        file = pa.ipc.open_file(pa.memory_map(str(path)))
        return CachedRows(meta["epoch"], tuple(meta["end"]), meta["rows"], meta["signature"], file)

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
            path = self._folder / f"{secrets.token_hex(8)}{_SUFFIX}"
            try:
                rows = _write_file(path, batches, schema, signature["key"])
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            meta = {"signature": signature, "epoch": epoch, "end": end}
            meta |= {"file": path.name, "rows": rows, "state": _state(path)}
            replace(self._folder / _META, json.dumps(meta))
            for other in self._folder.glob(f"*{_SUFFIX}"):
                if other != path:
                    other.unlink(missing_ok=True)
            written = self._open(meta)
            if written is None:
                raise OSError(errno.ESTALE, "altered while it was written", str(path))
        return written


def _state(path: Path) -> list[int]:
    """Return what differs once a file was altered: its size in bytes, and its times in ns."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _write_file(
    path: Path, batches: Iterator[pa.RecordBatch], schema: pa.Schema, key: Sequence[str]
) -> int:
    """Write rows with the index of their keys to a new file, durably; return their number."""
    rows = 0
    with create_binary(path) as file:
        indexed = pa.schema([*schema, *_INDEX])
        with pa.ipc.new_file(file, indexed) as writer:
            for batch in batches:
                hashes = _hashes(pa.Table.from_batches([batch]), key)
                order = np.argsort(hashes).astype(np.uint32)
                index = [pa.array(hashes[order]), pa.array(order)]
                columns = [*batch.columns, *index]
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=indexed))
                rows += batch.num_rows
        file.flush()
        os.fsync(file.fileno())
    return rows


def _hashes(rows: pa.Table, key: Sequence[str]) -> Hashes:
    """Return a hash of each row's key; `_NO_HASH` for a key with a null."""
    found = key_hashes(rows, key)
    for name in key:
        if rows[name].null_count:
            found = np.where(rows[name].is_null().to_numpy(), _NO_HASH, found)
    return found


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
        own = {
            name: pa.concat_arrays([*(side[name].cast(kind).combine_chunks() for side in sides)])
            for name, kind in ((n, changes.schema.field(n).type) for n in self._key)
        }
        self._keys = RowKeys([*own.values()])
        self._hashes = np.unique([*_hashes(pa.table(own), key), _NO_HASH])

    def find_rows(self, batch: pa.RecordBatch, rows: pa.Table) -> NDArray[np.int64]:
        """Return the numbers of the rows, ascending, that have one of the keys, or a null in it.

        A null may be a text. `batch`: the rows with the index of their keys.
        """
        hashes, numbers = batch[_HASH].to_numpy(), batch[_ROW].to_numpy()
        begins, ends = (np.searchsorted(hashes, self._hashes, side) for side in ("left", "right"))
        found = [numbers[b:e] for b, e in zip(begins, ends, strict=True) if e > b]
        if not found:
            return np.empty(0, np.int64)
        candidates = np.sort(np.concatenate(found)).astype(np.int64)
        keys = rows.select(self._key).take(pa.array(candidates))
        is_touched = self._keys.find([keys[name] for name in self._key]) >= 0
        for name in self._key:
            is_touched |= keys[name].is_null().to_numpy()
        return candidates[is_touched]


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
