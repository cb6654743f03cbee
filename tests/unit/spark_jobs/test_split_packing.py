"""Splits packed into partitions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ingestd.model.schema import Table, TableId
from ingestd.ports import Split
from spark_jobs.source.split_packing import packed

TABLE = Table(TableId("public", "t"), 1, ())


@given(st.lists(st.integers(0, 10**9)), st.integers(1, 20))
def test_every_split_is_in_one_partition_in_its_order(sizes: list[int], count: int) -> None:
    splits = [Split(TABLE, "s", str(n), size) for n, size in enumerate(sizes)]
    bins = packed(splits, count)
    assert len(bins) == count
    assert sorted((s for one in bins for s in one), key=lambda s: int(s.where)) == splits
    assert all([int(s.where) for s in one] == sorted(int(s.where) for s in one) for one in bins)
    loads = [sum(s.estimated_bytes for s in one) for one in bins]
    assert max(loads) <= sum(sizes) / count + max(sizes, default=0)


def test_splits_of_no_size_are_spread() -> None:
    splits = [Split(TABLE, "s", str(n), 0) for n in range(6)]
    assert [len(one) for one in packed(splits, 3)] == [2, 2, 2]
