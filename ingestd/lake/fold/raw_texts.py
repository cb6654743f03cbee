"""`_cdc_raw` and `_cdc_unchanged` of many rows as flat arrays, to rename and drop entries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

RAW_TYPE = pa.map_(pa.string(), pa.string())
NAMES_TYPE = pa.list_(pa.field("element", pa.string()))

_Ints = NDArray[np.int64]
NewName = Callable[[str], str | None]
"""Returns the new name of an entry; None drops it."""


@dataclass(frozen=True, slots=True)
class TextEntries:
    """Entries of `_cdc_raw`: the number of the row, the name and the text of each."""

    rows: _Ints
    names: pa.Array
    texts: pa.Array

    @classmethod
    def from_column(cls, raw: pa.Array) -> TextEntries:
        """Return the entries of a column."""
        if raw.null_count == len(raw):
            return cls(np.empty(0, np.int64), pa.array([], pa.string()), pa.array([], pa.string()))
        raw = pa.concat_arrays([raw])  # without an offset
        lengths = np.diff(raw.offsets.to_numpy())
        first, last = raw.offsets[0].as_py(), raw.offsets[-1].as_py()
        keys, items = (part.slice(first, last - first) for part in (raw.keys, raw.items))
        return cls(np.repeat(np.arange(len(raw)), lengths), keys, items)

    def renamed(self, new_name: NewName) -> TextEntries:
        """Return the entries under new names, without those that have none."""
        names = _renamed(self.names, new_name)
        renamed = TextEntries(self.rows, names, self.texts)
        return renamed.of(names.is_valid().to_numpy(zero_copy_only=False))

    def without(self, name: str, is_row: NDArray[np.bool_]) -> TextEntries:
        """Return the entries without those of a name in some rows."""
        is_named = pc.equal(self.names, name).to_numpy(zero_copy_only=False)
        return self.of(~(is_named & is_row[self.rows]))

    def of(self, is_chosen: NDArray[np.bool_]) -> TextEntries:
        """Return these of the entries."""
        keep = pa.array(is_chosen)
        return TextEntries(self.rows[is_chosen], self.names.filter(keep), self.texts.filter(keep))

    def having(self, name: str) -> _Ints:
        """Return the rows that have a text of a name."""
        found: _Ints = self.rows[pc.equal(self.names, name).to_numpy(zero_copy_only=False)]
        return found

    def with_more(self, name: str, texts: dict[int, str]) -> TextEntries:
        """Return the entries, plus texts of one name by row. They replace others of that name."""
        if not texts:
            return self
        rows = np.fromiter(texts, np.int64, len(texts))
        is_row = np.zeros(max(rows.max(), self.rows.max(initial=0)) + 1, bool)
        is_row[rows] = True
        kept = self.without(name, is_row)
        return TextEntries(
            np.concatenate([kept.rows, rows]),
            pa.concat_arrays([kept.names, pa.array([name] * len(texts), pa.string())]),
            pa.concat_arrays([kept.texts, pa.array(list(texts.values()), pa.string())]),
        )

    def to_column(self, count: int) -> pa.Array:
        """Return the column of `count` rows, each one's names in order; null without an entry."""
        if not len(self.rows):
            return pa.nulls(count, RAW_TYPE)
        known = pa.array(sorted(pc.unique(self.names).to_pylist()), pa.string())
        places = pc.index_in(self.names, value_set=known).to_numpy()
        order = np.lexsort((places, self.rows))
        offsets, is_empty = _offsets(self.rows, count)
        names, texts = (part.take(pa.array(order)) for part in (self.names, self.texts))
        return pa.MapArray.from_arrays(offsets, names, texts, type=RAW_TYPE, mask=is_empty)


def renamed_lists(lists: pa.Array, new_name: NewName) -> pa.Array:
    """Return `_cdc_unchanged` under new names, without those that have none; null if empty."""
    if lists.null_count == len(lists):
        return pa.nulls(len(lists), NAMES_TYPE)
    lists = pa.concat_arrays([lists])
    rows = pc.list_parent_indices(lists).to_numpy()
    names = _renamed(pc.list_flatten(lists), new_name)
    keep = names.is_valid()
    rows = rows[keep.to_numpy(zero_copy_only=False)]
    if not len(rows):
        return pa.nulls(len(lists), NAMES_TYPE)
    offsets, is_empty = _offsets(rows, len(lists))
    return pa.ListArray.from_arrays(offsets, names.filter(keep), type=NAMES_TYPE, mask=is_empty)


def _renamed(names: pa.Array, new_name: NewName) -> pa.Array:
    known = pc.unique(names)
    new = pa.array([new_name(name) for name in known.to_pylist()], pa.string())
    return new.take(pc.index_in(names, value_set=known))


def _offsets(rows: _Ints, count: int) -> tuple[pa.Array, pa.Array]:
    lengths = np.bincount(rows, minlength=count)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.array(offsets), pa.array(lengths == 0)
