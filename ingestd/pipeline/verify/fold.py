"""Folds a table's changes by numbers alone, to the same rows as `lake.fold.plain` (tests).

Rows are ordered by position. A change without some values takes them from the row before it. Since
the row exists, that is the last change of the same key that was sent with them. Rows that carried
such values to another key are followed from key to key: these keys are folded together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingestd.digests.row_digests import NULL, column_part
from ingestd.digests.value_hashes import Hashes
from ingestd.ports.verify import EXISTS, KEY, LSN, OLD, ROW, SEQ, UNSENT, Digested, Matrix

Flags = NDArray[np.bool_]
Places = NDArray[np.int64]
_BYTES = 8
_LINKED_BYTES = 150


@dataclass(frozen=True, slots=True)
class FoldedHashes:
    """Existing rows: hashes of their keys, sorted, and of themselves.

    For a multiset both are the same, and each is repeated as often as its row. `doubled`: the keys
    of changes that occur more than once at one position, one for each extra.
    """

    keys: Hashes
    rows: Hashes
    doubled: Hashes

    def among(self, is_in: Callable[[Hashes], Flags]) -> FoldedHashes:
        """Return those whose keys are in a partition."""
        flags = is_in(self.keys)
        return FoldedHashes(self.keys[flags], self.rows[flags], self.doubled[is_in(self.doubled)])

    def plus(self, other: FoldedHashes) -> FoldedHashes:
        """Return these rows together with those of other keys."""
        if not len(other.keys):
            return FoldedHashes(self.keys, self.rows, np.append(self.doubled, other.doubled))
        keys = np.concatenate([self.keys, other.keys])
        order = np.argsort(keys, kind="stable")
        rows = np.concatenate([self.rows, other.rows])
        return FoldedHashes(keys[order], rows[order], np.append(self.doubled, other.doubled))


NOTHING = FoldedHashes(*(np.empty(0, np.uint64) for _ in range(3)))


def fold_digests(changes: Matrix, digested: Digested) -> FoldedHashes:
    """Fold a partition of the changes: all changes of each of its keys, none of them linked."""
    if not len(changes):
        return NOTHING
    return _fold_keyed(changes, digested) if digested.key else _fold_multiset(changes)


def _fold_keyed(changes: Matrix, digested: Digested) -> FoldedHashes:
    order = _order(changes)
    keys = changes[order, KEY]
    is_new = _differs(keys)
    ends = np.flatnonzero(np.append(is_new[1:], True))
    is_there = changes[order[ends], EXISTS] == 1
    last = ends[is_there]
    rows = changes[order[last], ROW]
    if digested.lazy:
        begins = np.flatnonzero(is_new)[is_there]
        rows += _unsent_parts(changes, order, digested, begins, last)
    return FoldedHashes(keys[last], rows, keys[_is_repeated(changes, order)])


def _unsent_parts(
    changes: Matrix, order: Places, digested: Digested, begins: Places, last: Places
) -> Hashes:
    """Return what the lazy columns add to the rows that exist after the changes at `last`."""
    numbers = np.arange(len(order))
    is_delete = changes[order, EXISTS] == 0
    gone = np.maximum.accumulate(np.where(is_delete, numbers, -1))[last]
    least = np.maximum(begins, gone + 1)
    found = np.zeros(len(last), np.uint64)
    for place, number in enumerate(digested.lazy, digested.first_lazy):
        hashes = changes[order, place]
        is_sent = (hashes != UNSENT) & ~is_delete
        at = np.maximum.accumulate(np.where(is_sent, numbers, -1))[last]
        own = np.where(at >= least, hashes[at], NULL)
        found += column_part(own, number)
    return found


def linked_bytes(width: int) -> int:
    """Return the memory for folding one change of a linked key; `width`: count of its numbers."""
    return 2 * width * _BYTES + _LINKED_BYTES


def fold_linked(changes: Matrix, digested: Digested) -> FoldedHashes:
    """Fold the changes of all linked keys together: rows move between the keys."""
    if not len(changes):
        return NOTHING
    doubled = changes[_order(changes)]
    doubled = doubled[_is_repeated(doubled, np.arange(len(doubled))), KEY]
    changes = changes[np.lexsort([changes[:, n] for n in (EXISTS, SEQ, LSN)])]
    last, came_from = _followed(changes)
    rows = changes[last, ROW]
    for place, number in enumerate(digested.lazy, digested.first_lazy):
        hashes = changes[:, place]
        at = np.where((hashes != UNSENT) | (came_from < 0), np.arange(len(changes)), came_from)
        while True:  # halves the distance each time
            further = at[at]
            if np.array_equal(further, at):
                break
            at = further
        own = hashes[at[last]]
        rows += column_part(np.where(own == UNSENT, NULL, own), number)
    order = np.argsort(changes[last, KEY], kind="stable")
    return FoldedHashes(changes[last[order], KEY], rows[order], doubled)


def _followed(changes: Matrix) -> tuple[Places, Places]:
    """Return the changes that leave the rows, and for each the change that wrote its row before.

    `changes` in order; -1: there was none. A row that moves to another key is also an event of its
    old key, which leaves nothing.
    """
    count = len(changes)
    is_there = changes[:, EXISTS] == 1
    moved = np.flatnonzero(is_there & (changes[:, OLD] != changes[:, KEY]))
    keys = np.concatenate([changes[:, KEY], changes[moved, OLD]])
    times = np.concatenate([np.arange(count), moved])
    order = np.lexsort((times, keys))
    is_new = _differs(keys[order])
    left = np.where(is_there, np.arange(count), -1)
    left = np.append(left, np.full(len(moved), -1))[order]
    before = np.where(is_new, -1, np.append(-1, left[:-1]))
    found = np.full(len(order), -1)
    found[order] = before
    came_from = found[:count]
    came_from[moved] = found[count:]
    last = left[np.append(is_new[1:], True)]
    return last[last >= 0], came_from


def _fold_multiset(changes: Matrix) -> FoldedHashes:
    order = _order(changes)
    keys = changes[order, KEY]
    begins = np.flatnonzero(_differs(keys))
    steps = np.where(changes[order, EXISTS] == 1, 1, -1)
    sums = np.cumsum(steps)
    sums -= np.repeat(sums[begins] - steps[begins], np.diff(np.append(begins, len(keys))))
    # Deleting a missing row has no effect.
    lowest = np.minimum(np.minimum.reduceat(sums, begins), 0)
    counts = sums[np.append(begins[1:], len(keys)) - 1] - lowest
    is_repeated = _is_repeated(changes, order) & (changes[order, SEQ] > 0)
    found = np.repeat(keys[begins], counts)
    return FoldedHashes(found, found, keys[is_repeated])


def _order(changes: Matrix) -> Places:
    """Return the order by key, then position; deletes precede inserts."""
    columns = [changes[:, n] for n in (EXISTS, SEQ, LSN, KEY)]
    order: Places = np.lexsort(columns)
    return order


def _differs(values: Hashes) -> Flags:
    """Return for each value whether it differs from the one before."""
    found: Flags = np.append(True, values[1:] != values[:-1])
    return found


def _is_repeated(changes: Matrix, order: Places) -> Flags:
    found = np.zeros(len(order), np.bool_)
    same = np.ones(max(0, len(order) - 1), np.bool_)
    for column in (KEY, LSN, SEQ, EXISTS):
        values = changes[order, column]
        same &= values[1:] == values[:-1]
    found[1:] = same
    return found
