"""Blocking work in threads, which outlives the cancellation of who waits for it.

A thread can't be stopped. Who is cancelled while it works must not go on (or be succeeded) as if
it had not: `settle` waits until all work begun has ended.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Jobs:
    """Work begun by one owner, from one event loop."""

    def __init__(self, *, at_once: int) -> None:
        self._running: set[asyncio.Future[Any]] = set()
        self._slots = asyncio.Semaphore(at_once)

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in a thread, when one of `at_once` slots is free.

        Cancelled before that, it is not begun; after that, it goes on and keeps its slot.
        """
        await self._slots.acquire()
        future = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
        self._running.add(future)
        future.add_done_callback(self._ended)
        return await asyncio.shield(future)

    async def settle(self) -> None:
        """Return when nothing begun is running any more; outcomes are not raised here."""
        while self._running:
            await asyncio.wait(self._running)

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._slots.release()
        self._running.discard(future)
        if not future.cancelled():
            future.exception()  # seen: who waited was cancelled, or has it raised


class Turns(Generic[T]):
    """An iterator that threads take turns with: one goes on with it, then perhaps one closes it."""

    def __init__(self, items: Generator[T, None, None]) -> None:
        self._items = items
        self._lock = threading.Lock()

    def next(self) -> T | None:
        """Give the next item, None after the last. Blocks."""
        with self._lock:
            return next(self._items, None)

    def close(self) -> None:
        """End it, when whoever goes on with it is done. Blocks."""
        with self._lock:
            self._items.close()


async def together(works: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Await all; the first failure cancels the others and is raised itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failed:
        first = failed.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise first  # out here, so that its own cause stays
