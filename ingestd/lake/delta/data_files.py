"""A reader of Parquet data files in batches of bounded memory, whatever a file contains.

A writer of the table's folder decides what a file has and says of itself. Kilobytes of it may be
gigabytes of rows: a run-length has any number of equal values, a dictionary repeats a long text,
and pages are compressed. So a batch has as many rows as fit into BATCH_BYTES if each had the
longest value that its column may have; and a file is refused (OddFileError: the table's fault) if
a part of it that must be decoded at once is too large, or if its rows never end.

Other sizes in a footer are believed: that a page is not larger than its column, and is encoded as
stated. Source: Parquet format, "Encodings" and `ColumnMetaData`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ingestd.lake.delta.arrow_types import plain
from ingestd.lake.delta.parquet.footer import read_metadata
from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.paths import OddFileError
from ingestd.lake.store.store import Store

BATCH_ROWS = 1 << 15
BATCH_BYTES = 16 << 20
"""Limits of a batch: at most this many rows, and fewer if they are large."""
MOST_FIXED_BYTES = 128 << 20
MOST_TEXT_BYTES = 1 << 30
"""Of a column in a row group, decompressed, if that is over DENSE times its size in the file. A
text of Postgres has less than 1 GB; ingestd's row groups have 16 MB, Spark's 128 MB."""
DENSE = 100
MOST_FILE_BYTES = 4 << 30
MOST_RATIO = 10_000
"""Rows of a file are decoded up to MOST_FILE_BYTES, or to MOST_RATIO times its size."""
_IN_PARTS = {"buffer_size": 1 << 20, "pre_buffer": False}
"""Options to read the columns of a file piece by piece. By default a column of a row group is held
in full."""
_MOST_BUFFERED_BYTES = 16 << 20
"""Of a row group in an object store: so much is requested at once."""
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
_OFFSET_BYTES = 8
_DICTIONARIES = frozenset({"PLAIN_DICTIONARY", "RLE_DICTIONARY"})
_PREFIXES = "DELTA_BYTE_ARRAY"
"""This encoding repeats the beginning of the value before."""


@contextmanager
def open_parquet(store: Store, path: str, rows: object = None) -> Iterator[DataFileReader]:
    """Open a data file; faults while it is read name it. Raise FolderError.

    `rows`: a file with another number of rows is refused; None: `verify` has to name what it lacks.
    """
    with storage_faults(store.uri(path)), store.open(path) as source:
        yield DataFileReader(source, store.uri(path), rows, is_remote=not store.syncs)


class DataFileReader:
    """An open data file. `path`: shown in errors. Raises OddFileError if it is not believed."""

    def __init__(
        self,
        source: pa.NativeFile,
        path: str,
        rows: object = None,
        *,
        is_remote: bool = False,
        most_bytes: int = MOST_FILE_BYTES,
    ) -> None:
        self._source = source
        self._path = path
        self._nbytes = source.size()
        self._decoded_bytes = 0
        self._most_bytes = max(most_bytes, MOST_RATIO * self._nbytes)
        self.metadata: Any = read_metadata(source, path)
        self._ensure_rows(rows)
        groups = (self.metadata.row_group(i) for i in range(self.metadata.num_row_groups))
        is_buffered = is_remote and all(
            sum(chunk.total_compressed_size for chunk in _chunks(group)) <= _MOST_BUFFERED_BYTES
            for group in groups
        )
        self._options = {} if is_buffered else _IN_PARTS
        self._file = self._open(**self._options)
        self._leaves = [self._file.schema.column(i) for i in range(len(self._file.schema))]

    def _open(self, **options: Any) -> pq.ParquetFile:  # noqa: ANN401 - of ParquetFile
        # Spark writes timestamps as INT96. By default they are read in nanoseconds, which silently
        # corrupts those before 1677 and after 2262.
        return pq.ParquetFile(
            self._source, metadata=self.metadata, coerce_int96_timestamp_unit="us", **options
        )

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema."""
        return self._file.schema_arrow

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return int(self.metadata.num_rows)

    @property
    def num_row_groups(self) -> int:
        """The number of row groups."""
        return int(self.metadata.num_row_groups)

    def bounds(self, group: int, column: str) -> tuple[object, object]:
        """Return the lowest and highest value of a column in a row group; None if unknown."""
        if column not in [leaf.path for leaf in self._leaves]:
            return None, None
        index = [leaf.path for leaf in self._leaves].index(column)
        found = self.metadata.row_group(group).column(index).statistics
        if found is None or not found.has_min_max:
            return None, None
        try:
            return found.min, found.max
        except (ArithmeticError, ValueError):  # a date after 9999, a text that is none
            return None, None

    def batches(
        self,
        names: Sequence[str] | None = None,
        group: int | None = None,
        *,
        most_rows: int = BATCH_ROWS,
    ) -> Iterator[pa.RecordBatch]:
        """Yield these columns (or leaves of them) in order, of one row group or of all, `plain`.

        Raise OddFileError.
        """
        columns = list(dict.fromkeys(self.schema.names if names is None else names))
        for number in range(self.num_row_groups) if group is None else [group]:
            count = self._batch_rows(number, columns, most_rows)
            for found in self._file.iter_batches(
                count, row_groups=[number], columns=columns, use_threads=False
            ):
                batch = plain(found)
                self._decoded_bytes += max(batch.nbytes, batch.num_rows)
                if self._decoded_bytes > self._most_bytes:
                    raise self._refused(f"has more than {self._decoded_bytes} bytes of rows")
                yield batch

    def _batch_rows(self, number: int, names: Collection[str], most_rows: int) -> int:
        """Return how many rows of a row group fit into BATCH_BYTES, however long each is."""
        group = self.metadata.row_group(number)
        rows = max(1, group.num_rows)
        most_rows = min(most_rows, rows)
        chunks = [
            (leaf, chunk)
            for leaf, chunk in zip(self._leaves, _chunks(group), strict=True)
            if _is_of(leaf.path, names)
        ]
        times = Counter(leaf.path for leaf, _ in chunks)  # names have dots
        unknown = [
            leaf.path for leaf, chunk in chunks if times[leaf.path] == 1 and _has_dictionary(chunk)
        ]
        widths = [_width(leaf, chunk) for leaf, chunk in chunks]
        if unknown and _fitting(chunks, widths, rows) < most_rows:
            longest = self._longest(number, unknown)
            widths = [
                longest.get(leaf.path, w) for (leaf, _), w in zip(chunks, widths, strict=True)
            ]
        for (leaf, chunk), width in zip(chunks, widths, strict=True):
            self._ensure_chunk(leaf, chunk, width)
        return max(1, min(most_rows, _fitting(chunks, widths, rows)))

    def _longest(self, group: int, leaves: Sequence[str]) -> dict[str, int]:
        """Return the most bytes that a value has by the dictionaries of these leaves."""
        with self._open(read_dictionary=list(leaves), **self._options) as file:
            first = next(file.iter_batches(1, row_groups=[group], columns=list(leaves)), None)
        if first is None:
            return {}
        found = {}
        for leaf in leaves:
            values = _dictionary_of(first, leaf)
            if values is not None and len(values) and _has_lengths(values.type):
                found[leaf] = int(pc.max(pc.binary_length(values)).as_py() or 0) + _OFFSET_BYTES
        return found

    def _ensure_rows(self, stated: object) -> None:
        metadata = self.metadata
        if stated is not None and metadata.num_rows != stated:
            raise self._refused(f"has {metadata.num_rows} rows, but {stated} by the table's log")
        sizes = (metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        if sum(sizes) != metadata.num_rows:
            raise self._refused("has other rows than its footer says")

    def _ensure_chunk(self, leaf: Any, chunk: Any, width: int) -> None:  # noqa: ANN401 - pyarrow's
        """Raise OddFileError if a part that is decoded at once is too large."""
        most = MOST_TEXT_BYTES if leaf.physical_type == "BYTE_ARRAY" else MOST_FIXED_BYTES
        nbytes = chunk.total_uncompressed_size
        if leaf.max_repetition_level > 0:  # one row may have all of the values
            nbytes = max(nbytes, chunk.num_values * min(width, most))
        if nbytes > max(most, DENSE * chunk.total_compressed_size):
            raise self._refused(
                f"has the column {leaf.path!a} with {nbytes} bytes in {chunk.total_compressed_size}"
            )

    def _refused(self, why: str) -> OddFileError:
        return OddFileError(self._path, why)


def _chunks(group: Any) -> list[Any]:  # noqa: ANN401 - pyarrow has no types
    return [group.column(i) for i in range(group.num_columns)]


def _width(leaf: Any, chunk: Any) -> int:  # noqa: ANN401 - pyarrow has no types
    """Return the most bytes that a value takes; of a text, as far as the footer states it."""
    if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY":
        return int(leaf.length)
    if leaf.physical_type != "BYTE_ARRAY":
        return _WIDTHS.get(leaf.physical_type, _OFFSET_BYTES)
    if _has_dictionary(chunk) or _PREFIXES in chunk.encodings:
        return int(chunk.total_uncompressed_size) + _OFFSET_BYTES
    return _OFFSET_BYTES  # the file has each value in full


def _has_dictionary(chunk: Any) -> bool:  # noqa: ANN401 - pyarrow has no types
    is_text = chunk.physical_type == "BYTE_ARRAY"
    return is_text and not _DICTIONARIES.isdisjoint(chunk.encodings)


def _fitting(chunks: Sequence[tuple[Any, Any]], widths: Sequence[int], rows: int) -> int:
    row_bytes = sum(
        max(chunk.total_uncompressed_size // rows, -(-chunk.num_values // rows) * width)
        for (_, chunk), width in zip(chunks, widths, strict=True)
    )
    return int(BATCH_BYTES // max(1, row_bytes))


def _dictionary_of(rows: pa.RecordBatch | pa.StructArray, leaf: str) -> pa.Array | None:
    """Return the dictionary of a leaf of these columns; None if it is not found."""
    is_batch = isinstance(rows, pa.RecordBatch)
    fields = rows.schema if is_batch else rows.type
    for field in sorted(fields, key=lambda field: -len(field.name)):
        if leaf == field.name or leaf.startswith(f"{field.name}."):
            array = rows.column(field.name) if is_batch else pc.struct_field(rows, field.name)
            return _dictionary(array, leaf.removeprefix(field.name).removeprefix("."))
    return None


def _dictionary(array: pa.Array, leaf: str) -> pa.Array | None:
    """Return the dictionary of a leaf inside a column; None if it is not found."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return None if leaf else array.dictionary
    if pa.types.is_struct(kind):
        return _dictionary_of(array, leaf)
    _, element, inner = (*leaf.split(".", 2), "", "")[:3]  # the first is the group that repeats
    if pa.types.is_map(kind):
        return _dictionary(array.keys if element == "key" else array.items, inner)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _dictionary(array.values, inner)
    return None


def _has_lengths(kind: pa.DataType) -> bool:
    texts = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(texts or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_of(leaf: str, names: Collection[str]) -> bool:
    """Return whether a leaf, as ``a.list.element``, is in one of these columns; names have dots."""
    parts = leaf.split(".")
    return any(".".join(parts[:end]) in names for end in range(1, len(parts) + 1))
