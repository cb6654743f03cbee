"""An event loop on which waiting takes no time."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _JumpingSelector(selectors.DefaultSelector):
    """Returns at once if there is no event; `passed_s`: the seconds it would have waited so far."""

    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0 if timeout else timeout)
        if timeout and not found:
            self.passed_s += timeout
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes when nothing is ready: it then jumps to the next timer.

    Code takes no time on it, so that a test's course does not depend on the machine. A thread's
    result is waited for only while no timer runs: not for tests that limit how long a thread takes.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the seconds that were waited."""
        return self._jumping.passed_s

    async def shutdown_default_executor(self, *_: Any) -> None:
        """Wait for the executor's threads, without the limit that newer Pythons set."""
        await super().shutdown_default_executor()
