"""A table's changes folded by numbers alone: the same rows as `ingestd.sink.fold` has (tests).

Rows go by position. A change without some values has them from the row before it, which is the last
change of the same key that was sent with them, since the row is there. A row that took such values
along to another key is followed one by one: there are few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingestd.row_digests import NULL, salted
from ingestd.value_hashes import Hashes
from ingestd.verification import KEY, LSN, OLD, ROW, SEQ, THERE, UNSENT, Digested, Matrix

Flags = NDArray[np.bool_]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Folded:
    """Rows that are there: hashes of their keys, sorted, and of themselves.

    Of a multiset both are the same, and each stands as often as the row is there. `doubled`: the
    keys of changes that are there twice at one position, each once for every one too many.
    """

    keys: Hashes
    rows: Hashes
    doubled: Hashes

    def among(self, is_in: Callable[[Hashes], Flags]) -> Folded:
        """Give those whose keys are in some part."""
        flags = is_in(self.keys)
        return Folded(self.keys[flags], self.rows[flags], self.doubled[is_in(self.doubled)])

    def plus(self, other: Folded) -> Folded:
        """Put in the rows of other keys."""
        if not len(other.keys):
            return Folded(self.keys, self.rows, np.append(self.doubled, other.doubled))
        keys = np.concatenate([self.keys, other.keys])
        order = np.argsort(keys, kind="stable")
        rows = np.concatenate([self.rows, other.rows])
        return Folded(keys[order], rows[order], np.append(self.doubled, other.doubled))


NOTHING = Folded(*(np.empty(0, np.uint64) for _ in range(3)))


def fold_digests(changes: Matrix, digested: Digested) -> Folded:
    """Fold a part of the changes of a table: all of each key that is in it, and none is linked."""
    if not len(changes):
        return NOTHING
    return _fold_keyed(changes, digested) if digested.key else _fold_multiset(changes)


def _fold_keyed(changes: Matrix, digested: Digested) -> Folded:
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
    return Folded(keys[last], rows, keys[_is_repeated(changes, order)])


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


def fold_linked(changes: Matrix, digested: Digested) -> Folded:
    """Fold the changes of all keys that are linked, one by one."""
    order = np.lexsort((changes[:, THERE], changes[:, SEQ], changes[:, LSN]))
    current: dict[int, list[int]] = {}
    doubled: list[int] = []
    seen: set[tuple[int, ...]] = set()
    first = digested.first_lazy
    for change in changes[order].tolist():
        key, old = change[KEY], change[OLD]
        place = (key, change[LSN], change[SEQ], change[THERE])
        if place in seen:
            doubled.append(key)
        seen.add(place)
        if not change[THERE]:
            current.pop(key, None)
            continue
        before = current.get(key) if old == key else current.pop(old, None)
        lazy = change[first:]
        if before is not None:
            had = before[1:]
            lazy = [b if a == UNSENT else a for a, b in zip(lazy, had, strict=True)]
        current[key] = [change[ROW], *lazy]
    keys = np.array(sorted(current), np.uint64)
    rows = np.array([current[key][0] for key in keys.tolist()], np.uint64)
    for index, number in enumerate(digested.lazy, 1):
        lazy = np.array([current[key][index] for key in keys.tolist()], np.uint64)
        rows += salted(np.where(lazy == UNSENT, NULL, lazy), number)
    return Folded(keys, rows, np.array(doubled, np.uint64))


def _fold_multiset(changes: Matrix) -> Folded:
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
    return Folded(found, found, keys[is_repeated])


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
