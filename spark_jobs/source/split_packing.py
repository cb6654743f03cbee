"""Packs splits into a given number of partitions of about the same size."""

from __future__ import annotations

from collections.abc import Sequence

from ingestd.ports import Split

Bins = tuple[tuple[Split, ...], ...]
"""What each partition reads; some may read nothing."""


def packed(splits: Sequence[Split], count: int) -> Bins:
    """Return `count` bins that have every split once: the largest first, each to the emptiest.

    Splits of a bin stay in their order, so that blocks are read as they lie.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    sizes = [0] * count
    for number in sorted(range(len(splits)), key=lambda n: -splits[n].estimated_bytes):
        # Not all to the first one while sizes are 0: a table that was never vacuumed tells none.
        emptiest = min(range(count), key=lambda b: (sizes[b], len(bins[b])))
        bins[emptiest].append(number)
        sizes[emptiest] += splits[number].estimated_bytes
    return tuple(tuple(splits[number] for number in sorted(one)) for one in bins)
