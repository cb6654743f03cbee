"""A backlog cut into parts that several temporary slots drain at the same time.

A transaction belongs to the part in which its commit record starts (its commit_lsn). A call of the
SQL functions up to a bound gives all that commit in a record that starts below it; a slot that was
moved to a bound gives all that commit in one that starts there or later. So two parts meet without
a gap and without an overlap, whatever transactions lie across the bound: but not if it lies in the
header of a page, which belongs to no record. Source: PostgreSQL, src/backend/replication/logical:
logicalfuncs.c (pg_logical_slot_get_changes_guts), snapbuild.c (SnapBuildXactNeedsSkip).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from ingestd.positions import Lsn

LEAST_BYTES = 64 << 20
"""A backlog is cut for the sake of several slots only into parts of so much WAL on average."""
FIRST_PERCENT = 65
"""Of another part's size: the first is decoded when the next has been made, if decoding takes half
of the time that two slots need to make parts side by side (1 / (1 + 0.54))."""
SPARSE_RATIO = 16
"""A part with so many times more WAL than messages tells of a large transaction that commits later,
or of WAL that is of no concern here."""
MOST_JOINED = 4
"""The server keeps what so many parts hold at once, if they hold more than those before them."""
_PAGE_BYTES, _INSIDE_BYTES = 8192, 512
"""Pages of WAL have a power of two of bytes, at least 1024; their headers have 40 at most."""


@dataclass(frozen=True, slots=True)
class Part:
    """The transactions whose commit_lsn is in `begin` to below `end`.

    `is_joined`: it was several.
    """

    begin: Lsn
    end: Lsn
    is_joined: bool = False


def cut(start: Lsn, target: Lsn, *, slots: int, part_bytes: int) -> list[Part]:
    """Give the parts of `start` to `target` in order, of about `part_bytes` at most.

    There are at least `slots`, if that leaves enough for each. With several slots the first is
    smaller, to be decoded while the server makes the next. `start` is a position of the slot,
    `target` where the server was: the end of a record or of a page, so neither is in a header.
    """
    nbytes = target - start
    if nbytes <= 0:
        return []
    first = FIRST_PERCENT if slots > 1 else 100
    needed = -(-(100 * nbytes + (100 - first) * part_bytes) // (100 * part_bytes))
    count = max(needed, min(slots, nbytes // LEAST_BYTES), 1)
    total = first + 100 * (count - 1)
    inside = {_inside_page(start + nbytes * (total - 100 * n) // total) for n in range(1, count)}
    bounds = [start, *sorted(bound for bound in inside if start < bound < target), target]
    return [Part(begin, end) for begin, end in pairwise(bounds)]


def _inside_page(position: int) -> Lsn:
    return Lsn(position - position % _PAGE_BYTES + _INSIDE_BYTES)


class PartQueue:
    """The parts that are still to be made, in order.

    What begins in one part and commits in a later one is decoded for each of those between, from
    where it began. So they are joined, ever more at a time, while they hold next to nothing.
    """

    def __init__(self, parts: Iterable[Part], *, most_joined: int = MOST_JOINED) -> None:
        self._waiting = deque(parts)
        self._at_a_time = 1
        self._most_joined = most_joined

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> Part | None:
        """Give the next, if there is one."""
        if not self._waiting:
            return None
        joined = [self._waiting.popleft() for _ in range(min(self._at_a_time, len(self._waiting)))]
        return Part(joined[0].begin, joined[-1].end, is_joined=len(joined) > 1)

    def note_size(self, part: Part, nbytes: int) -> None:
        """Take how many bytes of messages a part held."""
        is_sparse = nbytes * SPARSE_RATIO < part.end - part.begin
        self._at_a_time = min(2 * self._at_a_time, self._most_joined) if is_sparse else 1

    def clear(self) -> None:
        """Drop them."""
        self._waiting.clear()
