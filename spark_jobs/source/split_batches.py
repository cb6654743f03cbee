"""Batches of a page source for a blocking reader; the next ones are read ahead."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pyarrow as pa

from ingestd.ports import PageSource

BATCHES_AHEAD = 2
"""Each has a few MB."""

Sources = Callable[[], Iterator[PageSource]]


class _End:
    """The end of the batches: an error, or None after the last one."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def batches_of(sources: Sources) -> Generator[pa.RecordBatch, None, None]:
    """Yield the batches of these sources in order, read by a thread.

    Closing the iterator stops reading and closes the source. Raises the sources' errors.
    """
    reading = _Reading(sources)
    try:
        while True:
            item = reading.next()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
    finally:
        reading.close()


class _Reading:
    """A thread with an event loop that reads ahead of its consumer."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._is_ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._items: asyncio.Queue[pa.RecordBatch | _End] = asyncio.Queue(BATCHES_AHEAD)
        self._thread = threading.Thread(target=self._run, name="ingestd-read", daemon=True)
        self._thread.start()
        self._is_ready.wait()

    def next(self) -> pa.RecordBatch | _End:
        """Return the next item. Must not be called after an end."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._items.get(), self._loop).result()

    def close(self) -> None:
        """Stop reading. May be called twice."""
        loop, task = self._loop, self._task
        if loop is not None and task is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(task.cancel)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._is_ready.set()
        end = _End(None)
        try:
            await self._read_frames()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the consumer's thread raises it
            end = _End(error)
        await self._items.put(end)
        await asyncio.Event().wait()  # keep the loop until the consumer closes

    async def _read_frames(self) -> None:
        for source in self._sources():
            try:
                async with contextlib.aclosing(source.batches()) as batches:  # type: ignore[type-var]
                    async for batch in batches:
                        await self._items.put(batch)
            finally:
                await source.close()
