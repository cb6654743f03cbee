"""Whether to drain what the stream is behind, or to stream it: decided from positions alone."""

from __future__ import annotations

from dataclasses import dataclass

from ingestd.model.lsn import ZERO, Lsn
from ingestd.postgres.wal.drain.drain import DrainPolicy

LATE_CHECKS = 2
"""A stream that is found far behind so many times in a row ends: the backlog is drained."""


@dataclass(slots=True)
class DrainDecision:
    """Decides for one slot. `policy`: when a drain pays.

    `flushed`: how far the server's WAL is known to go. `reread_bytes`: how much WAL the server
    reads again for each part of a drain (`Slot.reread_bytes`).
    """

    policy: DrainPolicy
    flushed: Lsn = ZERO
    reread_bytes: int = 0
    _late_checks: int = 0
    _backlog_end: Lsn | None = None

    def server_is_at(self, flushed: Lsn, reread_bytes: int, streamed: Lsn | None) -> None:
        """Record how far the server is. `streamed`: how far its stream is, None without one."""
        self.flushed = max(self.flushed, flushed)
        self.reread_bytes = reread_bytes
        is_late = streamed is not None and self.is_late_at(streamed)
        self._late_checks = self._late_checks + 1 if is_late else 0

    def pays_at(self, position: Lsn) -> bool:
        """Return whether to drain what is behind this position before any stream begins."""
        return self.policy.pays(self.flushed - position, self.reread_bytes)

    def is_late_at(self, position: Lsn) -> bool:
        """Return whether to drain again after a drain, or during a stream."""
        return self.policy.is_late(self.flushed - position, self.reread_bytes)

    def rereads_too_much_at(self, position: Lsn) -> bool:
        """Return whether a large backlog is streamed only because the server rereads too much."""
        behind_bytes = self.flushed - position
        is_large = behind_bytes > self.policy.above_bytes
        return is_large and self.policy.is_too_much(self.reread_bytes, behind_bytes)

    def begin_stream(self, start: Lsn) -> None:
        """Record that a stream begins; what it is behind is a backlog until it has passed that."""
        self._late_checks = 0
        self._backlog_end = self.flushed if self.flushed > start else None

    def has_passed_backlog(self, position: Lsn) -> bool:
        """Return, once a stream, whether it has passed what it was behind when it began."""
        if self._backlog_end is None or position < self._backlog_end:
            return False
        self._backlog_end = None
        return True

    def ends_stream_at(self, position: Lsn) -> bool:
        """Return whether to end the stream and drain, at the end of a transaction.

        Not after one that was all that was behind: the server would decode it once more.
        """
        return self._late_checks >= LATE_CHECKS and self.is_late_at(position)
