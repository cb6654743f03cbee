"""Sorted arrays of distinct hashes, changed in place: a copy would double the memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ingestd.digests.value_hashes import Hashes

_BLOCK = 1 << 19
"""The number of hashes moved at a time (4 MB)."""

Flags = NDArray[np.bool_]


def find(hashes: Hashes, wanted: Hashes) -> tuple[NDArray[np.int64], Flags]:
    """Return where each of the `wanted` (in any order) is in sorted `hashes`, and whether it is.

    The index of a missing one is meaningless. The search is several times as fast in order.
    """
    order = np.argsort(wanted)
    index, is_there = np.empty(len(wanted), np.int64), np.empty(len(wanted), np.bool_)
    index[order], is_there[order] = find_sorted(hashes, wanted[order])
    return index, is_there


def find_sorted(hashes: Hashes, wanted: Hashes) -> tuple[NDArray[np.int64], Flags]:
    """Return the same as `find` for sorted `wanted`."""
    if not len(hashes):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.bool_)
    at = np.minimum(np.searchsorted(hashes, wanted), len(hashes) - 1)
    return at, hashes[at] == wanted


def joined(*parts: Hashes) -> Hashes:
    """Return all hashes of these arrays, sorted, each once."""
    hashes = np.concatenate(parts)
    cut_to(hashes, distinct(hashes, len(hashes)))
    return hashes


def without(hashes: Hashes, others: Hashes) -> Hashes:
    """Return those of sorted `hashes` that are not among sorted `others`."""
    return hashes[~find_sorted(others, hashes)[1]]


def distinct(hashes: Hashes, count: int, *, block_size: int = _BLOCK) -> int:
    """Sort the first `count`, move the distinct ones to the front, and return their number."""
    hashes[:count].sort()
    kept, last = 0, None
    for start in range(0, count, block_size):
        block = hashes[start : min(start + block_size, count)].copy()
        is_new = np.ones(len(block), np.bool_)
        is_new[1:] = block[1:] != block[:-1]
        is_new[0] = last is None or block[0] != last
        last = block[-1]
        found = block[is_new]
        hashes[kept : kept + len(found)] = found
        kept += len(found)
    return kept


def cut_to(hashes: Hashes, count: int) -> None:
    """Free the memory behind the first `count`; nothing else may refer to the array."""
    hashes.resize(count, refcheck=False)


def remove(hashes: Hashes, gone: Hashes, *, block_size: int = _BLOCK) -> None:
    """Remove sorted `gone`, which must all be present, from sorted `hashes`."""
    kept = 0
    for start in range(0, len(hashes), block_size):
        block = hashes[start : start + block_size]
        first = int(np.searchsorted(gone, block[0]))
        end = int(np.searchsorted(gone, block[-1], side="right"))
        stays = np.ones(len(block), np.bool_)
        index, is_there = find_sorted(block, gone[first:end])
        stays[index[is_there]] = False
        found = block[stays]
        hashes[kept : kept + len(found)] = found
        kept += len(found)
    cut_to(hashes, kept)


def add(hashes: Hashes, more: Hashes, *, block_size: int = _BLOCK) -> None:
    """Insert sorted `more`, which must all be absent, into sorted `hashes`."""
    left, to_come = len(hashes), len(more)
    hashes.resize(left + to_come, refcheck=False)
    while to_come:  # from the end, so that nothing is overwritten before it is moved
        start = max(0, left - block_size)
        first = int(np.searchsorted(more[:to_come], hashes[start])) if start else 0
        joined = np.concatenate([hashes[start:left], more[first:to_come]])
        joined.sort()
        hashes[start + first : left + to_come] = joined
        left, to_come = start, first
