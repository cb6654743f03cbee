"""When failed work is retried (design section 6), and when slow work is reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ingestd.model.backoff import Backoff
from ingestd.model.errors import IngestdError, TransientError

TRANSIENT = Backoff(0.5, 30.0)
OPERATOR_DELAY_S = 60.0
HELD = Backoff(0.5, 3.0)
"""While another daemon, or an old connection, has the source: that ends soon, most often in an
update, and asking costs one connection."""
_HELD = {"claimed", "claim_lost", "slot_active"}


def retry_delay_s(error: IngestdError, attempt: int, jitter: float) -> float:
    """Return the delay after the `attempt`-th failure in a row (from 1); `jitter` in [0, 1)."""
    if not isinstance(error, TransientError):
        return OPERATOR_DELAY_S
    backoff = HELD if error.reason in _HELD else TRANSIENT
    return backoff.after(attempt) * (0.5 + 0.5 * jitter)


# --- slow waits ------------------------------------------------------------

WAITING_S = 5.0
"""How long a read or a new slot may wait for other transactions before a warning."""

T = TypeVar("T")


async def warn_if_slow(work: Coroutine[Any, Any, T], tell: Callable[[], None]) -> T:
    """Await `work`; call `tell` once if it exceeds `WAITING_S`. The work has ended on return."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=WAITING_S)
        if not task.done():
            tell()
        return await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
