"""The port of the pause mark: a source is paused."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol


class PauseMark(Protocol):
    """A durable mark, stored next to a source's tables: nothing of the source may be delivered.

    It outlives the daemon and binds every process that works on the lake. All methods may be called
    at any time, twice, and with or without the source's claim: the mark states an intent. Times
    are aware. Raises OperatorError, TransientError (storage).
    """

    async def since(self) -> datetime | None:
        """Return since when the source is paused; None if it is not."""
        ...

    async def put(self, now: datetime) -> datetime:
        """Pause the source and return since when it is paused. Idempotent; durable on return."""
        ...

    async def clear(self) -> bool:
        """Remove the mark; return False if there was none. Durable on return."""
        ...
