"""Comparison of keys by Arrow, without a Python value per key. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

_RAW = "_cdc_raw"
_COMPARED = (
    pa.types.is_integer,
    pa.types.is_string,
    pa.types.is_date,
    pa.types.is_timestamp,
    pa.types.is_binary,
    pa.types.is_decimal,
    pa.types.is_boolean,
)
"""Types that Arrow compares as needed. Floats are not among them: negative zero, NaN."""


def are_compared(rows: pa.Table, key: Sequence[str]) -> bool:
    """Return whether Arrow's equality is the keys' equality, and no key is in `_cdc_raw`."""
    kinds = [rows.schema.field(name).type for name in key]
    return all(any(is_one(kind) for is_one in _COMPARED) for kind in kinds) and not any(
        pc.any(pc.is_in(chunk.keys, value_set=pa.array(key, chunk.keys.type))).as_py()
        for chunk in rows[_RAW].chunks
        if chunk.null_count < len(chunk)
    )


def numbered(columns: Sequence[pa.Array]) -> NDArray[np.int64]:
    """Return a number below the row count for each row; equal rows have equal numbers."""
    found: NDArray[np.int64] | None = None
    for column in columns:
        codes = column.dictionary_encode(null_encoding="encode").indices.to_numpy().astype(np.int64)
        if found is None:
            found = codes
        else:
            both = found * (codes.max(initial=0) + 1) + codes
            found = np.unique(both, return_inverse=True)[1].astype(np.int64)
    if found is None:
        raise ValueError("a key without columns")
    return found


def found_in(
    old: Sequence[pa.ChunkedArray], wanted: Sequence[pa.ChunkedArray]
) -> NDArray[np.int64]:
    """Return, per row of `old`, the index of the equal row in `wanted`; -1 without one.

    The rows of `wanted` are distinct. A null equals nothing.
    """
    codes, own, count = np.zeros(len(old[0]), np.int64), np.zeros(len(wanted[0]), np.int64), 1
    for mine, theirs in zip(old, wanted, strict=True):
        distinct = pc.unique(theirs)
        places = _places(mine.cast(distinct.type), distinct)
        codes = np.where((codes < 0) | (places < 0), -1, codes * len(distinct) + places)
        own = own * len(distinct) + _places(theirs, distinct)
        count *= len(distinct)
        if count > len(own):  # renumber, so that the codes stay small
            pairs = pc.unique(pa.array(own))
            codes, own = _places(pa.array(codes), pairs), _places(pa.array(own), pairs)
            count = len(pairs)
    place = np.full(count + 1, -1, np.int64)
    place[own] = np.arange(len(own))
    return place[codes]


def _places(values: pa.Array | pa.ChunkedArray, among: pa.Array) -> NDArray[np.int64]:
    found = pc.fill_null(pc.index_in(values, value_set=among, skip_nulls=True), -1)
    return np.asarray(found.to_numpy(), np.int64)
