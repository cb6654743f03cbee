"""A vectorised lookup of rows by key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class RowKeys:
    """The distinct keys of a set of rows, one array a column, numbered in no particular order.

    Values are equal if they have the same bits; every NaN equals every other. A key that contains a
    null counts as missing.
    """

    def __init__(self, columns: Sequence[pa.Array]) -> None:
        self._dictionaries: list[pa.Array] = []
        self._pairs: list[Ints] = []
        codes: Ints = np.zeros(0, np.int64)
        count = 0
        for number, column in enumerate(columns):
            values = _comparable(column)
            dictionary = pc.unique(values.drop_null())
            self._dictionaries.append(dictionary)
            own = _codes(values, dictionary)
            if number == 0:
                codes, count = own, len(dictionary)
                continue
            paired = _paired(codes, own, len(dictionary))
            known = np.unique(paired[paired >= 0])
            self._pairs.append(known)
            codes, count = _places(known, paired), len(known)
        self.numbers = codes
        """The number of each row's key, -1 if missing."""
        self.count = count
        """How many different keys there are; their numbers are 0 to count - 1."""

    def find(self, columns: Sequence[pa.Array]) -> Ints:
        """Return the number of each of these keys, -1 if it is unknown."""
        codes: Ints = np.zeros(0, np.int64)
        for number, (column, dictionary) in enumerate(
            zip(columns, self._dictionaries, strict=True)
        ):
            own = _codes(_comparable(column), dictionary)
            if number == 0:
                codes = own
            else:
                codes = _places(self._pairs[number - 1], _paired(codes, own, len(dictionary)))
        return codes


def _comparable(column: pa.Array) -> pa.Array:
    """Return values that Arrow can look up: text for nested values."""
    if not pa.types.is_nested(column.type):
        return column
    return pa.array([None if v is None else repr(v) for v in column.to_pylist()], pa.string())


def _codes(values: pa.Array, dictionary: pa.Array) -> Ints:
    found = pc.index_in(values, value_set=dictionary, skip_nulls=True)
    codes: Ints = found.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes


def _paired(first: Ints, second: Ints, seconds: int) -> Ints:
    return np.where((first < 0) | (second < 0), -1, first * max(1, seconds) + second)


def _places(known: Ints, codes: Ints) -> Ints:
    """Return the index of each code in `known` (sorted), -1 if it is missing."""
    if not len(known):
        return np.full(len(codes), -1, np.int64)
    places = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    return np.where(known[places] == codes, places, -1)
