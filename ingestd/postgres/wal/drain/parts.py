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
from dataclasses import dataclass, replace
from itertools import pairwise

from ingestd.model.lsn import Lsn

LEAST_BYTES = 64 << 20
"""A backlog is cut for the sake of several slots only into parts of so much WAL on average."""
FIRST_PERCENT = 65
"""Of another part's size: the first is decoded when the next has been made, if decoding takes half
of the time that two slots need to make parts side by side (1 / (1 + 0.54))."""
SPARSE_RATIO = 16
"""A part with so many times more WAL than messages tells of a large transaction that commits later,
or of WAL that is of no concern here."""
MOST_JOINED = 4
MESSAGE_BYTES = 128
"""A message is taken to have so many while none has come."""
_MOST_MESSAGES = (1 << 31) - 1
"""An int4 says how many."""
_PAGE_BYTES, _INSIDE_BYTES = 8192, 512
"""Pages of WAL have a power of two of bytes, at least 1024; their headers have 40 at most."""


@dataclass(frozen=True, slots=True)
class WalSegment:
    """The transactions whose commit_lsn is in `begin` to below `end`.

    `most_messages`: it was several, and ends sooner, after the transaction with which it has so
    many; 0: it was one, and does not.
    """

    begin: Lsn
    end: Lsn
    most_messages: int = 0

    @property
    def is_joined(self) -> bool:
        """Whether it was several."""
        return self.most_messages > 0

    def up_to(self, position: Lsn) -> WalSegment:
        """Return what of it lies below `position`."""
        return replace(self, end=position)

    def after(self, position: Lsn) -> WalSegment:
        """Return what of it lies there and above."""
        return replace(self, begin=position)


def cut(start: Lsn, target: Lsn, *, slots: int, part_bytes: int) -> list[WalSegment]:
    """Return the parts of `start` to `target` in order, of about `part_bytes` at most.

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
    return [WalSegment(begin, end) for begin, end in pairwise(bounds)]


def _inside_page(position: int) -> Lsn:
    return Lsn(position - position % _PAGE_BYTES + _INSIDE_BYTES)


class PartQueue:
    """The parts that are still to be made, in order.

    What begins in one part and commits in a later one is decoded for each of those between, from
    where it began. So they are joined, ever more at a time, while they hold next to nothing.
    Nothing tells when they hold more again, so what is joined ends by the number of its messages:
    the server keeps no more than of other parts, about `part_bytes`, and one transaction.
    """

    def __init__(
        self, parts: Iterable[WalSegment], *, part_bytes: int, most_joined: int = MOST_JOINED
    ) -> None:
        self._waiting = deque(parts)
        self._part_bytes = part_bytes
        self._at_a_time = 1
        self._most_joined = most_joined
        self._messages = self._nbytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self) -> WalSegment | None:
        """Return the next, if there is one."""
        if not self._waiting:
            return None
        joined = [self._waiting.popleft() for _ in range(min(self._at_a_time, len(self._waiting)))]
        if len(joined) == 1:
            return joined[0]
        message_bytes = self._nbytes / self._messages if self._messages else MESSAGE_BYTES
        most_messages = max(1, min(round(self._part_bytes / message_bytes), _MOST_MESSAGES))
        return WalSegment(joined[0].begin, joined[-1].end, most_messages)

    def note_messages(self, count: int, nbytes: int) -> None:
        """Take of what size some were."""
        self._messages += count
        self._nbytes += nbytes

    def note_size(self, part: WalSegment, nbytes: int) -> None:
        """Take how many bytes of messages a part held."""
        is_sparse = nbytes * SPARSE_RATIO < part.end - part.begin
        self._at_a_time = min(2 * self._at_a_time, self._most_joined) if is_sparse else 1

    def clear(self) -> None:
        """Drop them."""
        self._waiting.clear()
