"""Warns when work waits long for other transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ingestd.process.tasks import cancel_all

WAITING_S = 5.0
"""How long a read or a new slot may wait for other transactions before a warning."""

T = TypeVar("T")


async def warn_if_slow(work: Coroutine[Any, Any, T], warn: Callable[[], None]) -> T:
    """Await `work`; call `warn` once if it exceeds `WAITING_S`. The work has ended on return."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=WAITING_S)
        if not task.done():
            warn()
        return await task
    finally:
        await cancel_all(task)
