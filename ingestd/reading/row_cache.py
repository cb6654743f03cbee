"""Current rows of tables at one epoch each, kept as Parquet outside the lake.

A later read takes them from here, and from the lake only the changes since. An entry is one file
and `cache.json`, which is replaced last. It is used only for the epoch, columns and key it names.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ingestd.lake.delta.data_files import open_parquet
from ingestd.lake.fold.row_keys import RowKeys
from ingestd.lake.layout import Layout
from ingestd.lake.reference.raw_changes import KeepGroup
from ingestd.lake.store.store import open_store
from ingestd.model.changes import SNAPSHOT
from ingestd.model.errors import OperatorError
from ingestd.model.schema import TableId
from ingestd.process.file_creation import create_binary, make_private_folder, replace
from ingestd.reading.output_columns import OutputColumn
from ingestd.reading.raw_files import old_keys

_FORMAT = 1
_META = "cache.json"
_FILE = re.compile(r"[0-9a-f]{16}\.parquet\Z")


@dataclass(frozen=True, slots=True)
class CachedRows:
    """A table's current rows at the end of `epoch`, in the file `path`; `rows`: their number.

    `end`: what `_epochs` said of the epoch (`SourceCut.end_of`).
    """

    path: Path
    epoch: int
    end: tuple[Any, ...]
    rows: int

    def tables(self, schema: pa.Schema, keep: KeepGroup | None) -> Iterator[pa.Table]:
        """Yield the rows in batches, with the columns of a schema."""
        store = open_store(str(self.path.parent), None)
        with open_parquet(store, self.path.name, self.rows) as file:
            for group in range(file.num_row_groups):
                if keep is None or keep(file, group):
                    for batch in file.batches(schema.names, group):
                        yield pa.Table.from_batches([batch]).select(schema.names).cast(schema)


class TableCache:
    """The entry of one table. `lake`: its id. Raises OperatorError if the folder can't be used."""

    def __init__(self, root: str, lake: str, source: str, table: TableId) -> None:
        self._root = Path(root)
        self._lake = hashlib.sha256(lake.encode()).hexdigest()[:16]
        self._folder = self._root / self._lake / Layout(source).raw(table)

    def find(self, signature: Mapping[str, Any]) -> CachedRows | None:
        """Return the rows, if they have this signature."""
        found = self._read_meta()
        if found.get("signature") != signature:
            return None
        path = self._folder / found["file"]
        if not path.is_file():
            return None
        return CachedRows(path, found["epoch"], tuple(found["end"]), found["rows"])

    def _read_meta(self) -> dict[str, Any]:
        """Return what the entry says of itself; nothing if it is missing or damaged."""
        with suppress(OSError, ValueError):
            found = json.loads((self._folder / _META).read_bytes())
            if isinstance(found, dict) and _FILE.match(str(found.get("file"))):
                return found
        return {}

    def write(
        self,
        signature: Mapping[str, Any],
        epoch: int,
        end: Sequence[Any],
        batches: Iterator[pa.RecordBatch],
        schema: pa.Schema,
    ) -> CachedRows:
        """Replace the entry with these rows. The file of the previous one is kept for readers."""
        try:
            return self._write(signature, epoch, end, batches, schema)
        except OSError as error:
            raise OperatorError(
                f"cache {self._folder}: {error.strerror or error}",
                remedy="choose another folder for `cache`, or read without one",
            ) from error

    def _write(
        self,
        signature: Mapping[str, Any],
        epoch: int,
        end: Sequence[Any],
        batches: Iterator[pa.RecordBatch],
        schema: pa.Schema,
    ) -> CachedRows:
        make_private_folder(self._root)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        previous = self._read_meta().get("file")
        path = self._folder / f"{secrets.token_hex(8)}.parquet"
        rows = 0
        try:
            with create_binary(path) as file, pq.ParquetWriter(file, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
                    rows += batch.num_rows
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        meta = {"signature": signature, "epoch": epoch, "end": end, "file": path.name, "rows": rows}
        replace(self._folder / _META, json.dumps(meta))
        for other in self._folder.glob("*.parquet"):
            if other.name not in {path.name, previous}:
                other.unlink(missing_ok=True)
        return CachedRows(path, epoch, tuple(end), rows)


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
