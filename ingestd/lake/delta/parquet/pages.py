"""The pages of a column in a row group, by their headers.

A reader decodes what the pages' headers say; the footer may say something else. Source: Parquet
format, "Data Pages" and `PageHeader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ingestd.lake.delta.parquet.thrift import BOOL, I32, Shape, Structures

_SMALL_BYTES, _MOST_HEADER_BYTES = 8 << 10, 16 << 20
_KIND, _UNPACKED, _PACKED = 1, 2, 3
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_HEADERS = {_DATA: (5, 2), _DATA_V2: (8, 4)}
"""For each kind of data page: the fields of its header, and of the encoding in that."""
_VALUES = 1
_LEVELS, _IS_COMPRESSED = (5, 6), 7
_HEADER: Shape = {
    _KIND: I32,
    _UNPACKED: I32,
    _PACKED: I32,
    5: {_VALUES: I32, 2: I32},
    7: {_VALUES: I32},
    8: {_VALUES: I32, 4: I32, 5: I32, 6: I32, _IS_COMPRESSED: BOOL},
}
_UNLIMITED = {"GZIP": "gzip", "BROTLI": "brotli"}
"""Codecs with which deltalake unpacks a page whatever its header says, and compares afterwards."""
_PIECE_BYTES = 1 << 20
_FROM_DICTIONARY = frozenset({2, 8})
_DELTA_TEXTS = 7
"""DELTA_BYTE_ARRAY: repeats the beginning of the value before."""

Take = Callable[[int, int], None]
"""Called with the values and the bytes of each page; raises OddFileError if it is too much."""


@dataclass(slots=True)
class ColumnPages:
    """The sums over the data pages of a column in a row group. Values include nulls."""

    values: int = 0
    dictionary_bytes: int = 0
    """Decompressed, as all sizes here."""
    references: int = 0
    """Values that are references to the dictionary; their pages come first."""
    prefixed: int = 0
    """Values that repeat the beginning of the value before."""
    text_bytes: int = 0
    """Of pages with other values."""
    longest_page_bytes: int = 0
    """Of those."""
    fewest_values: int = 0
    """Of those but the last; 0 with fewer than two."""

    @property
    def has_references_alone(self) -> bool:
        """Return whether all values are references."""
        return self.references == self.values


def pages_of(source: pa.NativeFile, chunk: Any, take: Take) -> ColumnPages:  # noqa: ANN401
    """Read the headers of a column's pages, and call `take` for each.

    Raise LookupError or ValueError if they are damaged. `chunk`: pyarrow's metadata of the column.
    """
    found = ColumnPages()
    last = 0
    for header in _headers(source, chunk, take):
        nbytes, kind = header[_UNPACKED], header[_KIND]
        if kind == _DICTIONARY:
            found.dictionary_bytes += nbytes
        if kind not in _HEADERS:
            continue
        values, encoding = _stated(header)
        found.values += values
        if encoding in _FROM_DICTIONARY:
            found.references += values
            if found.text_bytes:
                msg = "references to a dictionary after other values"
                raise ValueError(msg)
            continue
        found.text_bytes += nbytes
        found.longest_page_bytes = max(found.longest_page_bytes, nbytes)
        found.prefixed += values if encoding == _DELTA_TEXTS else 0
        found.fewest_values = min(found.fewest_values or last, last)
        last = values
    return found


def _stated(header: dict[int, Any]) -> tuple[int, int]:
    """Return how many values a page has, and their encoding; 0 for a page of another kind."""
    if header[_KIND] not in _HEADERS:
        return 0, 0
    inner, encoded = _HEADERS[header[_KIND]]
    return header[inner][_VALUES], header[inner][encoded]


def _headers(source: pa.NativeFile, chunk: Any, take: Take) -> Iterator[dict[int, Any]]:  # noqa: ANN401
    values = chunk.data_page_offset  # 0 without any value
    at = chunk.dictionary_page_offset or values
    if at < 0 or 0 < values < at:
        msg = "a column whose dictionary is not before its values"
        raise ValueError(msg)
    end = at + chunk.total_compressed_size
    codec = _UNLIMITED.get(chunk.compression)
    from_, read = at, b""
    wanted = _SMALL_BYTES
    while at < end:
        try:
            header, length = Structures(read, _MOST_HEADER_BYTES).read(at - from_, _HEADER)
        except IndexError:
            if (from_ == at and len(read) == end - at) or wanted > _MOST_HEADER_BYTES:
                raise
            wanted = wanted << 4 if from_ == at and read else _SMALL_BYTES
            from_, read = at, source.read_at(min(wanted, end - at), at)
            if not read:
                raise
            continue
        packed, nbytes, (values, _) = header[_PACKED], header[_UNPACKED], _stated(header)
        at = from_ + length
        if min(packed, nbytes, values, end - at - packed) < 0:
            msg = "a page that is not in its column, or of a negative size"
            raise ValueError(msg)
        take(values, nbytes)
        as_is = _uncompressed_bytes(header)
        if min(packed, nbytes) < as_is:
            msg = "a page that is smaller than its levels"
            raise ValueError(msg)
        if codec is not None and as_is < packed:
            content = source.read_at(packed - as_is, at + as_is)
            _ensure_unpacked(content, codec, nbytes - as_is)
        at += packed
        yield header


def _uncompressed_bytes(header: dict[int, Any]) -> int:
    """Return how many bytes of a page are not compressed: its levels, or all."""
    if header[_KIND] != _DATA_V2:
        return 0
    inner = header[_HEADERS[_DATA_V2][0]]
    nbytes = sum(inner[field] for field in _LEVELS)
    if nbytes < 0:
        msg = "levels of negative size"
        raise ValueError(msg)
    return nbytes if inner.get(_IS_COMPRESSED, True) else int(header[_PACKED])


def _ensure_unpacked(packed: bytes, codec: str, nbytes: int) -> None:
    """Raise ValueError for a page that is larger than its header says."""
    with pa.CompressedInputStream(pa.BufferReader(packed), codec) as stream:
        while piece := stream.read(min(nbytes + 1, _PIECE_BYTES)):
            nbytes -= len(piece)
            if nbytes < 0:
                msg = "a page that is larger than its header says"
                raise ValueError(msg)
