"""64-bit hashes of rows' keys: of equal keys always equal, of others almost never.

The mixing is that of SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number
Generators", 2014). It is one to one, so two keys of one integer column never share a hash; of ten
million other keys the chance that any two do is one in 400,000.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingestd.schema import Table

Hashes = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_ABSENT = np.uint64(0x6A09E667F3BCC909)
"""The hash of null."""
_BLOCK = 1 << 14
"""Values that are hashed at a time: what that needs stays in the processor's cache."""
_WORD = 8


def key_names(table: Table) -> list[str]:
    """Name the lake's columns of the key, in the key's order."""
    return [table.column(name).lake_name for name in table.key]


def hashed_columns(table: Table) -> list[str]:
    """Name the columns that `key_hashes` looks at."""
    return [*key_names(table), "_cdc_raw"]


def key_hashes(table: Table, rows: pa.RecordBatch) -> Hashes:
    """Hash the key (`Table.key`) of each of these rows: the columns of `hashed_columns`.

    By the values, whatever the width of an integer and however the arrays are sliced or encoded. A
    value that its column can't hold, and one of a nested type, is hashed by its text.
    """
    found: Hashes | None = None
    kept = _kept(rows)
    for name in key_names(table):
        column = rows.column(name)
        hashes = _of_column(column)
        for row, texts in kept:
            if name in texts:
                hashes[row] = _of_text(texts[name])
        found = hashes if found is None else mixed(found) ^ hashes
    if found is None:
        return np.full(rows.num_rows, _ABSENT)
    return found


def mixed(hashes: Hashes) -> Hashes:
    """Mix 64-bit numbers; the array that is given may be changed."""
    hashes += _STEP
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        hashes ^= hashes >> shift
        hashes *= factor
    hashes ^= hashes >> _SHIFTS[-1]
    return hashes


def _kept(rows: pa.RecordBatch) -> list[tuple[int, dict[str, str]]]:
    """Give the rows with texts in `_cdc_raw`, and these."""
    raw = rows.column("_cdc_raw")
    if raw.null_count == len(raw):
        return []
    at = np.flatnonzero(raw.is_valid().to_numpy(zero_copy_only=False))
    texts = raw.take(pa.array(at)).to_pylist(maps_as_pydicts="lossy")
    return list(zip(at.tolist(), texts, strict=True))


# --- one column ------------------------------------------------------------------------------


def _of_column(column: pa.Array) -> Hashes:
    kind = column.type
    if pa.types.is_dictionary(kind):
        whole = np.append(_of_column(column.dictionary), _ABSENT)
        found: Hashes = whole[column.indices.fill_null(len(column.dictionary)).to_numpy()]
        return found
    if pa.types.is_null(kind):
        return np.full(len(column), _ABSENT)
    if pa.types.is_decimal128(kind):
        hashes = _of_decimals(column)
    elif _is_plain(kind):
        hashes = _of_numbers(column)
    elif pa.types.is_nested(kind):
        hashes = _of_strings(pa.array([str(v) for v in column.to_pylist()], pa.string()))
    else:
        hashes = _of_strings(column)
    if column.null_count:
        hashes[column.is_null().to_numpy(zero_copy_only=False)] = _ABSENT
    return hashes


def _is_plain(kind: pa.DataType) -> bool:
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_temporal)
    return any(is_such(kind) for is_such in tests)


def _of_numbers(column: pa.Array) -> Hashes:
    kind = column.type
    if pa.types.is_floating(kind):
        values = column.cast(pa.float64()).fill_null(0.0).to_numpy() + 0.0  # -0 is 0
        values[np.isnan(values)] = np.nan
        return mixed(values.view(np.uint64))
    if pa.types.is_temporal(kind):
        column = column.view(pa.int32() if kind.bit_width == 32 else pa.int64())  # noqa: PLR2004
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    if column.null_count:
        column = column.fill_null(0)
    return _mixed_in_blocks(column.to_numpy().astype(np.int64).view(np.uint64))


def _mixed_in_blocks(numbers: Hashes) -> Hashes:
    for start in range(0, len(numbers), _BLOCK):
        mixed(numbers[start : start + _BLOCK])
    return numbers


def _of_decimals(column: pa.Array) -> Hashes:
    """Two's complement, 128 bits, low half first. Source: Arrow columnar format, Decimal."""
    data = column.buffers()[1]
    words = np.frombuffer(data, np.uint64, 2 * len(column), 16 * column.offset)
    return mixed(mixed(words[0::2].copy()) ^ words[1::2])


def _of_strings(column: pa.Array) -> Hashes:
    """Hash strings and binary values by their bytes, eight at a time."""
    is_large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    column = column.cast(pa.large_binary() if is_large else pa.binary())
    width = np.dtype(np.int64 if is_large else np.int32)
    if len(column) == 0:
        return np.empty(0, np.uint64)
    _, ends, data = column.buffers()
    offsets = np.frombuffer(ends, width, len(column) + 1, column.offset * width.itemsize)
    found = np.empty(len(column), np.uint64)
    whole = np.frombuffer(b"" if data is None else data, np.uint8)
    for start in range(0, len(column), _BLOCK):
        part = offsets[start : start + _BLOCK + 1].astype(np.int64)
        found[start : start + _BLOCK] = _of_bytes(whole[part[0] : part[-1]], part - part[0])
    return found


def _of_bytes(data: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Hashes:
    starts, lengths = offsets[:-1], np.diff(offsets)
    padded = np.zeros(len(data) + _WORD, np.uint8)
    padded[: len(data)] = data
    words: NDArray[Any] = np.ndarray((len(data) + 1,), "<u8", padded, strides=(1,))
    hashes = mixed(lengths.astype(np.uint64))
    longest, shortest = int(lengths.max(initial=0)), int(lengths.min(initial=0))
    for done in range(0, longest, _WORD):
        if done + _WORD <= shortest:
            hashes ^= words[starts + done]
            mixed(hashes)
        else:
            which = np.flatnonzero(lengths > done)
            word = words[starts[which] + done] & _low_bytes(lengths[which] - done)
            hashes[which] = mixed(hashes[which] ^ word)
    return hashes


_MASKS = np.array([(1 << 8 * n) - 1 for n in range(_WORD + 1)], np.uint64)


def _low_bytes(counts: NDArray[np.int64]) -> Hashes:
    """Give masks of the first `counts` bytes of a word, all of it from eight on."""
    return _MASKS[np.minimum(counts, _WORD)]


def _of_text(text: str) -> np.uint64:
    data = np.frombuffer(text.encode(), np.uint8)
    hashed: np.uint64 = _of_bytes(data, np.array([0, len(data)]))[0]
    return hashed
