"""The end of asyncio tasks."""

from __future__ import annotations

import asyncio
from typing import Any


async def cancel_all(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel tasks and return once they have ended; their errors are dropped."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
