"""The identity of rows whose keys change. Pure.

A row keeps its values when its key changes, and another row may then take the old key. So a row is
identified by its first key and the position since which it had that key. At any time a key belongs
to one row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

Position = tuple[int, int]
"""(`_cdc_lsn`, `_cdc_seq`)."""
START: Position = (0, 0)


class KeyHashes(NamedTuple):
    """The two hashes of a key."""

    h1: int
    h2: int


@dataclass(frozen=True, slots=True)
class KeyMove:
    """From `position` on, the row with the key `old` has the key `new`."""

    old: KeyHashes
    new: KeyHashes
    position: Position


@dataclass(frozen=True, slots=True)
class Lineage:
    """From `start` to below `end` (None: indefinitely), `key` belongs to the row (first, since).

    Before its first lineage, and if it is in no move, a key belongs to the row (key, START).
    """

    key: KeyHashes
    start: Position
    end: Position | None
    first: KeyHashes
    since: Position


def lineages(moves: Iterable[KeyMove]) -> list[Lineage]:
    """Return the lineages of all keys in these moves, in any order."""
    begun: dict[KeyHashes, list[tuple[Position, KeyHashes, Position]]] = {}
    for move in sorted(moves, key=lambda m: m.position):
        had = begun.get(move.old)
        first, since = had[-1][1:] if had else (move.old, START)
        begun.setdefault(move.new, []).append((move.position, first, since))
        begun.setdefault(move.old, []).append((move.position, move.old, move.position))
    found = []
    for key, starts in begun.items():
        ends = [*(start for start, _, _ in starts[1:]), None]
        for (start, first, since), end in zip(starts, ends, strict=True):
            found.append(Lineage(key, start, end, first, since))
    return found
