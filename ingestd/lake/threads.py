"""Blocking work in threads, which survives the cancellation of its caller.

A thread can't be stopped. A cancelled caller, or its successor, must not continue as if the work
had ended: `settle` waits until all work begun has ended.
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
    """Work begun by one owner, from one event loop, in at most `at_once` threads.

    `within`: use another owner's threads, whose `settle` waits for this work too.
    """

    def __init__(self, *, at_once: int, within: WorkerThreads | None = None) -> None:
        self._running: set[asyncio.Future[Any]] = set()
        self._slots = asyncio.Semaphore(at_once)
        self._at_once = at_once
        self._within = within
        self._threads: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in a thread, when one of `at_once` slots is free.

        If cancelled before that, the work is not begun; after that, it continues and keeps its
        slot.
        """
        call = partial(copy_context().run, work, *args, **kwargs)
        return await asyncio.shield(await self.submit(call))

    async def settle(self) -> None:
        """Return when all work has ended; its errors are not raised here.

        The threads end then; later work gets new ones.
        """
        while self._running:
            await asyncio.wait(self._running)
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)

    async def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Begin the call in a thread when a slot is free; return a future that ends with it."""
        await self._slots.acquire()
        try:
            if self._within is not None:
                future = await self._within.submit(call)
            else:
                # Not the loop's threads, which decode: decoding would wait for large epochs.
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
            future.exception()  # mark as retrieved: the caller was cancelled or gets it raised


async def prefetch(items: Generator[T, None, None]) -> AsyncGenerator[T, None]:
    """Yield the items of a blocking generator, computed in a thread one item ahead.

    It is always the same thread, so memory that it allocates and others free can be reused.
    """
    thread = ThreadPoolExecutor(1, "reading")
    loop = asyncio.get_running_loop()
    try:
        coming = loop.run_in_executor(thread, _next, items)
        while (found := await coming) is not None:
            coming = loop.run_in_executor(thread, _next, items)
            yield found
    finally:
        thread.submit(items.close)  # after the current item
        thread.shutdown(wait=False)


def _next(items: Generator[T, None, None]) -> T | None:
    return next(items, None)


async def gather_fail_fast(works: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """Await all; on the first failure cancel the others and raise it."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failed:
        first = failed.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise first  # outside the handler, to keep its own cause
