"""The daemon's HTTP server in a separate thread, for tests with a browser."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ingestd.config.redaction import Redactor
from ingestd.config.units import Address
from ingestd.http.auth import OPEN, Protection
from ingestd.http.server import HttpServer
from ingestd.observe.history import SourceHistories
from ingestd.observe.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from ingestd.observe.status import DaemonStatus

_LIMIT_S = 30
SAMPLED_AFTER_S = 3600
"""Delay of sampling, so that no points of an idle daemon follow the given history."""
T = TypeVar("T")


class NoCommands:
    """A daemon that must not receive commands."""

    def request_snapshot(self, *asked: Any) -> None:
        raise AssertionError(asked)

    def cancel_snapshot(self, *asked: Any) -> None:
        raise AssertionError(asked)


class PageServer:
    """Serves `status` with the given history; a context manager that can be entered again.

    `port` stays the same. Change the status through `do`, in the server's event loop.
    """

    def __init__(
        self,
        status: DaemonStatus,
        history: SourceHistories | None = None,
        *,
        protection: Protection = OPEN,
        port: int = 0,
    ) -> None:
        self.status = status
        self.port = port
        self._history = history or SourceHistories()
        self._protection = protection

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(_LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        end = self.server.__aexit__(None, None, None)
        asyncio.run_coroutine_threadsafe(end, self._loop).result(_LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LIMIT_S)
        self._loop.close()

    async def _start(self) -> None:
        listen = Address("127.0.0.1", self.port)
        self.server = HttpServer(
            listen,
            Metrics(),
            self.status,
            Redactor(["sesame-secret"]),
            NoCommands(),
            protection=self._protection,
        )
        self.server.feed.history = self._history
        self.server.feed.sample_at = time.monotonic() + SAMPLED_AFTER_S
        await self.server.__aenter__()
        self.port = self.server.address.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    @property
    def readers(self) -> int:
        return self.do(lambda: self.server.feed.readers)

    def do(self, change: Callable[[], T]) -> T:
        """Run `change` in the server's event loop."""

        async def run() -> T:
            return change()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(_LIMIT_S)
