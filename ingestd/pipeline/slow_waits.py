"""Work that waits for others, whom a person may have to look for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

WAITING_S = 5.0
"""When it is told that reading, or a new slot, waits for others' transactions to end."""

T = TypeVar("T")


async def warn_if_slow(work: Coroutine[Any, Any, T], tell: Callable[[], None]) -> T:
    """Do the work, and `tell` once if it takes long. It has ended when this returns or raises."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=WAITING_S)
        if not task.done():
            tell()
        return await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
