"""A call that hangs delays neither a cancellation nor the end of the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from ingestd.process.daemon_thread import in_daemon_thread

HANGS = """
import asyncio, threading
from ingestd.process.daemon_thread import in_daemon_thread
async def main():
    task = asyncio.create_task(in_daemon_thread(threading.Event().wait, "hangs"))
    await asyncio.sleep(0.1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
asyncio.run(main())
print("ended")
"""


async def test_it_returns_and_raises_what_the_call_does() -> None:
    assert await in_daemon_thread(threading.current_thread, "own") is not threading.main_thread()
    with pytest.raises(ZeroDivisionError):
        await in_daemon_thread(lambda: 1 // 0, "fails")


async def test_a_late_result_is_dropped() -> None:
    release = threading.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await in_daemon_thread(release.wait, "late")
    release.set()
    await asyncio.sleep(0.01)


def test_the_process_ends_while_a_call_hangs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "ended\n"
