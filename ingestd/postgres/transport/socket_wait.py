"""Waiting for a socket that libpq owns, without libpq's blocking calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def readable(socket: int, timeout_s: float | None = None) -> None:
    """Return when the socket is readable or the time is over (None: no limit)."""
    loop = asyncio.get_running_loop()
    await _ready(loop.add_reader, loop.remove_reader, socket, timeout_s)


async def writable(socket: int) -> None:
    """Return when the socket is writable."""
    loop = asyncio.get_running_loop()
    await _ready(loop.add_writer, loop.remove_writer, socket, None)


async def _ready(
    add: Callable[[int, Callable[[], None]], object],
    remove: Callable[[int], object],
    socket: int,
    timeout_s: float | None,
) -> None:
    ready = asyncio.Event()
    add(socket, ready.set)
    try:
        async with asyncio.timeout(timeout_s):
            await ready.wait()
    except TimeoutError:
        pass
    finally:
        remove(socket)
