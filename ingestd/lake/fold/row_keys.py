"""Finding rows by their keys, all at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class RowKeys:
    """The keys of some rows, one array a column; a key is numbered in no particular order.

    Values are the same if they have the same bits, but for NaN, which is one. A key with a null in
    it is none.
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
        """The number of each row's key, -1 for none."""
        self.count = count
        """How many different keys there are: their numbers are below."""

    def find(self, columns: Sequence[pa.Array]) -> Ints:
        """Return the number of each of these keys, -1 where it is none of those known."""
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
    """Return what Arrow can look up: text for nested values."""
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
    """Return where each code stands in `known` (sorted), -1 where it does not."""
    if not len(known):
        return np.full(len(codes), -1, np.int64)
    places = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    return np.where(known[places] == codes, places, -1)
