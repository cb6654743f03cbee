"""A backlog cut into parts, which several temporary slots drain at the same time (`drain.py`).

A transaction belongs to the part in which its commit record starts (its commit_lsn). A call of the
SQL functions up to a bound returns all transactions whose commit record starts below it; a slot
that was moved to a bound returns all whose commit record starts there or later. So two parts meet
without gap or overlap, whatever transactions span the bound: unless it is in the header of a page,
which belongs to no record. Source: PostgreSQL, src/backend/replication/logical:
logicalfuncs.c (pg_logical_slot_get_changes_guts), snapbuild.c (SnapBuildXactNeedsSkip).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from ingestd.model.lsn import Lsn

LEAST_BYTES = 64 << 20
"""The least average size of parts into which a backlog is cut only to use several slots."""
FIRST_PERCENT = 65
"""The first part's size, relative to the others. It is decoded when the next has been made, if
decoding takes half of the time in which two slots make parts side by side (1 / (1 + 0.54))."""
SPARSE_RATIO = 16
MOST_JOINED = 4
MESSAGE_BYTES = 128
"""The assumed size of a message until the first one arrives."""
_MOST_MESSAGES = (1 << 31) - 1
"""The limit of the function's argument, an int4."""
_PAGE_BYTES, _INSIDE_BYTES = 8192, 512
"""WAL pages have a power of two of bytes, at least 1024; their headers have at most 40."""


@dataclass(frozen=True, slots=True)
class BacklogPart:
    """The transactions with `begin` <= commit_lsn < `end`.

    `most_messages`: for joined parts, the number of messages after which the result ends early, at
    the end of a transaction; 0 for a single part, which does not end early.
    """

    begin: Lsn
    end: Lsn
    most_messages: int = 0

    @property
    def is_joined(self) -> bool:
        """True if it was joined from several parts."""
        return self.most_messages > 0

    def up_to(self, position: Lsn) -> BacklogPart:
        """Return the transactions of this part below `position`."""
        return replace(self, end=position)

    def after(self, position: Lsn) -> BacklogPart:
        """Return the transactions of this part at `position` or above."""
        return replace(self, begin=position)


def cut(start: Lsn, target: Lsn, *, slots: int, part_bytes: int) -> list[BacklogPart]:
    """Return the parts of `start` to `target` in order, of at most about `part_bytes`.

    There are at least `slots`, if that leaves enough for each. With several slots the first part is
    smaller, to be decoded while the server makes the next. `start` is a position of the slot,
    `target` a position of the server: the end of a record or of a page, so neither is in a header.
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
    return [BacklogPart(begin, end) for begin, end in pairwise(bounds)]


def _inside_page(position: int) -> Lsn:
    return Lsn(position - position % _PAGE_BYTES + _INSIDE_BYTES)


class PartQueue:
    """The parts that are still to be made, in order.

    A transaction that begins in one part and commits in a later one is decoded for each part in
    between, from its beginning. So parts are joined, ever more at a time, while they hold next to
    nothing. Nothing shows when they hold more again, so joined parts end by a number of messages:
    the server keeps no more than for other parts, about `part_bytes`, and one transaction.

    `sparse_ratio`: a part whose WAL exceeds its messages by this factor is part of a large
    transaction that commits later, or holds WAL that is irrelevant here.
    """

    def __init__(
        self,
        parts: Iterable[BacklogPart],
        *,
        part_bytes: int,
        most_joined: int = MOST_JOINED,
        sparse_ratio: int = SPARSE_RATIO,
    ) -> None:
        self._waiting = deque(parts)
        self._part_bytes = part_bytes
        self._at_a_time = 1
        self._most_joined = most_joined
        self._sparse_ratio = sparse_ratio
        self._messages = self._nbytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def next_part(self) -> BacklogPart | None:
        """Return the next part, joined or single; None if none is left."""
        if not self._waiting:
            return None
        joined = [self._waiting.popleft() for _ in range(min(self._at_a_time, len(self._waiting)))]
        if len(joined) == 1:
            return joined[0]
        message_bytes = self._nbytes / self._messages if self._messages else MESSAGE_BYTES
        most_messages = max(1, min(round(self._part_bytes / message_bytes), _MOST_MESSAGES))
        return BacklogPart(joined[0].begin, joined[-1].end, most_messages)

    def note_messages(self, count: int, nbytes: int) -> None:
        """Record the number and the size of some messages."""
        self._messages += count
        self._nbytes += nbytes

    def note_size(self, part: BacklogPart, nbytes: int) -> None:
        """Record how many bytes of messages a part held."""
        is_sparse = nbytes * self._sparse_ratio < part.end - part.begin
        self._at_a_time = min(2 * self._at_a_time, self._most_joined) if is_sparse else 1

    def clear(self) -> None:
        """Drop the remaining parts."""
        self._waiting.clear()
