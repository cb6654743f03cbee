"""What the files of a log may take in memory and in time, before deltalake reads them.

A value's repetitions take no bytes in a Parquet file: a run-length has any number of equal values,
also of empty ones, a dictionary repeats a long text, and pages are compressed. deltalake reads any
column, whatever its name, so each is bounded, over all files of a log together: by the pages that
it has and the values in them, and texts that are repeated by their lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ingestd.lake.delta.parquet.footer import read_metadata
from ingestd.lake.delta.parquet.pages import ColumnPages, pages_of
from ingestd.lake.store.paths import OddFileError

MOST_PARTS = 200_000
"""Pages, and columns of row groups, of a log: 10 microseconds each. 4,800 columns of statistics
have 15,000 in a file of one row group."""
_FILE_PARTS, _BATCH_PARTS = 100, 5
"""A file that is opened, and a batch of values that is read, take as long as so many pages."""
_FEW_BYTES, _MOST_RATIO, _MOST_BYTES = 64 << 20, 256, 8 << 30
"""A path has 16 random bytes; statistics have 20 kB at most, and differ between most files."""
_VALUE_BYTES = 8
_BATCH_BYTES = 16 << 20
_BATCH_ROWS, _FIRST_ROWS = 1 << 14, 1 << 8
_FEW_REPEATED_BYTES = 4 << 10
_BUFFER_BYTES = 1 << 20


class Room:
    """What the files of a log may still take."""

    def __init__(self, parts: int = MOST_PARTS) -> None:
        self._parts = parts
        self._granted = _FEW_BYTES
        self._left = _FEW_BYTES

    def admit(self, path: str, file_bytes: int, parts: int = 0) -> None:
        """Count a file, whose content may take a multiple of its size. Raise OddFileError."""
        more = min(_MOST_RATIO * file_bytes, _MOST_BYTES - self._granted)
        self._granted += more
        self._left += more
        self.take(path, 0, _FILE_PARTS + parts)

    def take(self, path: str, nbytes: int, parts: int = 0) -> None:
        """Raise OddFileError."""
        self._left -= nbytes
        self._parts -= parts
        if self._left < 0:
            raise OddFileError(path, "is not a checkpoint: it unpacks to far more than it is")
        if self._parts < 0:
            why = "is not a checkpoint: the log's have more columns and pages than any log"
            raise OddFileError(path, why)


class SizedCheckpoint:
    """A checkpoint, or a part of one, whose content fits into the room of its log.

    Raise OddFileError if it does not, and what pyarrow raises, LookupError or ValueError if it is
    damaged. `source`: the file at `path`.
    """

    def __init__(self, source: pa.NativeFile, path: str, room: Room) -> None:
        self._source = source
        self._path = path
        self._room = room
        room.admit(path, source.size())
        self._metadata = read_metadata(source, path)
        self._groups = range(self._metadata.num_row_groups)
        schema = self._metadata.schema
        leaves = [schema.column(number) for number in range(len(schema))]
        self._pages: dict[str, list[ColumnPages]] = {}
        for number, leaf in enumerate(leaves):
            self._pages[leaf.path] = self._sized(number, leaf)
        if len(self._pages) < len(leaves):
            raise OddFileError(path, "is not a checkpoint: it has a column twice")
        texts = [leaf for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        self._texts = [leaf.path for leaf in texts]
        self._longest = {
            leaf.path: [
                self._repeated(leaf.path, group, is_flat=leaf.max_repetition_level == 0)
                for group in self._groups
            ]
            for leaf in texts
        }

    def texts(self, name: str) -> Iterator[pa.Array]:
        """Yield the distinct texts of a column, "action.field", batch by batch; none without it."""
        field = name.rpartition(".")[2]
        for group, longest in enumerate(self._longest.get(name, ())):
            for batch in self._batches(name, group, longest):
                yield _distinct(pc.struct_field(batch.column(0), field)).cast(pa.large_string())

    def _sized(self, number: int, leaf: Any) -> list[ColumnPages]:  # noqa: ANN401 - pyarrow's
        """Return the pages of a column in each row group, for which there is room."""
        width = max(_VALUE_BYTES, leaf.length)

        def take(values: int, nbytes: int) -> None:
            self._room.take(self._path, values * width + nbytes, 1)

        found = []
        for group in self._groups:
            take(0, 0)
            column = self._metadata.row_group(group).column(number)
            found.append(pages_of(self._source, column, take))
        return found

    def _repeated(self, name: str, group: int, *, is_flat: bool) -> int:
        """Take what texts take that are repeated, each time; return the length of the longest."""
        pages = self._pages[name][group]
        longest = pages.dictionary_bytes if pages.references else 0
        if pages.references * longest > _FEW_REPEATED_BYTES:
            if pages.has_references_alone:
                for batch in self._batches(name, group, longest):
                    self._room.take(self._path, sum(map(_referred_bytes, _innermost(batch))))
                return longest
            longest = self._dictionary_longest(name, group)
        if not pages.prefixed:
            self._room.take(self._path, pages.references * longest)
            return longest
        longest = max(longest, pages.longest_page_bytes)
        at_once = longest * (1 if is_flat else pages.values)  # a row may have all of the values
        if at_once <= _BATCH_BYTES << 2:
            for batch in self._batches(name, group, longest):
                self._room.take(self._path, batch.nbytes)
        else:
            self._room.take(self._path, pages.values * longest)
        return longest

    def _dictionary_longest(self, name: str, group: int) -> int:
        """Return the length of the longest text in a dictionary, which comes with a value."""
        seen = 0
        for batch in self._read(name, group, _FIRST_ROWS, as_references=True):
            for column in _innermost(batch):
                if not pa.types.is_dictionary(column.type):
                    return _VALUE_BYTES  # decimals
                if len(column.dictionary):
                    return int(pc.max(pc.binary_length(column.dictionary)).as_py() or 0)
            seen += batch.num_rows
            if seen >= self._pages[name][group].references:
                break
        return 0

    def _batches(self, name: str, group: int, longest: int) -> Iterator[pa.RecordBatch]:
        """Yield a column of texts in batches of bounded memory, as references if all are."""
        pages = self._pages[name][group]
        if pages.has_references_alone:
            return self._read(name, group, _BATCH_ROWS, as_references=True)
        rows = _BATCH_ROWS
        if longest:
            rows = min(rows, _BATCH_BYTES // longest)
        if pages.text_bytes > _BATCH_BYTES:  # two pages at least
            fitting = max(_BATCH_BYTES // pages.longest_page_bytes - 2, 1)
            rows = min(rows, fitting * pages.fewest_values)
        return self._read(name, group, max(rows, 1))

    def _read(
        self, name: str, group: int, rows: int, *, as_references: bool = False
    ) -> Iterator[pa.RecordBatch]:
        file = self._referring if as_references else self._plain
        for batch in file.iter_batches(rows, [group], columns=[name], use_threads=False):
            self._room.take(self._path, 0, _BATCH_PARTS)
            yield batch

    @cached_property
    def _referring(self) -> pq.ParquetFile:
        return self._opened(self._texts)

    @cached_property
    def _plain(self) -> pq.ParquetFile:
        return self._opened([])

    def _opened(self, repeated: Sequence[str]) -> pq.ParquetFile:
        """Open the file; `repeated`: columns whose values are read as references."""
        return pq.ParquetFile(
            self._source,
            metadata=self._metadata,
            read_dictionary=repeated,
            buffer_size=_BUFFER_BYTES,
            pre_buffer=False,
        )


def _innermost(batch: pa.RecordBatch) -> Iterator[pa.Array]:
    """Yield the columns inside others that have values."""
    pending = list(batch.columns)
    while pending:
        array = pending.pop()
        kind = array.type
        if pa.types.is_map(kind):
            pending += [array.keys, array.items]
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            pending.append(array.values)
        elif pa.types.is_struct(kind):
            pending += array.flatten()  # where the struct is null, so are its fields
        else:
            yield array


def _referred_bytes(array: pa.Array) -> int:
    if not pa.types.is_dictionary(array.type):
        return int(array.nbytes)  # decimals
    lengths = pc.binary_length(array.dictionary).cast(pa.int64())
    return int(pc.sum(lengths.take(array.indices)).as_py() or 0)


def _distinct(array: pa.Array) -> Any:  # noqa: ANN401 - pyarrow has no types
    return array.dictionary if pa.types.is_dictionary(array.type) else array
