"""What replaces a message that is too large to buffer."""

from __future__ import annotations

from typing import Protocol


class Shortener(Protocol):
    """Consumes one CopyData message piece by piece."""

    def feed(self, piece: memoryview) -> None:
        """Consume the next piece. Raises ProtocolError."""
        ...

    def finish(self) -> list[bytes]:
        """Return the contents of the messages that replace it. Raises ProtocolError."""
        ...


class DroppedMessage:
    """Keeps nothing of a message."""

    def feed(self, piece: memoryview) -> None:
        """Skip the piece."""

    def finish(self) -> list[bytes]:
        """Return nothing."""
        return []
