"""A table's changes folded by numbers alone: the same rows as `lake.fold.plain` has (tests).

Rows go by position. A change without some values has them from the row before it, which is the last
change of the same key that was sent with them, since the row is there. Rows that took such values
along to another key are followed from key to key: these keys are folded together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingestd.digests.row_digests import NULL, salted
from ingestd.digests.value_hashes import Hashes
from ingestd.ports.verify import KEY, LSN, OLD, ROW, SEQ, THERE, UNSENT, Digested, Matrix

Flags = NDArray[np.bool_]
Places = NDArray[np.int64]
_BYTES = 8
_LINKED_BYTES = 150


@dataclass(frozen=True, slots=True)
class FoldedHashes:
    """Rows that are there: hashes of their keys, sorted, and of themselves.

    Of a multiset both are the same, and each stands as often as the row is there. `doubled`: the
    keys of changes that are there twice at one position, each once for every one too many.
    """

    keys: Hashes
    rows: Hashes
    doubled: Hashes

    def among(self, is_in: Callable[[Hashes], Flags]) -> FoldedHashes:
        """Return those whose keys are in some part."""
        flags = is_in(self.keys)
        return FoldedHashes(self.keys[flags], self.rows[flags], self.doubled[is_in(self.doubled)])

    def plus(self, other: FoldedHashes) -> FoldedHashes:
        """Put in the rows of other keys."""
        if not len(other.keys):
            return FoldedHashes(self.keys, self.rows, np.append(self.doubled, other.doubled))
        keys = np.concatenate([self.keys, other.keys])
        order = np.argsort(keys, kind="stable")
        rows = np.concatenate([self.rows, other.rows])
        return FoldedHashes(keys[order], rows[order], np.append(self.doubled, other.doubled))


NOTHING = FoldedHashes(*(np.empty(0, np.uint64) for _ in range(3)))


def fold_digests(changes: Matrix, digested: Digested) -> FoldedHashes:
    """Fold a part of the changes of a table: all of each key that is in it, and none is linked."""
    if not len(changes):
        return NOTHING
    return _fold_keyed(changes, digested) if digested.key else _fold_multiset(changes)


def _fold_keyed(changes: Matrix, digested: Digested) -> FoldedHashes:
    order = _order(changes)
    keys = changes[order, KEY]
    is_new = _differs(keys)
    ends = np.flatnonzero(np.append(is_new[1:], True))
    is_there = changes[order[ends], THERE] == 1
    last = ends[is_there]
    rows = changes[order[last], ROW]
    if digested.lazy:
        begins = np.flatnonzero(is_new)[is_there]
        rows += _unsent_parts(changes, order, digested, begins, last)
    return FoldedHashes(keys[last], rows, keys[_is_repeated(changes, order)])


def _unsent_parts(
    changes: Matrix, order: Places, digested: Digested, begins: Places, last: Places
) -> Hashes:
    """Sum up what the lazy columns add to the rows that the changes at `last` leave there."""
    numbers = np.arange(len(order))
    is_gone = changes[order, THERE] == 0
    gone = np.maximum.accumulate(np.where(is_gone, numbers, -1))[last]
    least = np.maximum(begins, gone + 1)
    found = np.zeros(len(last), np.uint64)
    for place, number in enumerate(digested.lazy, digested.first_lazy):
        hashes = changes[order, place]
        is_sent = (hashes != UNSENT) & ~is_gone
        at = np.maximum.accumulate(np.where(is_sent, numbers, -1))[last]
        own = np.where(at >= least, hashes[at], NULL)
        found += salted(own, number)
    return found


def linked_bytes(width: int) -> int:
    """Return what folding takes of memory for each change of a linked key; `width`: its numbers."""
    return 2 * width * _BYTES + _LINKED_BYTES


def fold_linked(changes: Matrix, digested: Digested) -> FoldedHashes:
    """Fold the changes of all keys that are linked, together: rows go from one to another."""
    if not len(changes):
        return NOTHING
    doubled = changes[_order(changes)]
    doubled = doubled[_is_repeated(doubled, np.arange(len(doubled))), KEY]
    changes = changes[np.lexsort([changes[:, n] for n in (THERE, SEQ, LSN)])]
    last, came_from = _followed(changes)
    rows = changes[last, ROW]
    for place, number in enumerate(digested.lazy, digested.first_lazy):
        hashes = changes[:, place]
        at = np.where((hashes != UNSENT) | (came_from < 0), np.arange(len(changes)), came_from)
        while True:  # halves the way each time
            further = at[at]
            if np.array_equal(further, at):
                break
            at = further
        own = hashes[at[last]]
        rows += salted(np.where(own == UNSENT, NULL, own), number)
    order = np.argsort(changes[last, KEY], kind="stable")
    return FoldedHashes(changes[last[order], KEY], rows[order], doubled)


def _followed(changes: Matrix) -> tuple[Places, Places]:
    """Return the changes that leave the rows there, and of each the one that its row was put by.

    `changes` in their order; -1: there was none. A row that goes to another key is an event of its
    old key, too, where nothing is left.
    """
    count = len(changes)
    is_there = changes[:, THERE] == 1
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
    steps = np.where(changes[order, THERE] == 1, 1, -1)
    sums = np.cumsum(steps)
    sums -= np.repeat(sums[begins] - steps[begins], np.diff(np.append(begins, len(keys))))
    # What takes away a row that is not there takes nothing away.
    lowest = np.minimum(np.minimum.reduceat(sums, begins), 0)
    counts = sums[np.append(begins[1:], len(keys)) - 1] - lowest
    is_repeated = _is_repeated(changes, order) & (changes[order, SEQ] > 0)
    found = np.repeat(keys[begins], counts)
    return FoldedHashes(found, found, keys[is_repeated])


def _order(changes: Matrix) -> Places:
    """Order by key, then position; what takes a row away comes before what puts one there."""
    columns = [changes[:, n] for n in (THERE, SEQ, LSN, KEY)]
    order: Places = np.lexsort(columns)
    return order


def _differs(values: Hashes) -> Flags:
    """Say of each value whether it is another than the one before."""
    found: Flags = np.append(True, values[1:] != values[:-1])
    return found


def _is_repeated(changes: Matrix, order: Places) -> Flags:
    found = np.zeros(len(order), np.bool_)
    same = np.ones(max(0, len(order) - 1), np.bool_)
    for column in (KEY, LSN, SEQ, THERE):
        values = changes[order, column]
        same &= values[1:] == values[:-1]
    found[1:] = same
    return found
