"""A bounded wait for a condition."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def await_until(
    condition: Callable[[], T | None],
    limit_s: float,
    what: str | Callable[[], str] = "the condition",
    *,
    poll_s: float = 0.05,
) -> T:
    """Poll `condition` until it returns a true value, and return that.

    Raise TimeoutError after `limit_s`, with `what` (called only then, if it is a function).
    """
    deadline = time.monotonic() + limit_s
    while True:
        if found := condition():
            return found
        if time.monotonic() >= deadline:
            msg = f"waited {limit_s:g} s for {what if isinstance(what, str) else what()}"
            raise TimeoutError(msg)
        time.sleep(poll_s)
