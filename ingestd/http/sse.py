"""The status as server-sent events (HTML standard, section 9.2), for a bounded number of readers.

A ``state`` event holds the complete status, a ``change`` event what is new since the last one: see
`ingestd.http.status_diff`. Each change is built once for all readers. A reader that falls behind is
disconnected, and receives a new ``state`` when it reconnects: nothing is kept for it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from datetime import datetime
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import web

from ingestd.http.status_diff import RedactionCache, StatusDiff
from ingestd.observe.history import INTERVAL_S, SourceHistories
from ingestd.process.clock import utc_now

if TYPE_CHECKING:
    from ingestd.config.redaction import Redactor
    from ingestd.observe.status import DaemonStatus

MAX_READERS = 16
_WAITING = 8
"""Events that are queued for a reader, besides those in socket buffers."""
_TICK_S = 1.0


class _Reader:
    """One stream: its queue of events, where None ends it, and how to disconnect it."""

    def __init__(self, request: web.Request) -> None:
        self.events: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING)
        self._request = request

    @property
    def is_closed(self) -> bool:
        """True once the client has closed; aiohttp reports this only at the next write."""
        return self._request.transport is None or self._request.transport.is_closing()

    def put(self, event: bytes | None) -> bool:
        """Queue an event; return False if the queue is full and the reader was disconnected."""
        try:
            self.events.put_nowait(event)
        except asyncio.QueueFull:
            if self._request.transport is not None:
                self._request.transport.abort()  # makes a pending `write` fail
            return False
        return True


class EventsFeed:
    """Samples the history continuously, and sends readers what is new every second."""

    def __init__(
        self,
        status: DaemonStatus,
        redactor: Redactor,
        *,
        now: Callable[[], datetime] = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.history = SourceHistories()
        self._status = status
        self._redacted = RedactionCache(redactor)
        self._now = now
        self._monotonic = monotonic
        self._readers: set[_Reader] = set()
        self._shown = StatusDiff(self._redacted)
        self.sample_at = monotonic()

    @property
    def readers(self) -> int:
        """The number of open streams."""
        return len(self._readers)

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            while True:
                self.tick()
                await asyncio.sleep(_TICK_S)
        finally:
            self.close()  # so that the page shows that it receives no more updates

    def tick(self) -> None:
        """Sample the history if due, drop closed readers, and send changes to the others."""
        if self._monotonic() >= self.sample_at:
            self.sample_at = self._monotonic() + INTERVAL_S
            self.history.observe(self._status.sources, self._now())
        for reader in [reader for reader in self._readers if reader.is_closed]:
            self._readers.discard(reader)
            reader.put(None)
        if self._readers:
            self._send_updates()

    def close(self) -> None:
        """End all streams."""
        for reader in list(self._readers):
            if not reader.put(None):
                self._readers.discard(reader)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Respond with events until the client or the server ends the stream."""
        if len(self._readers) >= MAX_READERS:
            return _too_many()
        if self._readers:
            self._send_updates()  # so that the next change is the same for all readers
        else:
            self._shown = StatusDiff(self._redacted)
            self._update(self._shown)
        reader = _Reader(request)
        reader.put(_event("state", self._update(StatusDiff(self._redacted))))
        self._readers.add(reader)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            while (event := await reader.events.get()) is not None:
                await response.write(event)
        except ConnectionResetError:
            pass  # the client disconnected, or was disconnected
        finally:
            self._readers.discard(reader)
        return response

    def _update(self, shown: StatusDiff) -> dict[str, object]:
        return shown.update(self._status, self.history, self._now())

    def _send_updates(self) -> None:
        new = self._update(self._shown)
        if not new:
            return
        event = _event("change", new)
        self._readers -= {reader for reader in self._readers if not reader.put(event)}


def _event(name: str, data: dict[str, object]) -> bytes:
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)  # without line breaks
    return f"event: {name}\ndata: {text}\n\n".encode()


def _too_many() -> web.Response:
    answer = {
        "error": f"{MAX_READERS} status pages are open already",
        "remedy": "close some; /status shows the same",
    }
    return web.json_response(
        answer, status=HTTPStatus.SERVICE_UNAVAILABLE, headers={"Retry-After": "10"}
    )
