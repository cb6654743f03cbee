"""A pause mark in memory."""

from __future__ import annotations

from datetime import datetime

from ingestd.model.errors import IngestdError


class FakePauseMark:
    """ports.PauseMark. `error`: raised by every call while it is set."""

    def __init__(self) -> None:
        self.at: datetime | None = None
        self.error: IngestdError | None = None

    async def since(self) -> datetime | None:
        """Return when the mark was set."""
        self._fail()
        return self.at

    async def put(self, now: datetime) -> datetime:
        """Set the mark unless it is set."""
        self._fail()
        self.at = self.at or now
        return self.at

    async def clear(self) -> bool:
        """Clear the mark; return whether it was set."""
        self._fail()
        was_there, self.at = self.at is not None, None
        return was_there

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error
