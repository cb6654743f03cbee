"""Compares the rows of the source with those of the lake, as numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ingestd.digests.value_hashes import Hashes, mixed
from ingestd.pipeline.verify.fold import FoldedHashes
from ingestd.ports.verify import KEY, ROW, SPLIT, Kind, Matrix

KINDS = (Kind.DIFFERENT, Kind.DOUBLED, Kind.EXTRA, Kind.MISSING)
_FIELDS = 6
_KIND, _KEY, _SOURCE, _LAKE, _COUNT, _SPLIT = range(_FIELDS)
NO_SPLIT = (1 << 64) - 1
TRACKED = 100_000
"""Maximum number of differences kept per table by default."""


@dataclass(frozen=True, slots=True)
class Differing:
    """A differing row: the hash of its key, its count, and the index of its split, if any."""

    kind: Kind
    key: int
    count: int
    split: int | None


@dataclass(slots=True)
class TableCompared:
    """The result for a table, partition by partition.

    `tracked`: the maximum number of differences that are kept; the others are counted.
    """

    source_rows: int = 0
    lake_rows: int = 0
    counts: Counter[Kind] = field(default_factory=Counter)
    tracked: int = TRACKED
    _kept: Matrix = field(default_factory=lambda: np.empty((0, _FIELDS), np.uint64))

    @property
    def is_equal(self) -> bool:
        """True if nothing differs."""
        return not self.counts.total()

    def compare_partition(self, source: Matrix, folded: FoldedHashes, *, has_key: bool) -> None:
        """Compare the rows of a partition."""
        self.source_rows += len(source)
        self.lake_rows += len(folded.keys)
        compare = _keyed if has_key else _multiset
        found = [*compare(source, folded), _doubled(folded.doubled)]
        for differing in found:
            for kind, count in _totals(differing).items():
                self.counts[kind] += count
        room = max(0, self.tracked - len(self._kept))
        self._kept = np.concatenate([self._kept, np.concatenate(found)[:room]])

    def prints(self) -> Hashes:
        """Return hashes that identify the differences, for comparison with another run."""
        found = np.zeros(len(self._kept), np.uint64)
        for place in (_KIND, _KEY, _SOURCE, _LAKE, _COUNT):
            found = mixed(found ^ self._kept[:, place])
        return found

    def retain_differences(self, prints: Hashes) -> bool:
        """Drop the differences that are not among these; return whether any are left."""
        self._kept = self._kept[np.isin(self.prints(), prints)]
        self.counts = Counter(_totals(self._kept))
        return not self.is_equal

    def drop(self, one: Differing) -> None:
        """Drop a difference: the row is equal after all."""
        number = np.uint64(KINDS.index(one.kind))
        is_it = (self._kept[:, _KEY] == np.uint64(one.key)) & (self._kept[:, _KIND] == number)
        self.counts -= Counter(_totals(self._kept[is_it]))
        self._kept = self._kept[~is_it]

    def without(self, kind: Kind) -> None:
        """Drop the differences of a kind."""
        self._kept = self._kept[self._kept[:, _KIND] != np.uint64(KINDS.index(kind))]
        self.counts.pop(kind, None)

    @property
    def is_complete(self) -> bool:
        """True if all differences were kept."""
        return int(self._kept[:, _COUNT].sum()) == self.counts.total()

    def some(self, limit: int) -> list[Differing]:
        """Return the first differences, in a stable order."""
        order = np.lexsort((self._kept[:, _KEY], self._kept[:, _KIND]))[:limit]
        return [
            Differing(
                KINDS[kind],
                key,
                count,
                None if split == NO_SPLIT else split,
            )
            for kind, key, _, _, count, split in self._kept[order].tolist()
        ]


def _totals(rows: Matrix) -> Mapping[Kind, int]:
    return {
        kind: total
        for number, kind in enumerate(KINDS)
        if (total := int(rows[rows[:, _KIND] == np.uint64(number), _COUNT].sum()))
    }


def _keyed(source: Matrix, folded: FoldedHashes) -> list[Matrix]:
    source = source[np.argsort(source[:, KEY], kind="stable")]
    keys = source[:, KEY]
    at, is_there = _find(folded.keys, keys)
    rows = folded.rows[at] if len(folded.rows) else np.zeros(len(keys), np.uint64)
    differs = is_there & (rows != source[:, ROW])
    _, is_known = _find(keys, folded.keys)
    missing = source[~is_there]
    other = source[differs]
    return [
        _rows(Kind.MISSING, missing[:, KEY], missing[:, ROW], split=missing[:, SPLIT]),
        _rows(Kind.DIFFERENT, other[:, KEY], other[:, ROW], rows[differs], split=other[:, SPLIT]),
        _rows(Kind.EXTRA, folded.keys[~is_known], lake=folded.rows[~is_known]),
    ]


def _multiset(source: Matrix, folded: FoldedHashes) -> list[Matrix]:
    keys, first, counts = np.unique(source[:, KEY], return_index=True, return_counts=True)
    own, own_counts = np.unique(folded.keys, return_counts=True)
    every = np.union1d(keys, own)
    there, here = np.zeros(len(every), np.int64), np.zeros(len(every), np.int64)
    splits = np.full(len(every), NO_SPLIT, np.uint64)
    at = np.searchsorted(every, keys)
    there[at], splits[at] = counts, source[first, SPLIT]
    here[np.searchsorted(every, own)] = own_counts
    more, less = there > here, there < here
    return [
        _rows(Kind.MISSING, every[more], split=splits[more], count=(there - here)[more]),
        _rows(Kind.EXTRA, every[less], split=splits[less], count=(here - there)[less]),
    ]


def _doubled(keys: Hashes) -> Matrix:
    found, counts = np.unique(keys, return_counts=True)
    return _rows(Kind.DOUBLED, found, count=counts)


def _rows(
    kind: Kind,
    keys: Hashes,
    source: Hashes | None = None,
    lake: Hashes | None = None,
    *,
    count: NDArray[np.int64] | None = None,
    split: Hashes | None = None,
) -> Matrix:
    found = np.zeros((len(keys), _FIELDS), np.uint64)
    found[:, _KIND] = KINDS.index(kind)
    found[:, _KEY] = keys
    if source is not None:
        found[:, _SOURCE] = source
    if lake is not None:
        found[:, _LAKE] = lake
    found[:, _COUNT] = 1 if count is None else count
    found[:, _SPLIT] = NO_SPLIT if split is None else split
    return found


def _find(known: Hashes, keys: Hashes) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the indexes of keys in `known` (sorted), and whether they exist."""
    if not len(known):
        return np.zeros(len(keys), np.int64), np.zeros(len(keys), np.bool_)
    at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return at, known[at] == keys
