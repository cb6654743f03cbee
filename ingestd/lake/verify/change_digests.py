"""Changes of a raw table as numbers, the input of the fold in `ingestd.pipeline.verify.fold`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.digests.row_digests import (
    NULL,
    RAW,
    ComparedColumn,
    Given,
    RawTexts,
    column_digests,
    given_by,
    key_digests,
    row_digests,
)
from ingestd.digests.value_hashes import Hashes
from ingestd.model.changes import DELETE, OF_BEFORE, UPDATE, field_of
from ingestd.ports.verify import EXISTS, KEY, LSN, OLD, ROW, SEQ, UNSENT, Digested, Matrix

Flags = NDArray[np.bool_]

BEFORE, UNCHANGED = "_cdc_before", "_cdc_unchanged"
_NOT_UNSENT = np.uint64(1)


class ChangeBatch:
    """A batch of changes: the digests of each column's values, now and before."""

    def __init__(self, batch: pa.RecordBatch, columns: Sequence[ComparedColumn]) -> None:
        self.batch = batch
        self.rows: int = batch.num_rows
        self._columns = columns
        self._lsn: NDArray[np.int64] = batch.column("_cdc_lsn").to_numpy()
        self._raw = RawTexts(given_by(batch)(RAW))
        self.is_delete: Flags = _flags(pc.equal(batch.column("_cdc_op"), DELETE))
        before = given_by(batch)(BEFORE)
        self.has_before: Flags = np.zeros(self.rows, np.bool_)
        if before is not None and before.null_count < self.rows:
            is_update = pc.equal(batch.column("_cdc_op"), UPDATE)
            self.has_before = _flags(pc.and_(before.is_valid(), is_update))
        self._before = before
        self._unsent = _unsent(given_by(batch)(UNCHANGED))

    def type_of(self, number: int) -> pa.DataType:
        """Return a column's type."""
        return self._columns[number].type

    def unsent(self, number: int) -> Flags | None:
        """Return which rows were sent without a column; None: none."""
        found = [self._unsent[n] for n in self._columns[number].stored if n in self._unsent]
        return np.logical_or.reduce(found) if found else None

    def own(self, number: int) -> Hashes:
        """Return hashes of a column's values; for one that was not sent, of the old row's value."""
        found = self._with_missing(number, self._hashes(number, given_by(self.batch), ""))
        unsent = self.unsent(number)
        if unsent is not None and self._is_in_before(number):
            found = np.where(unsent & self._has_old(number), self.before(number), found)
        return found

    def lacks(self, number: int) -> Flags | None:
        """Return the rows whose value of a column is only in an earlier row; None: none."""
        unsent = self.unsent(number)
        if unsent is not None and self._is_in_before(number):
            unsent &= ~self._has_old(number)
        return unsent if unsent is not None and unsent.any() else None

    def _has_old(self, number: int) -> Flags:
        """Return which old rows were sent with a column that the new row lacks.

        The struct's field proves nothing: a joined file has the table's struct type, with all
        fields that old rows ever had. The value does: a TOASTed value is never null.
        """
        found: Flags = self.has_before & (self.before(number) != NULL)
        return found

    def before(self, number: int) -> Hashes:
        """Return hashes of the old rows' values of a column."""
        found = self._hashes(number, self._given_before, OF_BEFORE)
        return self._with_missing(number, found)

    def _hashes(self, number: int, given: Given, prefix: str) -> Hashes:
        return column_digests(self._columns[number], given, self._raw, self.rows, prefix)

    def _with_missing(self, number: int, hashes: Hashes) -> Hashes:
        column = self._columns[number]
        if not column.since_lsn:
            return hashes
        return np.where(self._lsn < column.since_lsn, column.missing_hash, hashes)

    def _is_in_before(self, number: int) -> bool:
        return any(self._given_before(n) is not None for n in self._columns[number].stored)

    def _given_before(self, name: str) -> pa.Array | None:
        before = self._before
        if before is None or before.type.get_field_index(name) < 0:
            return None
        return field_of(before, name)


def digest_changes(batch: pa.RecordBatch, digested: Digested) -> Matrix:
    """Return changes as numbers; an update that moves a row to another key yields two."""
    changes = ChangeBatch(batch, digested.columns)
    return _of_keyed(changes, digested) if digested.key else _of_multiset(changes, digested)


def linked_keys(
    batch: pa.RecordBatch, columns: Sequence[ComparedColumn], key: Sequence[int]
) -> Matrix:
    """Return the old and new keys of rows that kept unsent values when their key changed."""
    changes = ChangeBatch(batch, columns)
    lacking = [changes.lacks(i) for i in range(len(columns)) if i not in key]
    found = [flags for flags in lacking if flags is not None]
    if not found or not changes.has_before.any():
        return np.empty((2, 0), np.uint64)
    old, new = _old_keys(changes, key), _keys(changes, key)
    moved = np.logical_or.reduce(found) & changes.has_before & (old != new)
    return np.stack([old[moved], new[moved]])


def reached(keys: Hashes, links: Matrix) -> Hashes:
    """Return these keys and all that are linked with them, directly or through others."""
    ends = np.concatenate([links, links[::-1]], axis=1)
    ends = ends[:, np.argsort(ends[0])]
    found = newest = np.unique(keys)
    while len(newest):
        firsts = np.searchsorted(ends[0], newest)
        counts = np.searchsorted(ends[0], newest, side="right") - firsts
        # The indices of all their links, one key after another.
        steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        newest = np.setdiff1d(ends[1, np.repeat(firsts, counts) + steps], found)
        found = np.union1d(found, newest)
    return found


def change_keys(batch: pa.RecordBatch, digested: Digested) -> tuple[Hashes, Hashes]:
    """Return the keys of the rows that changes add, and of those that they remove.

    For a multiset: the rows' own numbers.
    """
    changes = ChangeBatch(batch, digested.columns)
    if digested.key:
        keys = _keys(changes, digested.key)
        has_old = changes.has_before.any()
        return keys, _old_keys(changes, digested.key) if has_old else keys
    numbers = range(len(digested.columns))
    own = {i: changes.own(i) for i in numbers}
    old = {i: changes.before(i) for i in numbers} if changes.has_before.any() else own
    return row_digests(own, changes.rows), row_digests(old, changes.rows)


def lazy_columns(unchanged: pa.Array, columns: Sequence[ComparedColumn]) -> set[int]:
    """Return the indices of the columns that some of these changes were sent without."""
    names = _unsent(unchanged)
    return {i for i, c in enumerate(columns) if any(n in names for n in c.stored)}


def _of_keyed(changes: ChangeBatch, digested: Digested) -> Matrix:
    key, lazy = digested.key, digested.lazy
    found = np.zeros((changes.rows, digested.width), np.uint64)
    hashes = {i: changes.own(i) for i in range(len(digested.columns))}
    kinds = [c.type for c in digested.columns]
    found[:, KEY] = key_digests(((hashes[i], kinds[i]) for i in key), changes.rows)
    found[:, ROW] = row_digests({i: h for i, h in hashes.items() if i not in lazy}, changes.rows)
    _place(found, changes)
    found[:, EXISTS] = ~changes.is_delete
    lacks = np.zeros(changes.rows, np.bool_)
    for place, number in enumerate(lazy, digested.first_lazy):
        own = hashes[number]
        own = np.where(own == UNSENT, _NOT_UNSENT, own)
        unsent = changes.lacks(number)
        if unsent is not None:
            own = np.where(unsent, UNSENT, own)
            lacks |= unsent
        found[:, place] = own
    old = found[:, KEY].copy()
    if changes.has_before.any():
        old = np.where(changes.has_before, _old_keys(changes, key), old)
    is_moved = old != found[:, KEY]
    if len(digested.linked):
        found[:, OLD] = np.where(is_moved & lacks, old, found[:, KEY])
        is_moved &= ~lacks
    if not is_moved.any():
        return found
    return np.concatenate([found, _removals(found[is_moved], old[is_moved], digested)])


def _removals(moved: Matrix, old: Hashes, digested: Digested) -> Matrix:
    """Return the changes that remove rows from their old keys."""
    removed = np.zeros_like(moved)
    removed[:, KEY] = old
    removed[:, LSN], removed[:, SEQ] = moved[:, LSN], moved[:, SEQ]
    if len(digested.linked):
        removed[:, OLD] = old
    return removed


def _of_multiset(changes: ChangeBatch, digested: Digested) -> Matrix:
    found = np.zeros((changes.rows, digested.width), np.uint64)
    numbers = range(len(digested.columns))
    found[:, ROW] = row_digests({i: changes.own(i) for i in numbers}, changes.rows)
    found[:, KEY] = found[:, ROW]
    _place(found, changes)
    found[:, EXISTS] = ~changes.is_delete
    if not changes.has_before.any():
        return found
    removed = found[changes.has_before].copy()
    before = row_digests({i: changes.before(i) for i in numbers}, changes.rows)
    removed[:, ROW] = removed[:, KEY] = before[changes.has_before]
    removed[:, EXISTS] = 0
    return np.concatenate([removed, found])


def _place(digests: Matrix, changes: ChangeBatch) -> None:
    for place, name in ((LSN, "_cdc_lsn"), (SEQ, "_cdc_seq")):
        digests[:, place] = changes.batch.column(name).to_numpy().astype(np.uint64)


def _keys(changes: ChangeBatch, key: Sequence[int]) -> Hashes:
    return key_digests(((changes.own(i), changes.type_of(i)) for i in key), changes.rows)


def _old_keys(changes: ChangeBatch, key: Sequence[int]) -> Hashes:
    return key_digests(((changes.before(i), changes.type_of(i)) for i in key), changes.rows)


def _unsent(unchanged: pa.Array | None) -> dict[str, Flags]:
    """Return which rows were sent without a lake column, by its name."""
    if unchanged is None or unchanged.null_count == len(unchanged):
        return {}
    names = np.array(pc.list_flatten(unchanged).to_pylist(), object)
    rows = pc.list_parent_indices(unchanged).to_numpy()
    found = {}
    for name in set(names.tolist()):
        flags = np.zeros(len(unchanged), np.bool_)
        flags[rows[names == name]] = True
        found[name] = flags
    return found


def _flags(values: pa.Array) -> Flags:
    found: Flags = values.to_numpy(zero_copy_only=False).astype(np.bool_)
    return found
