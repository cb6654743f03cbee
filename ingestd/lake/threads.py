"""Blocking work in threads, which outlives the cancellation of who waits for it.

A thread can't be stopped. Who is cancelled while it works must not go on (or be succeeded) as if
it had not: `settle` waits until all work begun has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class WorkerThreads:
    """Work begun by one owner, from one event loop, in at most `at_once` threads of its own.

    `within`: another's threads instead, whose `settle` waits for this work too.
    """

    def __init__(self, *, at_once: int, within: WorkerThreads | None = None) -> None:
        self._running: set[asyncio.Future[Any]] = set()
        self._slots = asyncio.Semaphore(at_once)
        self._at_once = at_once
        self._within = within
        self._threads: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in a thread, when one of `at_once` slots is free.

        Cancelled before that, it is not begun; after that, it goes on and keeps its slot.
        """
        call = partial(copy_context().run, work, *args, **kwargs)
        return await asyncio.shield(await self.begin(call))

    async def settle(self) -> None:
        """Return when nothing begun is running any more; outcomes are not raised here.

        Its threads end then; what is begun later has new ones.
        """
        while self._running:
            await asyncio.wait(self._running)
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)

    async def begin(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Have a thread begin, when a slot is free; what is given ends with it, and not before."""
        await self._slots.acquire()
        try:
            if self._within is not None:
                future = await self._within.begin(call)
            else:
                # Not the loop's threads, which decode: that would wait for an epoch of many tables.
                self._threads = self._threads or ThreadPoolExecutor(self._at_once, "job")
                future = asyncio.get_running_loop().run_in_executor(self._threads, call)
        except BaseException:
            self._slots.release()
            raise
        self._running.add(future)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._slots.release()
        self._running.discard(future)
        if not future.cancelled():
            future.exception()  # seen: who waited was cancelled, or has it raised


async def ahead(items: Generator[T, None, None]) -> AsyncGenerator[T, None]:
    """Yield what a generator does that blocks, in a thread of its own, an item ahead of who asks.

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
