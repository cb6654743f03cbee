"""Whether two sets of rows are the same, whatever order they come in.

Each row is hashed to 64 bits, over its typed values; the digest is two sums over all rows. Rows
that differ have equal hashes with a probability of about 2^-57: that is no protection against
somebody who looks for such rows, and need not be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

_PIECE_BYTES = 1 << 19
"""Bytes of texts hashed at once: each takes some 40 bytes of memory meanwhile."""
_WEIGHTS = 1 << 16
_NULL = np.uint64(0x9E3779B97F4A7C15)
_STEP = np.uint64(0xD1B54A32D192ED03)
_SECOND = np.uint64(0x8CB92BA72F3D8DD7)


@dataclass(slots=True)
class ContentDigest:
    """Takes batches of one schema; `text` says what they had in them."""

    rows: int = 0
    _first: int = 0
    _second: int = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Take a batch's rows."""
        hashes = row_hashes(batch.columns, batch.num_rows)
        self.rows += batch.num_rows
        self._first = (self._first + int(_mixed(hashes).sum(dtype=np.uint64))) % 2**64
        second = _mixed(hashes ^ _SECOND).sum(dtype=np.uint64)
        self._second = (self._second + int(second)) % 2**64

    @property
    def text(self) -> str:
        """The digest so far."""
        return f"1:{self.rows}:{self._first:016x}{self._second:016x}"


def row_hashes(columns: list[pa.Array], rows: int) -> Hashes:
    """Hash each row, of these columns in their order."""
    found = np.zeros(rows, np.uint64)
    for column in columns:
        found = found * _STEP + _value_hashes(column)
    return _mixed(found)


def _value_hashes(array: pa.Array) -> Hashes:
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        found = _text_hashes(array)
    elif pa.types.is_list(kind) or pa.types.is_map(kind):
        found = _list_hashes(array)
    elif pa.types.is_struct(kind):
        fields = [pc.struct_field(array, i) for i in range(kind.num_fields)]
        found = row_hashes(fields, len(array))
    elif pa.types.is_decimal128(kind):
        filled = array.fill_null(pa.scalar(0, kind))
        words = np.frombuffer(filled.buffers()[1], np.uint64).reshape(-1, 2)
        words = words[filled.offset : filled.offset + len(filled)]
        found = _mixed(_mixed(words[:, 0]) + words[:, 1])
    elif pa.types.is_floating(kind):
        found = _mixed(array.cast(pa.float64()).fill_null(0.0).to_numpy().view(np.uint64))
    else:
        found = _mixed(_as_integers(array).view(np.uint64))
    if array.null_count:
        is_null = array.is_null().to_numpy(zero_copy_only=False)
        found = np.where(is_null, _NULL, found)
    return found


def _as_integers(array: pa.Array) -> NDArray[np.int64]:
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    elif pa.types.is_date32(array.type):
        array = array.cast(pa.int32())
    whole: NDArray[np.int64] = array.cast(pa.int64()).fill_null(0).to_numpy()
    return whole


def _text_hashes(array: pa.Array) -> Hashes:
    found = np.empty(len(array), np.uint64)
    offsets = _offsets(array)
    buffer = array.buffers()[2]
    data = np.frombuffer(buffer, np.uint8) if buffer is not None else np.empty(0, np.uint8)
    start = 0
    while start < len(array):
        end = int(np.searchsorted(offsets, offsets[start] + _PIECE_BYTES, side="right")) - 1
        end = min(max(end, start + 1), len(array))
        found[start:end] = _piece_hashes(data, offsets[start : end + 1])
        start = end
    return found


def _piece_hashes(data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Hashes:
    """Sum each text's bytes, weighted by where they stand in it."""
    lengths = np.diff(offsets)
    places = np.arange(offsets[0], offsets[-1]) - np.repeat(offsets[:-1], lengths)
    weights = (
        _FIRST_WEIGHTS[places]
        if lengths.max(initial=0) <= _WEIGHTS
        else _mixed(places.astype(np.uint64))
    )
    products = (data[offsets[0] : offsets[-1]].astype(np.uint64) + np.uint64(1)) * weights
    return _sums(products, offsets - offsets[0]) + _mixed(lengths.astype(np.uint64))


def _list_hashes(array: pa.Array) -> Hashes:
    offsets = _offsets(array)
    is_map = pa.types.is_map(array.type)
    values = [array.keys, array.items] if is_map else [array.values]
    first, last = int(offsets[0]), int(offsets[-1])
    inner = row_hashes([v.slice(first, last - first) for v in values], last - first)
    lengths = np.diff(offsets)
    places = np.arange(first, last) - np.repeat(offsets[:-1], lengths)
    weighted = inner * (_mixed(places.astype(np.uint64)) | np.uint64(1))
    return _sums(weighted, offsets - first) + _mixed(lengths.astype(np.uint64) + _STEP)


def _offsets(array: pa.Array) -> NDArray[np.int64]:
    if not len(array):
        return np.zeros(1, np.int64)
    found = np.frombuffer(array.buffers()[1], np.int32)
    return found[array.offset : array.offset + len(array) + 1].astype(np.int64)


def _sums(values: Hashes, offsets: NDArray[np.int64]) -> Hashes:
    """Sum the runs that `offsets` cut, modulo 2^64."""
    running = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values, out=running[1:])
    sums: Hashes = running[offsets[1:]] - running[offsets[:-1]]
    return sums


def _mixed(values: Hashes) -> Hashes:
    """Spread the bits (the finalizer of splitmix64)."""
    found = values + _NULL
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))


_FIRST_WEIGHTS = _mixed(np.arange(_WEIGHTS, dtype=np.uint64))
