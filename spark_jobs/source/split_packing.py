"""Packs splits into a given number of partitions of similar size."""

from __future__ import annotations

from collections.abc import Sequence

from ingestd.ports import Split

Bins = tuple[tuple[Split, ...], ...]
"""The splits of each partition; a partition may have none."""


def packed(splits: Sequence[Split], count: int) -> Bins:
    """Return `count` bins that share the splits: the largest first, each to the emptiest bin.

    The splits of a bin stay in order, so that blocks are read sequentially.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    sizes = [0] * count
    for number in sorted(range(len(splits)), key=lambda n: -splits[n].estimated_bytes):
        # A table that was never vacuumed has sizes of 0: don't put all splits into the first bin.
        emptiest = min(range(count), key=lambda b: (sizes[b], len(bins[b])))
        bins[emptiest].append(number)
        sizes[emptiest] += splits[number].estimated_bytes
    return tuple(tuple(splits[number] for number in sorted(one)) for one in bins)
