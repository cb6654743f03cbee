"""Calls that block, in threads that nothing waits for."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


async def in_daemon_thread(call: Callable[[], T], name: str) -> T:
    """Return what a call returns, or raise what it raises.

    The thread may hang: neither a cancellation nor the end of the process waits for it, as either
    would for a thread of an executor. `name`: the thread's.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def give(outcome: Callable[[], None]) -> None:
        if not done.done():
            outcome()

    def run() -> None:
        outcome: Callable[[], None]
        try:
            outcome = partial(done.set_result, call())
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            outcome = partial(done.set_exception, error)
        try:
            loop.call_soon_threadsafe(give, outcome)
        except RuntimeError:  # the loop has ended meanwhile
            return

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
