"""Rows of two sides as numbers, against counting them."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ingestd.digests.value_hashes import Hashes
from ingestd.pipeline.verify.compare import Differing, TableCompared
from ingestd.pipeline.verify.fold import FoldedHashes
from ingestd.ports.verify import Kind, Matrix

NONE = np.empty(0, np.uint64)
Pairs = dict[int, int]


def source_of(pairs: list[tuple[int, int]]) -> Matrix:
    rows = [(key, row, number % 3) for number, (key, row) in enumerate(pairs)]
    found: Matrix = np.array(rows, np.uint64).reshape(-1, 3)
    return found


def lake_of(pairs: list[tuple[int, int]], doubled: Hashes = NONE) -> FoldedHashes:
    keys, rows = np.array(sorted(pairs), np.uint64).reshape(-1, 2).T
    return FoldedHashes(keys, rows, doubled)


def compared(
    source: Matrix, lake: FoldedHashes, *, has_key: bool = True, tracked: int = 1000
) -> TableCompared:
    found = TableCompared(tracked=tracked)
    found.compare_partition(source, lake, has_key=has_key)
    return found


small = st.integers(0, 5)


@given(st.dictionaries(small, small), st.dictionaries(small, small))
def test_keyed_rows(source: Pairs, lake: Pairs) -> None:
    found = compared(source_of(list(source.items())), lake_of(list(lake.items())))
    assert found.counts == {
        kind: count
        for kind, count in (
            (Kind.MISSING, len(source.keys() - lake.keys())),
            (Kind.EXTRA, len(lake.keys() - source.keys())),
            (Kind.DIFFERENT, sum(source[k] != lake[k] for k in source.keys() & lake.keys())),
        )
        if count
    }
    assert found.is_equal == (source == lake)
    named = {(d.kind, d.key) for d in found.some(100)}
    assert len(named) == found.counts.total()
    assert all((d.split is None) == (d.kind is Kind.EXTRA) for d in found.some(100))


@given(st.lists(small), st.lists(small))
def test_whole_rows_count_as_often_as_they_are_there(source: list[int], lake: list[int]) -> None:
    whole = FoldedHashes(*(np.array(sorted(lake), np.uint64),) * 2, NONE)
    found = compared(source_of([(n, n) for n in source]), whole, has_key=False)
    missing, extra = Counter(source) - Counter(lake), Counter(lake) - Counter(source)
    by_kind = {
        kind: {d.key: d.count for d in found.some(100) if d.kind is kind}
        for kind in (Kind.MISSING, Kind.EXTRA)
    }
    assert by_kind == {Kind.MISSING: missing, Kind.EXTRA: extra}
    assert (found.source_rows, found.lake_rows) == (len(source), len(lake))


def test_differences_can_be_retained_dropped_and_distinguished() -> None:
    lake = lake_of([(1, 1), (2, 2)], np.array([1, 1], np.uint64))
    first = compared(source_of([(1, 7), (3, 3)]), lake)
    later = compared(source_of([(1, 8), (3, 3)]), lake)
    assert first.counts == {Kind.DIFFERENT: 1, Kind.MISSING: 1, Kind.EXTRA: 1, Kind.DOUBLED: 2}
    later.retain_differences(first.prints())
    assert later.counts == {Kind.MISSING: 1, Kind.EXTRA: 1, Kind.DOUBLED: 2}
    later.without(Kind.EXTRA)
    assert later.counts == {Kind.MISSING: 1, Kind.DOUBLED: 2}
    first.drop(Differing(Kind.DIFFERENT, 1, 1, 0))
    assert first.counts == {Kind.MISSING: 1, Kind.EXTRA: 1, Kind.DOUBLED: 2}


def test_of_very_many_differences_some_are_kept() -> None:
    found = compared(source_of([(n, n) for n in range(50)]), lake_of([]), tracked=10)
    assert found.counts == {Kind.MISSING: 50}
    assert (found.is_complete, len(found.some(100))) == (False, 10)
    found.drop(found.some(1)[0])
    assert found.counts == {Kind.MISSING: 49}
