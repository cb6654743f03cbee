"""The calls to the lake's storage that have not returned, and since when.

A thread that waits for a file system whose server is unreachable can be neither ended nor queried.
So each call is recorded where it is made, and observers check the oldest one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ingestd.ports import StorageWait

PATIENCE_S = 15.0
"""A call that takes longer is reported. A slow object store takes seconds at most: the libraries
abandon an unanswered request after 30 s and send it again."""

P = ParamSpec("P")
T = TypeVar("T")


class HasCalls(Protocol):
    """A store: its record of calls, and how it names a path."""

    calls: StorageCalls

    def uri(self, path: str) -> str:
        """Return the full name of a path."""
        ...


S = TypeVar("S", bound=HasCalls)


class StorageCalls:
    """The calls of one source's stores that are in flight, from any thread.

    `patience_s`: a call that takes longer is reported. `monotonic`: seconds of a clock that never
    goes backwards.
    """

    def __init__(
        self, patience_s: float = PATIENCE_S, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._patience_s = patience_s
        self._monotonic = monotonic
        self._under_way: dict[object, tuple[HasCalls, str, float]] = {}

    def start_call(self, store: HasCalls, path: str) -> object:
        """Record a call; return the key with which `end` removes it."""
        call = object()
        self._under_way[call] = (store, path, self._monotonic())
        return call

    def end_call(self, call: object) -> None:
        """Record that a call returned, with or without an error."""
        self._under_way.pop(call, None)

    @contextmanager
    def during(self, store: HasCalls, path: str) -> Iterator[None]:
        """Record the block as one call."""
        call = self.start_call(store, path)
        try:
            yield
        finally:
            self.end_call(call)

    def waiting(self, patience_s: float | None = None) -> StorageWait | None:
        """Return the oldest call if it took `patience_s` (default: its own) or more."""
        patience_s = self._patience_s if patience_s is None else patience_s
        calls = list(self._under_way.values())
        if not calls:
            return None
        store, path, began_s = min(calls, key=lambda call: call[2])
        age_s = self._monotonic() - began_s
        return StorageWait(store.uri(path), age_s) if age_s >= patience_s else None


def timed(method: Callable[Concatenate[S, str, P], T]) -> Callable[Concatenate[S, str, P], T]:
    """Wrap a store's method so that its calls are recorded, by the path, its first argument."""

    @wraps(method)
    def call(store: S, path: str, /, *args: P.args, **kwargs: P.kwargs) -> T:
        under_way = store.calls.start_call(store, path)
        try:
            return method(store, path, *args, **kwargs)
        finally:
            store.calls.end_call(under_way)

    return call
