"""A vectorised lookup of rows by key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_COMPARED = (
    pa.types.is_integer,
    pa.types.is_string,
    pa.types.is_date,
    pa.types.is_timestamp,
    pa.types.is_time,
    pa.types.is_binary,
    pa.types.is_decimal,
    pa.types.is_boolean,
    pa.types.is_floating,
)
"""Types whose values `RowKeys` compares as Postgres does. Nested values may contain minus zero."""


def are_compared(rows: pa.Table, key: Sequence[str]) -> bool:
    """Return whether the equality of `RowKeys` is the key's, and no key is in `_cdc_raw`."""
    kinds = [rows.schema.field(name).type for name in key]
    return all(any(is_one(kind) for is_one in _COMPARED) for kind in kinds) and not any(
        pc.any(pc.is_in(chunk.keys, value_set=pa.array(key, chunk.keys.type))).as_py()
        for chunk in rows["_cdc_raw"].chunks
        if chunk.null_count < len(chunk)
    )


class RowKeys:
    """The distinct keys of a set of rows, one array a column, numbered in no particular order.

    As in Postgres, every NaN equals every other, and minus zero equals zero. A key that contains a
    null counts as missing.
    """

    def __init__(self, columns: Sequence[pa.Array | pa.ChunkedArray]) -> None:
        self._dictionaries: list[pa.Array] = []
        self._pairs: list[pa.Array] = []
        codes: Ints = np.zeros(0, np.int64)
        count = 0
        for number, column in enumerate(columns):
            values = _comparable(column)
            dictionary = pc.unique(values).drop_null()
            self._dictionaries.append(dictionary)
            own = _codes(values, dictionary)
            if number == 0:
                codes, count = own, len(dictionary)
                continue
            paired = _paired(codes, own, len(dictionary))
            known = pc.unique(pa.array(paired[paired >= 0]))
            self._pairs.append(known)
            codes, count = _codes(pa.array(paired), known), len(known)
        self.numbers = codes
        """The number of each row's key, -1 if missing."""
        self.count = count
        """How many different keys there are; their numbers are 0 to count - 1."""

    def find(self, columns: Sequence[pa.Array | pa.ChunkedArray]) -> Ints:
        """Return the number of each of these keys, -1 if it is unknown."""
        codes: Ints = np.zeros(0, np.int64)
        for number, (column, dictionary) in enumerate(
            zip(columns, self._dictionaries, strict=True)
        ):
            own = _codes(_comparable(column).cast(dictionary.type), dictionary)
            if number == 0:
                codes = own
            else:
                paired = _paired(codes, own, len(dictionary))
                codes = _codes(pa.array(paired), self._pairs[number - 1])
        return codes


def _comparable(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return values that Arrow can look up: text for nested values, zero for minus zero."""
    if pa.types.is_nested(column.type):
        return pa.array([None if v is None else repr(v) for v in column.to_pylist()], pa.string())
    if pa.types.is_floating(column.type):
        return pc.add(column, pa.scalar(0, column.type))
    return column


def _codes(values: pa.Array | pa.ChunkedArray, dictionary: pa.Array) -> Ints:
    found = pc.index_in(values, value_set=dictionary, skip_nulls=True)
    return np.asarray(pc.fill_null(found, -1).to_numpy(), np.int64)


def _paired(first: Ints, second: Ints, seconds: int) -> Ints:
    return np.where((first < 0) | (second < 0), -1, first * max(1, seconds) + second)
