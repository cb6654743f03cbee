"""Limits on the nesting of a log's files: deltalake overflows its stack, which ends the process.

Measured with deltalake 1.6, whose threads have 2 MB of stack: it dies of 3,000 levels of a Parquet
schema, and of 28,000 levels of JSON (not of 24,000), in a field of another type or in a file's
statistics, also those in a checkpoint. No action that ingestd or Spark writes has 20 levels. Its
parser of JSON is lax: values need no line of their own, and a string may contain a newline. So
either a file has too few brackets to be nested deep however they are read, or each of its lines
must be strict JSON.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from itertools import product

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ingestd.lake.store.paths import OddFileError
from ingestd.model.recorded import RecordError, ensure_depth

MOST_DEPTH = 100
"""Of JSON; pyarrow has the same limit for the schema of a Parquet file."""
MOST_LINE_BYTES = 4 << 20
"""Maximum size of one action: the metadata of 1,600 columns takes 0.9 MB."""
FEW_BRACKETS = 4096
"""So many can't be nested too deep for deltalake. A commit of few files has fewer bytes."""
_ESCAPED = "\\u00"
"""The first part of an escaped bracket: statistics are JSON in a string."""
_SIDECAR = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]*\.parquet\Z")
_STATISTICS = "add.stats"
_SIDECAR_PATH = "sidecar.path"
_PARSED = "_parsed."
"""In columns that repeat statistics and partition values; they are not read."""
_ROWS_AT_ONCE, _BATCH_BYTES = 1 << 10, 16 << 20
_ROWS_LOOKED_AT = 1 << 14
_BUFFER_BYTES = 1 << 20
_VALUE_BYTES = 8
_MOST_ROW_GROUPS = 1000
_FEW_BYTES, _MOST_RATIO, _MOST_UNPACKED_BYTES = 64 << 20, 256, 8 << 30
"""A path has 16 random bytes; statistics have 20 kB at most, and differ between most files."""


class NotJsonError(OddFileError):
    """A line that is truncated or not UTF-8."""


def ensure_shallow_json(content: bytes, path: str) -> None:
    """Raise OddFileError for a commit that is nested too deep, or may be as it is not JSON."""
    if sum(map(content.count, (b"[", b"{", _ESCAPED.encode()))) > FEW_BRACKETS:
        for _ in _fields(content, path):
            pass


def ensure_shallow_checkpoint(content: bytes, path: str) -> set[str]:
    """Check a JSON checkpoint as a commit; return the names of its sidecars."""
    found = (v for kind, k, v in _fields(content, path) if (kind, k) == ("sidecar", "path"))
    return {_ensure_sidecar(name, path) for name in found}


def _fields(content: bytes, path: str) -> Iterator[tuple[str, str, object]]:
    """Yield kind, name and value of each action's fields, also of repeated names."""
    for number, line in enumerate(io.BytesIO(content), 1):
        if len(line) > MOST_LINE_BYTES:
            raise OddFileError(path, f"has a line of more than {MOST_LINE_BYTES} bytes")
        if not line.strip():
            continue
        try:
            text = line.decode()
            _ensure_shallow(text)
            found = json.loads(text, object_pairs_hook=tuple)
            for kind, action in found if isinstance(found, tuple) else ():
                for name, value in action if isinstance(action, tuple) else ():
                    if name == "stats" and isinstance(value, str):
                        _ensure_shallow(value)
                    yield kind, name, value
        except RecordError as error:
            raise OddFileError(path, f"is not a file of a log: line {number}: {error}") from None
        except (json.JSONDecodeError, UnicodeDecodeError):  # quotes values
            raise NotJsonError(path, f"is not a file of a log: line {number} is not JSON") from None
        except (ValueError, RecursionError):  # thousands of digits
            what = f"is not a file of a log: line {number} is not readable JSON"
            raise OddFileError(path, what) from None


def _ensure_shallow(text: str) -> None:
    """Raise RecordError."""
    if sum(map(text.count, ("[", "{"))) > FEW_BRACKETS:
        ensure_depth(text, MOST_DEPTH)


def ensure_shallow_parquet(source: pa.NativeFile, path: str) -> set[str]:
    """Return the names of a checkpoint's sidecars. Raise OddFileError if it is nested too deep.

    It is also raised if its content is far larger than the file. `source`: the file at `path`. Its
    schema is limited by pyarrow.
    """
    names: set[str] = set()
    try:
        longest = _longest_repeated(source, path)
        with _opened(source) as file:
            room = _Room(path, source.size())
            room.take(file.metadata.num_rows * len(file.schema) * _VALUE_BYTES)
            few = {c for c, n in longest.items() if n * file.metadata.num_rows <= _FEW_BYTES}
            for column in longest.keys() - few | longest.keys() & {_STATISTICS, _SIDECAR_PATH}:
                count = max(min(_BATCH_BYTES // max(longest[column], 1), _ROWS_AT_ONCE), 1)
                for batch in file.iter_batches(count, columns=[column], use_threads=False):
                    room.take(_unpacked_bytes(batch))
                    if column == _SIDECAR_PATH:
                        found = _texts(batch, column).unique().drop_null().to_pylist()
                        names |= {_ensure_sidecar(name, path) for name in found}
                    elif column == _STATISTICS:
                        _ensure_shallow_texts(_texts(batch, column))
    except RecordError as error:
        raise OddFileError(path, f"is not a checkpoint: its statistics: {error}") from None
    except (OSError, pa.ArrowException, LookupError, ValueError, TypeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        what = "is not a checkpoint: it is damaged, or its schema is nested too deep"
        raise OddFileError(path, what) from error
    return names


class _Room:
    """What a checkpoint may take in memory: in Parquet, a value's repetitions take no bytes."""

    def __init__(self, path: str, file_bytes: int) -> None:
        self._path = path
        self._left = min(_FEW_BYTES + _MOST_RATIO * file_bytes, _MOST_UNPACKED_BYTES)

    def take(self, nbytes: int) -> None:
        """Raise OddFileError."""
        self._left -= nbytes
        if self._left < 0:
            raise OddFileError(self._path, "is not a checkpoint: it unpacks to far more than it is")


def _opened(source: pa.NativeFile, repeated: Sequence[str] = ()) -> pq.ParquetFile:
    """Open a file; `repeated`: columns whose distinct values are read with references to them."""
    return pq.ParquetFile(
        source, read_dictionary=repeated, buffer_size=_BUFFER_BYTES, pre_buffer=False
    )


def _longest_repeated(source: pa.NativeFile, path: str) -> dict[str, int]:
    """Return the length of the longest text that a column repeats, by "action.field".

    A dictionary is found by reading a column up to its first values. Raise OddFileError.
    """
    with _opened(source) as file:
        leaves = [file.schema.column(i) for i in range(len(file.schema))]
        if len({leaf.path for leaf in leaves}) < len(leaves):
            raise OddFileError(path, "is not a checkpoint: it has a column twice")
        groups = file.metadata.num_row_groups
        if groups > _MOST_ROW_GROUPS:
            raise OddFileError(path, f"is not a checkpoint: it has {groups} row groups")
    texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
    texts = [leaf for leaf in texts if _PARSED not in leaf]
    columns = {".".join(leaf.split(".")[:2]) for leaf in texts}
    longest = dict.fromkeys(columns, 0)
    with _opened(source, texts) as file:
        for column, group in product(columns, range(groups)):
            batches = file.iter_batches(
                _ROWS_LOOKED_AT, [group], columns=[column], use_threads=False
            )
            for batch in batches:
                lengths = [pc.binary_length(a.dictionary) for a in _repeated_texts(batch)]
                found = [pc.max(each).as_py() for each in lengths]
                longest[column] = max(longest[column], *(n or 0 for n in found), 0)
                if None not in found:
                    break
    return longest


def _unpacked_bytes(batch: pa.RecordBatch) -> int:
    lengths = (pc.binary_length(a.dictionary).take(a.indices) for a in _repeated_texts(batch))
    nbytes: int = batch.nbytes + sum(pc.sum(each).as_py() or 0 for each in lengths)
    return nbytes


def _repeated_texts(batch: pa.RecordBatch) -> Iterator[pa.DictionaryArray]:
    """Yield the columns, also inside others, that are references to distinct values."""
    pending = list(batch.columns)
    while pending:
        array = pending.pop()
        kind = array.type
        if pa.types.is_dictionary(kind):
            yield array
        elif pa.types.is_map(kind):
            pending += [array.keys, array.items]
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            pending.append(array.values)
        elif pa.types.is_struct(kind):
            pending += [array.field(n) for n in range(kind.num_fields)]


def _texts(batch: pa.RecordBatch, leaf: str) -> pa.Array:
    column, _, field = leaf.partition(".")
    return pc.struct_field(batch.column(column), field).cast(pa.large_string())


def _ensure_shallow_texts(texts: pa.Array) -> None:
    """Raise RecordError."""
    for text in texts.filter(pc.greater(pc.binary_length(texts), FEW_BRACKETS)).to_pylist():
        _ensure_shallow(text)


def _ensure_sidecar(name: object, path: str) -> str:
    if not isinstance(name, str) or not _SIDECAR.match(name):
        raise OddFileError(path, "names a file outside of its log as a part of it")
    return name
