"""Limits on the commits of others that are read: all tables of a source wait meanwhile (I8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from ingestd.lake.delta.log_files import MOST_COMMIT_BYTES
from ingestd.lake.store.errors import BusyLogError

MOST_BACK = 10_000
"""Maximum number of commits that are read of one log."""
MOST_BACK_BYTES = 4 * MOST_COMMIT_BYTES
MOST_BETWEEN = 256
"""Maximum number for one commit of ours that follows the last at once."""
MOST_BETWEEN_BYTES = 2 * MOST_COMMIT_BYTES
SECONDS_EACH = 1.0
"""One more commit may be read for each time that long since the last reading. To read one takes
0.4 ms on a disk, and up to 2.5 ms if it must be made durable; two requests in a store. So a
program that commits without end takes a small part of the source's time, and the compaction of a
quiet table may commit once a second."""


@dataclass(slots=True)
class ReadingLimit:
    """How many commits, and bytes of them, are still read before the table stops."""

    commits: int
    nbytes: int

    @classmethod
    def of_search(cls) -> ReadingLimit:
        """Return the limit for a search back through a log."""
        return cls(MOST_BACK, MOST_BACK_BYTES)

    def spend(self, nbytes: int, uri: str) -> None:
        """Count a commit before it is read. Raise FolderError beyond the limit.

        A single commit that is too large is refused where it is read.
        """
        self.commits -= 1
        self.nbytes -= min(nbytes, MOST_COMMIT_BYTES)
        if self.commits < 0 or self.nbytes < 0:
            raise BusyLogError(
                f"lake table {uri}: too many commits without rows, or too large ones, in a row"
            )


class ReadingAllowance:
    """How much of a log may be read before the next commit: the more, the longer it was quiet.

    Commits without data by maintenance are legal, and come at their own rate, whether or not the
    table has changes. `now`: not a monotonic clock, which stands still while a machine is suspended
    but others write; a wrong one only moves the limit between its bounds.
    """

    def __init__(self, now: Callable[[], datetime]) -> None:
        self._now = now
        self._current_at = now()

    def note_current(self) -> None:
        """Record that the log was read up to its newest commit."""
        self._current_at = self._now()

    def limit(self) -> ReadingLimit:
        """Return the limit for the next commit."""
        quiet_s = max((self._now() - self._current_at).total_seconds(), 0.0)
        commits = min(MOST_BETWEEN + int(quiet_s / SECONDS_EACH), MOST_BACK)
        nbytes = min(MOST_BETWEEN_BYTES * commits // MOST_BETWEEN, MOST_BACK_BYTES)
        return ReadingLimit(commits, nbytes)
