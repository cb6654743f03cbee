"""Positions of polls: LSNs that grow from each to the next, as those of transactions do."""

from __future__ import annotations

from ingestd.model.lsn import ZERO, Lsn


class Positions:
    """Gives out positions. `end`: everything that was given out lies below it.

    On an idle server, or a standby, two looks may be at one LSN, and see different rows even so: a
    commit is in the WAL before it is visible. Then the second takes the next number.
    """

    def __init__(self) -> None:
        self.end = ZERO

    def begin_at(self, position: Lsn) -> None:
        """Give out none below this."""
        self.end = max(self.end, position)

    def take(self, lsn: Lsn) -> Lsn:
        """Return the position of rows that were read when the server was at `lsn`."""
        taken = max(self.end, lsn)
        self.end = Lsn(taken + 1)
        return taken

    def give_back(self, position: Lsn) -> None:
        """Record that nothing was found at `position`: it is free again, if it was the last."""
        if self.end == position + 1:
            self.end = position

    def pass_by(self, lsn: Lsn) -> None:
        """Record that nothing was found up to `lsn`."""
        self.end = max(self.end, lsn)

    def move_on(self) -> None:
        """Let the end grow, were the server idle indefinitely."""
        self.end = Lsn(self.end + 1)
