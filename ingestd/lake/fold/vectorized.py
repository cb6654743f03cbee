"""The fold to outcomes that reference tables and Spark jobs use: by arrays, where rows allow it.

Rows with values that their columns can't represent are folded row by row (`outcomes.py`).
Batches too large for memory are folded by Spark (`spark_jobs.fold.spark_sql`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.lake.fold.outcomes import (
    DELETED,
    KEPT,
    FoldedChanges,
    FoldKey,
    before_column,
    fold_row_by_row,
    keys_of,
    newest_change_columns,
    old_keys_of,
)
from ingestd.lake.fold.row_keys import Ints, RowKeys, are_compared
from ingestd.model.changes import DELETE, TRUNCATE, UPDATE

MAX_SINGLY = 50_000
"""The greatest number of rows that are folded one by one, and of values kept under an old key."""
_NOTHING, _GONE = -1, -2
"""Instead of the change that left a row: there is none, or it removed the row."""

_Mask = NDArray[np.bool_]


def fold_to_outcomes(
    changes: pa.Table, columns: Sequence[str], key: Sequence[str], max_singly: int = MAX_SINGLY
) -> FoldedChanges | None:
    """Fold as `fold_row_by_row`, in any order of outcomes; None: too many rows to fold here."""
    changes = changes.combine_chunks()
    if not changes.num_rows or not are_compared(changes, key):
        return fold_row_by_row(changes, columns, key) if changes.num_rows <= max_singly else None
    keys = _ChangedKeys.from_changes(changes, key)
    is_single = keys.to_fold_singly(changes)
    if not is_single.any():
        return _ByArrays(changes, keys, columns, key).fold(max_singly)
    singles = changes.filter(pa.array(is_single))
    if singles.num_rows > max_singly:
        return None
    folded = fold_row_by_row(singles, columns, key)
    if is_single.all():
        return folded
    others = changes.filter(pa.array(~is_single)).combine_chunks()
    found = _ByArrays(others, keys.among(~is_single), columns, key).fold(max_singly)
    # (all keys that changed are among `singles`, so only `folded` keeps values under old keys)
    assert found is not None
    return FoldedChanges(
        pa.concat_tables([folded.outcomes, found.outcomes]), folded.kept_under_old_key
    )


def above_truncate(changes: pa.Table) -> pa.Table:
    """Return the changes above the newest `t`. It voids all lower positions, whenever they came."""
    is_truncate = _mask(pc.equal(changes["_cdc_op"], TRUNCATE))
    if not is_truncate.any():
        return changes
    lsn, seq = (changes[name].to_numpy() for name in ("_cdc_lsn", "_cdc_seq"))
    last = lsn[is_truncate].max()
    last_seq = seq[is_truncate & (lsn == last)].max()
    return changes.filter(pa.array((lsn > last) | ((lsn == last) & (seq > last_seq))))


def snapshot_outcomes(changes: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Return the rows of a snapshot as outcomes: it has one complete row per key."""
    rows = changes.select([*columns, "_cdc_raw", *newest_change_columns(changes)])
    rows = rows.append_column(DELETED, pa.array(np.zeros(rows.num_rows, bool)))
    return rows.append_column(KEPT, _lists({}, rows.num_rows))


@dataclass(frozen=True, slots=True)
class _ChangedKeys:
    """The numbers of the rows' keys (`own`), and of their old keys; -1: a key has a null.

    `old` is `own` in rows that did not change their key. The numbers are below `count`.
    """

    own: Ints
    old: Ints
    count: int

    @classmethod
    def from_changes(cls, changes: pa.Table, key: Sequence[str]) -> _ChangedKeys:
        own = [changes[name].combine_chunks() for name in key]
        before = changes["_cdc_before"]
        if before.null_count == len(before) or not {f.name for f in before.type}.issuperset(key):
            keys = RowKeys(own)
            return cls(keys.numbers, keys.numbers, keys.count)
        is_sent = _mask(pc.and_(before.is_valid(), pc.equal(changes["_cdc_op"], UPDATE)))
        old = [
            before_column(changes, name).filter(pa.array(is_sent)).cast(mine.type)
            for name, mine in zip(key, own, strict=True)
        ]
        keys = RowKeys([pa.concat_arrays(pair) for pair in zip(own, old, strict=True)])
        numbers = keys.numbers[: len(before)]
        every = numbers.copy()
        every[is_sent] = keys.numbers[len(before) :]
        return cls(numbers, every, keys.count)

    def among(self, chosen: _Mask) -> _ChangedKeys:
        return _ChangedKeys(self.own[chosen], self.old[chosen], self.count)

    def to_fold_singly(self, changes: pa.Table) -> _Mask:
        """Return the rows of all keys with source texts or nulls, or linked with such keys."""
        is_odd = _mask(changes["_cdc_raw"].is_valid()) | (self.own < 0) | (self.old < 0)
        if not is_odd.any():
            return is_odd
        is_odd |= self.own != self.old
        is_single = np.zeros(self.count + 1, bool)  # (the last is that of keys with a null)
        is_single[self.own[is_odd]] = True
        is_single[self.old[is_odd]] = True
        return is_single[self.own]


class _ByArrays:
    """Rows without source texts. Event 2i: change i removes its old key; 2i+1: it sets its own.

    Changes are numbered by position; `_order` has their rows.
    """

    def __init__(
        self, changes: pa.Table, keys: _ChangedKeys, columns: Sequence[str], key: Sequence[str]
    ) -> None:
        self._changes, self._columns, self._key = changes, columns, key
        lsn, seq = (changes[name].to_numpy() for name in ("_cdc_lsn", "_cdc_seq"))
        self._order: Ints = np.lexsort((seq, lsn))
        self._own, self._old = keys.own[self._order], keys.old[self._order]
        self._is_delete = _mask(pc.equal(changes["_cdc_op"], DELETE))[self._order]
        last, self._came_from = self._followed()
        self._at = last // 2
        """The newest change of each outcome."""
        self._is_vacated = last % 2 == 0
        self._is_deleted = self._is_vacated | self._is_delete[self._at]

    def fold(self, max_kept: int) -> FoldedChanges | None:
        unsent = self._changes["_cdc_unchanged"].combine_chunks()
        parents, names = pc.list_parent_indices(unsent).to_numpy(), pc.list_flatten(unsent)
        arrays, kept = {}, {}
        under_old_key: list[tuple[int, str, int]] = []
        for name in self._columns:
            is_unsent = np.zeros(self._changes.num_rows, bool)
            is_unsent[parents[_mask(pc.equal(names, name))]] = True
            source, is_absent = self._order[self._at], np.zeros(len(self._at), bool)
            if is_unsent.any():
                source, is_absent, begins = self._sources(name, is_unsent)
                is_mine = self._old[begins] == self._own[self._at]
                kept[name] = is_absent & is_mine
                others = np.flatnonzero(is_absent & ~is_mine).tolist()
                under_old_key += [(n, name, int(begins[n])) for n in others]
            if name in self._key:
                rows = self._order[self._at] + self._changes.num_rows
                source = np.where(self._is_vacated, rows, source)
            arrays[name] = self._values(name, source, is_absent)
        if len(under_old_key) > max_kept:
            return None
        newest = pa.array(self._order[self._at])
        outcomes = pa.table(
            {
                **arrays,
                "_cdc_raw": pa.nulls(len(newest), pa.map_(pa.string(), pa.string())),
                **{n: self._changes[n].take(newest) for n in newest_change_columns(self._changes)},
                DELETED: pa.array(self._is_deleted),
                KEPT: _lists(kept, len(newest)),
            }
        )
        return FoldedChanges(outcomes, self._with_keys(under_old_key))

    def _followed(self) -> tuple[Ints, Ints]:
        """Return each key's last event, and for each change the one that left its row before."""
        count = len(self._order)
        moved = np.flatnonzero(self._own != self._old)
        keys = np.concatenate([self._own, self._old[moved]])
        events = np.concatenate([2 * np.arange(count) + 1, 2 * moved])
        order = np.lexsort((events, keys))
        keys, events = keys[order], events[order]
        is_first = np.append(True, keys[1:] != keys[:-1])[: len(keys)]
        rows, is_own = events // 2, events % 2 == 1
        row_after = np.where(is_own & ~self._is_delete[rows], rows, _GONE)
        before = np.where(is_first, _NOTHING, np.roll(row_after, 1))
        is_origin = ~is_own | (self._own == self._old)[rows]
        came_from: Ints = np.full(count, _NOTHING)
        came_from[rows[is_origin]] = before[is_origin]
        return events[np.roll(is_first, -1)], came_from

    def _sources(self, name: str, is_unsent: _Mask) -> tuple[Ints, _Mask, Ints]:
        """Return, per outcome, the row that a column's value is from.

        Numbers from the row count on stand for old rows. Also return which outcomes have the value
        from before all changes, and the change that each value was followed to.
        """
        is_unsent = is_unsent[self._order]
        is_old = is_unsent & _mask(self._before(name).is_valid())[self._order]
        numbers = np.arange(len(is_unsent))
        is_end = ~is_unsent | is_old | self._is_delete | (self._came_from < 0)
        at = np.where(is_end, numbers, self._came_from)
        while True:  # halves the distance each time
            further = at[at]
            if np.array_equal(further, at):
                break
            at = further
        at = np.where(self._is_deleted, self._at, at[self._at])
        is_absent = is_unsent & ~is_old & ~self._is_delete & (self._came_from == _NOTHING)
        is_taken_old = (is_old & ~self._is_delete)[at] & ~self._is_deleted
        source = self._order[at] + np.where(is_taken_old, len(numbers), 0)
        return source, is_absent[at] & ~self._is_deleted, at

    def _values(self, name: str, source: Ints, is_absent: _Mask) -> pa.Array:
        values = self._changes[name].combine_chunks()
        if (source >= len(values)).any():
            values = pa.concat_arrays([values, self._before(name)])
        return values.take(pa.array(source, mask=is_absent if is_absent.any() else None))

    def _before(self, name: str) -> pa.Array:
        like = self._changes[name]
        if name not in {f.name for f in self._changes["_cdc_before"].type}:
            return pa.nulls(len(like), like.type)
        return before_column(self._changes, name).cast(like.type)

    def _with_keys(self, kept: Sequence[tuple[int, str, int]]) -> list[tuple[int, str, FoldKey]]:
        """Return these kept values, with the old key of each change instead of its number."""
        if not kept:
            return []
        every = {at: n for n, at in enumerate(dict.fromkeys(at for _, _, at in kept))}
        rows = self._changes.take(pa.array(self._order[list(every)])).combine_chunks()
        own, old = keys_of(rows, self._key), old_keys_of(rows, self._key)
        keys = [old.get(n, mine) for n, mine in enumerate(own)]
        return [(number, name, keys[every[at]]) for number, name, at in kept]


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


def _mask(values: pa.ChunkedArray | pa.Array) -> _Mask:
    found: _Mask = np.asarray(values.to_numpy(zero_copy_only=False), bool)
    return found
