"""Reading of a Parquet file's footer, of bounded memory whatever it contains.

Any writer of the table's folder decides what it contains, and pyarrow builds all of it before it
compares anything with the schema.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ingestd.lake.delta.parquet.thrift import FootprintError, Structures
from ingestd.lake.store.paths import OddFileError

MOST_FOOTER_BYTES = 32 << 20
"""1,600 columns in 80 row groups, which is a file of 1 GB, take 19 MB."""
_MOST_BUILT_BYTES = 192 << 20
"""In memory; those take 130 MB."""
_SMALL_BYTES = 256 << 10
"""A footer of so many bytes takes 70 MB at most."""
_READ_BYTES = 64 << 10
_END_BYTES = 8
"""The footer's length and the magic number."""


def read_metadata(source: pa.NativeFile, path: str) -> Any:  # noqa: ANN401 - pyarrow has no types
    """Return a file's metadata, with as many reads as pyarrow needs.

    Raise OddFileError if it is too large, and whatever pyarrow raises. `path`: shown in errors.
    """
    nbytes = source.size()
    footer = source.read_at(min(nbytes, _READ_BYTES), max(nbytes - _READ_BYTES, 0))
    length = int.from_bytes(footer[-_END_BYTES:][:4], "little") + _END_BYTES
    if len(footer) < length <= nbytes:
        if length > MOST_FOOTER_BYTES:
            raise OddFileError(path, f"has a footer of more than {MOST_FOOTER_BYTES} bytes")
        footer = source.read_at(length, nbytes - length)
    if _SMALL_BYTES < length <= nbytes:
        try:
            Structures(footer, _MOST_BUILT_BYTES).read(0)
        except FootprintError:
            why = f"has a footer that takes more than {_MOST_BUILT_BYTES} bytes in memory"
            raise OddFileError(path, why) from None
        except (IndexError, ValueError):
            raise OddFileError(path, "has a damaged footer") from None
    return pq.read_metadata(pa.BufferReader(footer))
