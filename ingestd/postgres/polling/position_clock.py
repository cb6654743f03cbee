"""Positions of polls: LSNs, each above the one before, like those of transactions."""

from __future__ import annotations

from ingestd.model.lsn import ZERO, Lsn


class Positions:
    """Issues positions. `end` is above every position issued so far.

    On an idle server, or a standby, two polls may be at one LSN and still see different rows: a
    commit is in the WAL before it is visible. The second poll then takes the next number.
    """

    def __init__(self) -> None:
        self.end = ZERO

    def begin_at(self, position: Lsn) -> None:
        """Issue no position below this one."""
        self.end = max(self.end, position)

    def next_position(self, lsn: Lsn) -> Lsn:
        """Return the position of rows that were read while the server was at `lsn`."""
        taken = max(self.end, lsn)
        self.end = Lsn(taken + 1)
        return taken

    def release_position(self, position: Lsn) -> None:
        """Record that nothing was found at `position`: if it was the last, it is free again."""
        if self.end == position + 1:
            self.end = position

    def pass_by(self, lsn: Lsn) -> None:
        """Record that nothing was found up to `lsn`."""
        self.end = max(self.end, lsn)

    def advance(self) -> None:
        """Increment the end, even if the server stays idle."""
        self.end = Lsn(self.end + 1)
