"""The fold of `spark_jobs.fold.plain` by Arrow, for the rows that allow it: most of them. Pure.

Rows that inherit values from another key, and rows with values that their columns can't represent,
are folded one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.model.changes import DELETE, TRUNCATE, UPDATE
from spark_jobs.fold.arrow_keys import are_compared, numbered
from spark_jobs.fold.plain import CARRIED, DELETED, KEPT, FoldedKey, before_column, fold_changes

MAX_SINGLY = 50_000
"""The greatest number of rows that are folded one by one."""
_NOWHERE = -1

_Ints = NDArray[np.int64]
_Mask = NDArray[np.bool_]


def fold(
    changes: pa.Table, columns: Sequence[str], key: Sequence[str], *, max_singly: int = MAX_SINGLY
) -> FoldedKey | None:
    """Fold as `fold_changes`, in any order of outcomes; None: too many rows to fold here."""
    changes = changes.combine_chunks()
    if not changes.num_rows or not are_compared(changes, key):
        return fold_changes(changes, columns, key) if changes.num_rows <= max_singly else None
    numbers, is_single = _keys(changes, key)
    if not is_single.any():
        return FoldedKey(_by_arrow(changes, numbers, columns), [])
    singles = changes.filter(pa.array(is_single))
    if singles.num_rows > max_singly:
        return None
    folded = fold_changes(singles, columns, key)
    if is_single.all():
        return folded
    others = changes.filter(pa.array(~is_single)).combine_chunks()
    outcomes = _by_arrow(others, numbers[~is_single], columns)
    # (the outcomes of `folded` come first: `borrowed` refers to their numbers)
    return FoldedKey(pa.concat_tables([folded.outcomes, outcomes]), folded.borrowed)


def above_truncate(changes: pa.Table) -> pa.Table:
    """Return the changes above the newest `t`. It voids all lower positions, whenever they came."""
    is_truncate = _mask(pc.equal(changes["_cdc_op"], TRUNCATE))
    if not is_truncate.any():
        return changes
    lsn, seq = (changes[name].to_numpy() for name in ("_cdc_lsn", "_cdc_seq"))
    last = lsn[is_truncate].max()
    last_seq = seq[is_truncate & (lsn == last)].max()
    return changes.filter(pa.array((lsn > last) | ((lsn == last) & (seq > last_seq))))


def unfolded(changes: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Return rows as outcomes without a fold: a snapshot has one complete row per key."""
    rows = changes.select([*columns, "_cdc_raw", *CARRIED])
    rows = rows.append_column(DELETED, pa.array(np.zeros(rows.num_rows, bool)))
    return rows.append_column(KEPT, _lists({}, rows.num_rows))


def _keys(changes: pa.Table, key: Sequence[str]) -> tuple[_Ints, _Mask]:
    """Return the number of each row's key, and which rows must be folded one by one.

    Those are all rows of a key that changed to or from another, or that has source texts.
    """
    is_odd = ~_mask(changes["_cdc_raw"].is_null())
    own = [_flat(changes[name]) for name in key]
    old = _old_keys(changes, own, key)
    if old is None:
        numbers = numbered(own)
        renamed = numbers[:0]
    else:
        places, values = old
        every = numbered([pa.concat_arrays(pair) for pair in zip(own, values, strict=True)])
        numbers, before = every[: len(is_odd)], every[len(is_odd) :]
        is_renamed = numbers[places] != before
        is_odd[places[is_renamed]] = True
        renamed = before[is_renamed]
    is_single = np.zeros(max(numbers.max(), renamed.max(initial=0)) + 1, bool)
    is_single[numbers[is_odd]] = True
    is_single[renamed] = True
    return numbers, is_single[numbers]


def _old_keys(
    changes: pa.Table, own: Sequence[pa.Array], key: Sequence[str]
) -> tuple[_Ints, list[pa.Array]] | None:
    """Return the numbers of the updates with an old key, and those keys; None without any."""
    before = changes["_cdc_before"]
    if before.null_count == len(before) or not {f.name for f in before.type}.issuperset(key):
        return None
    is_told = _mask(pc.and_(before.is_valid(), pc.equal(changes["_cdc_op"], UPDATE)))
    chosen = pa.array(is_told)
    values = [
        before_column(changes, name).filter(chosen).cast(mine.type)
        for name, mine in zip(key, own, strict=True)
    ]
    return np.flatnonzero(is_told), values


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Rows in the order of their keys, and within a key by position.

    `order`: the row numbers; `first`: at each place, the place of its key's first row; `last`: the
    places of the keys' last rows.
    """

    order: _Ints
    first: _Ints
    last: _Ints

    @classmethod
    def from_changes(cls, changes: pa.Table, numbers: _Ints) -> _Sorted:
        lsn, seq = (changes[name].to_numpy() for name in ("_cdc_lsn", "_cdc_seq"))
        order = np.lexsort((seq, lsn, numbers))
        is_first = np.ones(len(order), bool)
        is_first[1:] = np.diff(numbers[order]) != 0
        places = np.arange(len(order))
        first = np.maximum.accumulate(np.where(is_first, places, 0))
        return cls(order, first, np.flatnonzero(np.roll(is_first, -1)))

    def newest_with(self, is_there: _Mask) -> _Ints:
        """Return, per key, the number of its newest row where `is_there`; _NOWHERE without one."""
        places = np.arange(len(self.order))
        newest = np.maximum.accumulate(np.where(is_there[self.order], places, -1))[self.last]
        is_own = newest >= self.first[self.last]
        return np.where(is_own, self.order[newest], _NOWHERE)


def _by_arrow(changes: pa.Table, numbers: _Ints, columns: Sequence[str]) -> pa.Table:
    """Fold rows that have no texts and whose keys did not change."""
    rows = _Sorted.from_changes(changes, numbers)
    newest = rows.order[rows.last]
    is_delete = _mask(pc.equal(changes["_cdc_op"], DELETE))
    unsent = _flat(changes["_cdc_unchanged"])
    parents, names = pc.list_parent_indices(unsent).to_numpy(), pc.list_flatten(unsent)
    kept: dict[str, _Mask] = {}
    arrays = {}
    for name in columns:
        values = _flat(changes[name])
        is_unsent = np.zeros(len(values), bool)
        is_unsent[parents[_mask(pc.equal(names, name))]] = True
        if not is_unsent.any():
            arrays[name] = values.take(pa.array(newest))
            continue
        source, is_kept = _sources(changes, name, rows, is_unsent, is_delete)
        both = pa.concat_arrays([values, _before(changes, name, values)])
        arrays[name] = both.take(pa.array(source, mask=is_kept))
        kept[name] = is_kept
    return pa.table(
        {
            **arrays,
            "_cdc_raw": pa.nulls(len(newest), pa.map_(pa.string(), pa.string())),
            **{name: changes[name].take(pa.array(newest)) for name in CARRIED},
            DELETED: pa.array(is_delete[newest]),
            KEPT: _lists(kept, len(newest)),
        }
    )


def _sources(
    changes: pa.Table, name: str, rows: _Sorted, is_unsent: _Mask, is_delete: _Mask
) -> tuple[_Ints, _Mask]:
    """Return, per key, the row that a column's value is from, and which keys have no such row.

    Numbers from the row count on stand for old rows.
    """
    count = len(is_unsent)
    is_told = _mask(_before(changes, name, _flat(changes[name])).is_valid())
    found = rows.newest_with(~is_unsent | is_told)
    newest = rows.order[rows.last]
    is_old = (found >= 0) & is_unsent[found]
    source = np.where(is_old, found + count, found)
    # (after a deletion, an unsent value does not exist)
    is_own = is_delete[newest] | ((found >= 0) & ~is_old & is_delete[found])
    return np.where(is_own, newest, source), (found < 0) & ~is_own


def _before(changes: pa.Table, name: str, like: pa.Array) -> pa.Array:
    if name not in {f.name for f in changes["_cdc_before"].type}:
        return pa.nulls(len(like), like.type)
    return before_column(changes, name).cast(like.type)


def _lists(kept: dict[str, _Mask], count: int) -> pa.Array:
    """Return the names of the kept columns, by row; null for none."""
    kind = pa.list_(pa.string())
    if not kept:
        return pa.nulls(count, kind)
    table = np.stack(list(kept.values()), axis=1)
    offsets = np.concatenate([[0], np.cumsum(table.sum(axis=1))]).astype(np.int32)
    names = pa.array(list(kept)).take(pa.array(np.nonzero(table)[1]))
    return pa.ListArray.from_arrays(
        pa.array(offsets), names, type=kind, mask=pa.array(~table.any(axis=1))
    )


def _flat(values: pa.ChunkedArray | pa.Array) -> pa.Array:
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def _mask(values: pa.ChunkedArray | pa.Array) -> _Mask:
    found: _Mask = np.asarray(values.to_numpy(zero_copy_only=False), bool)
    return found
