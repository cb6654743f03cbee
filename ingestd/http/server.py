"""The HTTP server: the status page, /metrics, /healthz, /readyz, /status, commands."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import time
from typing import TYPE_CHECKING, Self

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ingestd.config.units import Address
from ingestd.http.auth import OPEN, Handler, Protection
from ingestd.http.command_token import CONFIGURED, CommandToken
from ingestd.http.commands import SnapshotCommands
from ingestd.http.connections import Connections
from ingestd.http.page_files import add_page
from ingestd.http.pause_commands import PauseCommands
from ingestd.http.responses import RequestHandler, add_headers
from ingestd.http.sse import EventsFeed
from ingestd.http.token_proof import PATH as PROOF_PATH
from ingestd.http.token_proof import Proofs
from ingestd.model.errors import OperatorError
from ingestd.model.printable_text import one_line
from ingestd.observe import metrics as prometheus
from ingestd.observe.status import not_ready, paused
from ingestd.observe.status_json import to_json

if TYPE_CHECKING:
    from ingestd.config.redaction import Redactor
    from ingestd.http.commands import SnapshotControl
    from ingestd.http.pause_commands import PauseControl
    from ingestd.observe.metrics import Metrics
    from ingestd.observe.status import DaemonStatus

_CLOSE_WITHIN_S = 1.0
_REPORT_EVERY_S = 60.0
"""Least time between log lines about malformed requests, which could fill the disk otherwise."""


class HttpServer:
    """Serves the current `metrics` and `status`, and passes commands on to `control`.

    Used as ``async with HttpServer(...)``: entering raises OperatorError if it can't listen there.
    `commands`: the generated token for commands, if `protection` has none; its file exists while
    the server listens.
    """

    def __init__(
        self,
        listen: Address,
        metrics: Metrics,
        status: DaemonStatus,
        redactor: Redactor,
        control: SnapshotControl,
        *,
        pausing: PauseControl | None = None,
        protection: Protection = OPEN,
    ) -> None:
        self._listen = listen
        self._metrics = metrics
        self._status = status
        self._redactor = redactor
        self._protection = protection
        token = CommandToken() if protection.token is None else None
        self.commands = status.commands = CONFIGURED if token is None else token
        snapshots = SnapshotCommands(control, status.sources, redactor, token)
        self.feed = EventsFeed(status, redactor)
        self._feeding: asyncio.Task[None] | None = None
        self._listener: asyncio.Server | None = None
        self._connections = Connections(self._make_protocol, protection.tls)
        app = web.Application(middlewares=[self._guard])
        app.on_response_prepare.append(_add_headers)
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/healthz", self._get_health)
        app.router.add_get("/readyz", self._get_ready)
        app.router.add_get("/status", self._get_status)
        proofs = Proofs(lambda: protection.token or self.commands.value())
        app.router.add_get(PROOF_PATH, proofs.answer)
        app.router.add_get("/status/events", self.feed.stream)
        add_page(app)
        app.router.add_post("/sources/{source}/snapshot", snapshots.request)
        app.router.add_delete("/sources/{source}/snapshot", snapshots.cancel)
        if pausing is not None:
            pauses = PauseCommands(pausing, status.sources, redactor, token)
            app.router.add_post("/sources/{source}/pause", pauses.pause)
            app.router.add_delete("/sources/{source}/pause", pauses.resume)
        self._log = _server_log()
        self._runner = web.AppRunner(
            app, logger=self._log, shutdown_timeout=_CLOSE_WITHIN_S, handle_signals=False
        )

    @property
    def address(self) -> Address:
        """The address on which it listens; for port 0, with the port that was assigned."""
        if self._listener is None or not self._listener.sockets:
            return self._listen
        host, port = self._listener.sockets[0].getsockname()[:2]
        return Address(host, port)

    async def __aenter__(self) -> Self:
        """Begin to listen."""
        await self._runner.setup()
        try:
            self._listener = await self._connections.listen(self._listen)
        except OSError as error:
            await self._runner.cleanup()
            raise _cannot_listen(self._listen, error) from error
        if self.commands is not CONFIGURED:
            # Only once it listens: until then the port, and so the file, may be another daemon's.
            self.commands.write(self.address.port, os.environ)
        self._feeding = asyncio.create_task(self.feed.run())
        self._feeding.add_done_callback(_log_failure)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop; open requests have a second to finish."""
        self.commands.remove()
        self.feed.close()
        if self._feeding is not None:
            self._feeding.cancel()
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
        self._connections.close_all()

    def _make_protocol(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        no_log = None  # of each request
        return RequestHandler(server, loop=loop, logger=self._log, access_log=no_log)  # type: ignore[arg-type]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = self._protection.refusal(request, self._listening)
        if refusal is not None:
            return refusal
        try:
            return await handler(request)
        except web.RequestPayloadError:  # such as a body declared as gzip that is not
            return web.Response(status=400, text="the body can't be read\n")

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.text(), headers={"Content-Type": prometheus.CONTENT_TYPE}
        )

    async def _get_health(self, _: web.Request) -> web.Response:
        # running at all is the check: the process and its event loop are alive
        return web.Response(text="ok\n")

    async def _get_ready(self, _: web.Request) -> web.Response:
        lines = [_one_line(*reason) for reason in not_ready(self._status)]
        code = 503 if lines else 200
        lines = lines or ["ready", *map(one_line, paused(self._status))]
        text = "".join(f"{line}\n" for line in lines)
        return web.Response(status=code, text=self._redactor.text(text))

    async def _get_status(self, _: web.Request) -> web.Response:
        body = json.dumps(self._redactor.tree(to_json(self._status)), indent=2)
        return web.Response(text=body + "\n", content_type="application/json")

    @property
    def _listening(self) -> list[str]:
        """The hosts on which it listens."""
        sockets = () if self._listener is None else self._listener.sockets
        return [str(socket.getsockname()[0]) for socket in sockets]


class _BadRequests(logging.Filter):
    """Logs malformed requests at most once a minute, without traceback and content.

    The content may include a token. All other records of aiohttp report bugs of ours, and pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reported_at = -_REPORT_EVERY_S
        self._unreported = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a record about a malformed request, which is counted instead."""
        error = None if record.exc_info is None else record.exc_info[1]
        if not isinstance(error, HttpProcessingError | web.RequestPayloadError):
            return True
        self._unreported += 1
        now = time.monotonic()
        if now - self._reported_at >= _REPORT_EVERY_S:
            structlog.get_logger("ingestd").warning(
                "http.bad_request",
                reason=type(error).__name__,
                peer=next(iter(record.args), None) if isinstance(record.args, tuple) else None,
                count=self._unreported,
            )
            self._reported_at, self._unreported = now, 0
        return False


def _server_log() -> logging.Logger:
    """Return a new logger for aiohttp's server; its parent is the root logger."""
    log = logging.Logger("ingestd.http")  # noqa: LOG001 - getLogger would share it between servers
    log.parent = logging.getLogger()
    log.addFilter(_BadRequests())
    return log


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    add_headers(response)


def _one_line(reason: str, remedy: str | None) -> str:
    """Return reason and remedy on one line, for a probe's message or a script."""
    text = reason if remedy is None else f"{reason}; remedy: {remedy}"
    return one_line(text)


def _log_failure(feeding: asyncio.Task[None]) -> None:
    """Log that the page no longer receives updates; replication continues."""
    if not feeding.cancelled() and (error := feeding.exception()) is not None:
        structlog.get_logger("ingestd").error("page.failed", exc_info=error)


def _cannot_listen(listen: Address, error: OSError) -> OperatorError:
    why = "is in use" if error.errno == errno.EADDRINUSE else f"can't be used: {error.strerror}"
    return OperatorError(
        f"http.listen: {listen} {why}",
        remedy="stop the process that uses it, or set another address (or 'off') in [http] listen",
    )
