"""64-bit hashes of Arrow values: equal values always agree, different ones almost never.

A hash depends neither on the width of integers or floats, nor on how the array is sliced or
encoded. Zero and minus zero differ, NaN is one value, null differs from every value. The mixing is
that of SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014). It
is one to one, so two values of an integer column never collide. For ten million other values, the
chance of any collision is one in 400,000. The hash is not cryptographic: collisions can be
constructed. Where a client would gain by that, a secret salt is mixed into each value, as one for
the row alone would not separate two values that have one hash.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_ABSENT = np.uint64(0x6A09E667F3BCC909)
"""The hash of null."""
_WORD = 8
_SALT_BITS = 63


@dataclass(frozen=True, slots=True)
class HashBlocks:
    """How much is hashed at a time.

    `values`: so many, so that the working set fits the processor's cache; `nbytes`: their maximum
    bytes, if there is more than one. `long_bytes`: longer values are hashed in pieces of this
    length, in parallel; it is part of the definition of a hash, as is `salt`.
    """

    values: int = 1 << 14
    nbytes: int = 1 << 20
    long_bytes: int = 1 << 9
    salt: int = 0

    @classmethod
    def salted(cls) -> HashBlocks:
        """Return the defaults with a random salt."""
        return cls(salt=secrets.randbits(_SALT_BITS) | 1)


BLOCKS = HashBlocks()


def mixed(hashes: Hashes) -> Hashes:
    """Mix 64-bit numbers. The input array may be modified."""
    hashes += _STEP
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        hashes ^= hashes >> shift
        hashes *= factor
    hashes ^= hashes >> _SHIFTS[-1]
    return hashes


def row_hashes(columns: Sequence[pa.Array], rows: int, blocks: HashBlocks = BLOCKS) -> Hashes:
    """Hash each row of these columns, in their order."""
    return combined((column_hashes(column, blocks) for column in columns), rows, blocks)


def combined(columns: Iterable[Hashes], rows: int, blocks: HashBlocks = BLOCKS) -> Hashes:
    """Combine value hashes into row hashes. May modify the input.

    `blocks`: theirs. Without a salt, one column keeps its hashes.
    """
    found: Hashes | None = np.full(rows, blocks.salt, np.uint64) if blocks.salt else None
    for hashes in columns:
        found = hashes if found is None else mixed(found) ^ hashes
    return np.zeros(rows, np.uint64) if found is None else found


def with_one_zero(hashes: Hashes, kind: pa.DataType) -> Hashes:
    """Return hashes of values of a type as those of a key's, where -0 equals 0 as in Postgres."""
    if pa.types.is_floating(kind):
        return np.where(hashes == _MINUS_ZERO, _ZERO, hashes)
    return hashes.copy()


def text_hash(text: str, blocks: HashBlocks = BLOCKS) -> np.uint64:
    """Return the hash of a text in a column."""
    data = np.frombuffer(text.encode(), np.uint8)
    hashed: np.uint64 = _of_cuts(data, np.array([0, len(data)]), blocks)[0]
    return hashed


def column_hashes(column: pa.Array, blocks: HashBlocks = BLOCKS) -> Hashes:
    """Hash each value: plain ones directly, nested ones by the hashes of their parts."""
    kind = column.type
    if column.null_count == len(column):
        return np.full(len(column), _ABSENT ^ np.uint64(blocks.salt))
    if pa.types.is_dictionary(kind):
        found = column_hashes(column.dictionary, blocks).take(_numbers(column.indices))
    elif pa.types.is_floating(kind):
        values = _numbers(column.cast(pa.float64()))
        found = mixed(np.where(np.isnan(values), np.nan, values).view(np.uint64))
    elif pa.types.is_decimal128(kind):
        found = _of_decimals(column, blocks)
    elif pa.types.is_list(kind) or pa.types.is_map(kind):
        found = _of_lists(column, blocks)
    elif pa.types.is_struct(kind):
        fields = [pc.struct_field(column, i) for i in range(kind.num_fields)]
        found = mixed(row_hashes(fields, len(column), blocks))
    elif any(is_such(kind) for is_such in _WHOLE):
        found = _of_integers(column, blocks)
    else:
        found = _of_strings(column, blocks)
    if column.null_count:
        found[column.is_null().to_numpy(zero_copy_only=False)] = _ABSENT ^ np.uint64(blocks.salt)
    return found


# --- numbers -----------------------------------------------------------------------------------

_WHOLE = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_temporal)


def _of_integers(column: pa.Array, blocks: HashBlocks) -> Hashes:
    kind = column.type
    if pa.types.is_temporal(kind):
        column = column.view(pa.int32() if kind.bit_width == 32 else pa.int64())  # noqa: PLR2004
    if pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    found = _numbers(column).astype(np.int64).view(np.uint64)
    for start in range(0, len(found), blocks.values):
        mixed(found[start : start + blocks.values])
    return found


def _numbers(column: pa.Array) -> NDArray[Any]:
    """Return the array: without a copy if there are no nulls, else with zeros for them."""
    found: NDArray[Any] = (column.fill_null(0) if column.null_count else column).to_numpy()
    return found


def _of_decimals(column: pa.Array, blocks: HashBlocks) -> Hashes:
    """Hash two's complement, 128 bits, low half first. Source: Arrow columnar format, Decimal."""
    data = column.buffers()[1]
    words = np.frombuffer(data, np.uint64, 2 * len(column), 16 * column.offset)
    return mixed(mixed(words[0::2] ^ np.uint64(blocks.salt)) ^ words[1::2])


# --- runs of bytes -----------------------------------------------------------------------------


def _of_strings(column: pa.Array, blocks: HashBlocks) -> Hashes:
    """Hash strings and binary values by their bytes."""
    is_large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    column = column.cast(pa.large_binary() if is_large else pa.binary())
    width = np.dtype(np.int64 if is_large else np.int32)
    _, ends, data = column.buffers()
    cuts = np.frombuffer(ends, width, len(column) + 1, column.offset * width.itemsize)
    return _of_cuts(np.frombuffer(b"" if data is None else data, np.uint8), cuts, blocks)


def _of_lists(column: pa.Array, blocks: HashBlocks) -> Hashes:
    """Hash lists and maps by the bytes of their items' hashes."""
    cuts = column.offsets.to_numpy().astype(np.int64)
    first, last = int(cuts[0]), int(cuts[-1])
    is_map = pa.types.is_map(column.type)
    parts = [column.keys, column.items] if is_map else [column.values]
    inner = row_hashes([p.slice(first, last - first) for p in parts], last - first, blocks)
    return _of_cuts(inner.view(np.uint8), (cuts - first) * _WORD, blocks)


def _of_cuts(data: NDArray[np.uint8], cuts: NDArray[np.integer], blocks: HashBlocks) -> Hashes:
    """Hash, block by block, the runs of `data` between consecutive `cuts`."""
    found = np.empty(len(cuts) - 1, np.uint64)
    start = 0
    while start < len(found):
        part = cuts[start : start + blocks.values + 1].astype(np.int64)
        first = part[0]
        part -= first
        count = max(1, int(np.searchsorted(part, blocks.nbytes, side="right")) - 1)
        end = part[count]
        padded = np.zeros(end + _WORD, np.uint8)
        padded[:end] = data[first : first + end]
        found[start : start + count] = _of_runs(
            padded, part[:count], np.diff(part[: count + 1]), blocks
        )
        start += count
    return found


def _of_runs(
    data: NDArray[np.uint8], starts: Places, lengths: Places, blocks: HashBlocks
) -> Hashes:
    """Hash runs of bytes, eight at a time. `data` must extend eight bytes past the last run."""
    words: Hashes = np.ndarray((len(data) - _WORD + 1,), "<u8", data, strides=(1,))
    hashes = mixed(lengths.astype(np.uint64) ^ np.uint64(blocks.salt))
    longest, shortest = int(lengths.max()), int(lengths.min())
    if longest > blocks.long_bytes:
        is_long = lengths > blocks.long_bytes
        hashes[is_long] ^= _of_long_runs(data, starts[is_long], lengths[is_long], blocks)
        lengths = np.where(is_long, 0, lengths)
        longest, shortest = int(lengths.max()), 0
    which = np.arange(len(lengths))
    for done in range(0, longest, _WORD):
        if done + _WORD <= shortest:
            hashes ^= words[starts + done]
            mixed(hashes)
        else:
            left = lengths[which] - done
            which, left = which[left > 0], left[left > 0]
            word = words[starts[which] + done] & _LOW_BYTES[np.minimum(left, _WORD)]
            hashes[which] = mixed(hashes[which] ^ word)
    return hashes


def _of_long_runs(
    data: NDArray[np.uint8], starts: Places, lengths: Places, blocks: HashBlocks
) -> Hashes:
    """Hash runs by the bytes of their pieces' hashes."""
    counts = -(-lengths // blocks.long_bytes)
    ends = np.cumsum(counts)
    done = (np.arange(ends[-1]) - np.repeat(ends - counts, counts)) * blocks.long_bytes
    left = np.repeat(lengths, counts) - done
    pieces = _of_runs(
        data, np.repeat(starts, counts) + done, np.minimum(left, blocks.long_bytes), blocks
    )
    return _of_cuts(pieces.view(np.uint8), np.append(0, ends) * _WORD, blocks)


_LOW_BYTES = np.array([(1 << 8 * n) - 1 for n in range(_WORD + 1)], np.uint64)
"""Masks of a word's first bytes, by count."""
_MINUS_ZERO, _ZERO = column_hashes(pa.array([-0.0, 0.0]))
