"""Blocking work in threads, which outlives the cancellation of who waits for it.

A thread can't be stopped. Who is cancelled while it works must not go on (or be succeeded) as if
it had not: `settle` waits until all work begun has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

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


async def ahead(items: Generator[T, None, None]) -> AsyncGenerator[T, None]:
    """Give what a generator does that blocks, in a thread of its own, an item ahead of who asks.

    One thread, because what it allocates and others free can then be used again.
    """
    thread = ThreadPoolExecutor(1, "reading")
    loop = asyncio.get_running_loop()
    try:
        coming = loop.run_in_executor(thread, _next, items)
        while (found := await coming) is not None:
            coming = loop.run_in_executor(thread, _next, items)
            yield found
    finally:
        thread.submit(items.close)  # after what it is at
        thread.shutdown(wait=False)


def _next(items: Generator[T, None, None]) -> T | None:
    return next(items, None)


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
