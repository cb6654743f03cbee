"""Which calls of the lake's storage have not come back, and since when.

A thread that waits for a file system whose server is away can't be ended, nor asked. So each call
is noted where it is made, and whoever wants to know looks at the oldest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ingestd.observe.status import StorageWait

PATIENCE_S = 15.0
"""A call that takes longer is told of. A slow object store takes seconds at most: a request that is
not answered is given up, and sent again, after 30 s by the libraries."""

P = ParamSpec("P")
T = TypeVar("T")


class HasCalls(Protocol):
    """A store: what is noted of it, and how it names a path."""

    calls: StorageCalls

    def uri(self, path: str) -> str:
        """Return the whole name of a path."""
        ...


S = TypeVar("S", bound=HasCalls)


class StorageCalls:
    """The calls of one source's stores that are under way, from any thread.

    `monotonic`: seconds of a clock that only goes forward.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._under_way: dict[object, tuple[HasCalls, str, float]] = {}

    def begin(self, store: HasCalls, path: str) -> object:
        """Note a call; give what ends the note."""
        call = object()
        self._under_way[call] = (store, path, self._monotonic())
        return call

    def end(self, call: object) -> None:
        """Record that a call came back, with whatever."""
        self._under_way.pop(call, None)

    @contextmanager
    def during(self, store: HasCalls, path: str) -> Iterator[None]:
        """Note what is done inside as one call."""
        call = self.begin(store, path)
        try:
            yield
        finally:
            self.end(call)

    def waiting(self, patience_s: float | None = None) -> StorageWait | None:
        """Return the oldest call that has taken longer, than PATIENCE_S without; None if none."""
        patience_s = PATIENCE_S if patience_s is None else patience_s
        calls = list(self._under_way.values())
        if not calls:
            return None
        store, path, began_s = min(calls, key=lambda call: call[2])
        age_s = self._monotonic() - began_s
        return StorageWait(store.uri(path), age_s) if age_s >= patience_s else None


def timed(method: Callable[Concatenate[S, str, P], T]) -> Callable[Concatenate[S, str, P], T]:
    """Have calls of a store's method be noted, by the path that is its first argument."""

    @wraps(method)
    def call(store: S, path: str, /, *args: P.args, **kwargs: P.kwargs) -> T:
        under_way = store.calls.begin(store, path)
        try:
            return method(store, path, *args, **kwargs)
        finally:
            store.calls.end(under_way)

    return call
