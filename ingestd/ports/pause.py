"""Where it is kept that a source is paused."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol


class PauseMark(Protocol):
    """Says of one source, durably and beside its tables, that nothing of it must be delivered.

    It outlives the daemon, and holds for whoever works on that lake. All may be called at any time,
    twice, and whether someone holds the source's claim or not: it says what is wanted. Times are
    aware. Raises OperatorError, TransientError (storage).
    """

    async def since(self) -> datetime | None:
        """Since when the source is paused; None if it is not."""
        ...

    async def put(self, now: datetime) -> datetime:
        """Pause it, if it is not: gives since when it is. Durable when this returns."""
        ...

    async def clear(self) -> bool:
        """Take the mark away; False if there was none. Durable when this returns."""
        ...
