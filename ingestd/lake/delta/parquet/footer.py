"""Reading of a Parquet file's footer: of bounded memory, and never the end of the process.

Any writer of the table's folder decides what it contains, and pyarrow builds all of it before it
compares anything with the schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ingestd.lake.delta.parquet.thrift import BINARY, I32, FootprintError, Shape, Structures
from ingestd.lake.store.paths import OddFileError

MOST_FOOTER_BYTES = 32 << 20
"""1,600 columns in 80 row groups, which is a file of 1 GB, take 19 MB."""
_MOST_BUILT_BYTES = 192 << 20
"""In memory; those take 130 MB."""
_METADATA, _ENCRYPTED = 3, 8
_TYPE, _CODEC, _SIZES = 1, 4, 16
_STATISTICS, _BOUNDS = 12, (1, 2, 5, 6)
_TEXT_SIZE, _LEVELS = 1, (2, 3)
"""Fields of `ColumnChunk`, `ColumnMetaData`, `Statistics` and `SizeStatistics`."""
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_TYPES = (*_WIDTHS, "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
"""In the order of their numbers."""
_CODECS = frozenset(range(8))
_I64 = 6
_COLUMN: Shape = {
    _METADATA: {
        _TYPE: I32,
        2: [I32],
        3: [BINARY],
        _CODEC: I32,
        8: [{}],
        _STATISTICS: dict.fromkeys(_BOUNDS, BINARY),
        13: [{}],
        _SIZES: {2: [_I64], 3: [_I64]},
        17: {2: [I32]},
    },
    _ENCRYPTED: {2: {1: [BINARY]}},
}
_KEY_VALUES: list[Shape] = [{}]
_FOOTER: Shape = {2: [{}], 4: [{1: [_COLUMN], 4: [{}]}], 5: _KEY_VALUES, 7: [{}]}
_ARROW_SCHEMA, _NO_SCHEMA = b"ARROW:schema", b"-----:------"
"""The key under which writers put Arrow's types, in the key-value metadata; and one that is not
read. A name in it may be a megabyte, and any number of columns may have that same name: pyarrow
would copy it for each. All types of a lake are Parquet's."""
_READ_BYTES = 64 << 10
_END_BYTES = 8
"""The footer's length and the magic number."""


def read_metadata(source: pa.NativeFile, path: str) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return a file's metadata without Arrow's types, with as many reads as pyarrow needs.

    Raise OddFileError if it is too large, and whatever pyarrow raises. `path`: shown in errors.
    """
    nbytes = source.size()
    footer = source.read_at(min(nbytes, _READ_BYTES), max(nbytes - _READ_BYTES, 0))
    length = int.from_bytes(footer[-_END_BYTES:][:4], "little") + _END_BYTES
    if len(footer) < length <= nbytes:
        if length > MOST_FOOTER_BYTES:
            raise OddFileError(path, f"has a footer of more than {MOST_FOOTER_BYTES} bytes")
        footer = source.read_at(length, nbytes - length)
    columns = []
    if length <= nbytes:
        structures = Structures(footer[-length:], _MOST_BUILT_BYTES, _COLUMN, _KEY_VALUES)
        try:
            structures.read(0, _FOOTER)
            columns = structures.found
            for place in structures.places:
                footer = _without_arrow_schema(footer, *(at - length for at in place))
        except FootprintError:
            why = f"has a footer that takes more than {_MOST_BUILT_BYTES} bytes in memory"
            raise OddFileError(path, why) from None
        except (IndexError, ValueError):
            raise OddFileError(path, "has a damaged footer") from None
    metadata = pq.read_metadata(pa.BufferReader(footer))
    if not _are_whole(metadata, columns):
        raise OddFileError(path, "has a damaged footer")
    return metadata


def _without_arrow_schema(footer: bytes, begin: int, end: int) -> bytes:
    """Return a footer without Arrow's key between two places, which are counted from its end."""
    values = footer[begin:end].replace(_ARROW_SCHEMA, _NO_SCHEMA)
    return footer[:begin] + values + footer[end:]


def _are_whole(metadata: Any, columns: Sequence[Mapping[int, Any]]) -> bool:  # noqa: ANN401
    """Return whether pyarrow can return each column of a row group; else it ends the process."""
    leaves = [metadata.schema.column(number) for number in range(len(metadata.schema))]
    groups = range(metadata.num_row_groups)
    stated = [c for c in columns if _METADATA in c and _ENCRYPTED not in c]
    if any(metadata.row_group(group).num_columns != len(leaves) for group in groups):
        return False
    return len(stated) == len(leaves) * len(groups) and all(
        column[_METADATA].get(_TYPE) == _TYPES.index(leaf.physical_type)
        and column[_METADATA].get(_CODEC) in _CODECS
        and _has_whole_bounds(leaf, column[_METADATA].get(_STATISTICS, {}))
        and _is_sized(leaf, column[_METADATA].get(_SIZES, {}))
        for leaf, column in zip(leaves * len(groups), stated, strict=True)
    )


def _has_whole_bounds(leaf: Any, statistics: Mapping[int, int]) -> bool:  # noqa: ANN401 - pyarrow's
    """Return whether a column's bounds, if it has any, are as long as its values."""
    width = _WIDTHS.get(leaf.physical_type, leaf.length)
    return all(statistics.get(field, width) >= width for field in _BOUNDS)


def _is_sized(leaf: Any, sizes: Mapping[int, int]) -> bool:  # noqa: ANN401 - pyarrow has no types
    """Return whether a column's statistics of sizes have the numbers that its schema demands."""
    if _TEXT_SIZE in sizes and leaf.physical_type != "BYTE_ARRAY":
        return False
    repeated, defined = (sizes.get(field, 0) for field in _LEVELS)
    return repeated in {0, leaf.max_repetition_level + 1} and defined in {
        0,
        leaf.max_definition_level + 1,
    }
