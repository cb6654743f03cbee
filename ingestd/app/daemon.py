"""The daemon that `ingestd run` runs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import structlog

from ingestd import __version__, failpoints
from ingestd.app.build import SourceBuilder
from ingestd.app.catalog_registration import CatalogRegistration
from ingestd.app.factories import lake_of, load, require_source
from ingestd.app.reload import ConfigReload
from ingestd.config import Config
from ingestd.decode import native
from ingestd.http.auth import openness, protection_of
from ingestd.http.command_token import OFF_REMEDY
from ingestd.http.server import HttpServer
from ingestd.observe import logs
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import DaemonStatus, paused, ready
from ingestd.observe.systemd import notifying_service_manager
from ingestd.pipeline.telemetry.storage import StorageTelemetry
from ingestd.ports import LakeFactory
from ingestd.process.clock import utc_now
from ingestd.process.memory import gc_frozen

EXIT_WITHIN_S = 9.5
"""Limit of a stop. Then the process exits; what is not committed is re-read at the next start."""

CUT_OFF = 75
"""Exit code of a stop that abandoned unfinished work: the same as of a transient error."""


def run(config_path: Path, accepted: Collection[str] = (), *, once: bool = False) -> int:
    """Run the daemon until SIGTERM or SIGINT. Raises ConfigError, OperatorError.

    `accepted`: sources that may start, once, in another lake than the one they were written to.
    `once`: end when the lake has all that the sources have committed; raises IngestdError if that
    can't be reached.
    """
    config = load(config_path)
    for name in accepted:
        require_source(config, name)
    logs.configure(config.log, config.redactor, sys.stderr)
    logs.take_what_is_uncaught()
    _arm_failpoints()
    with gc_frozen():  # the modules of this kind of lake
        lake = lake_of(config)
    asyncio.run(_run(config, lake, partial(load, config_path), accepted, once=once))
    return 0


def _arm_failpoints() -> None:
    log = structlog.get_logger("ingestd")

    def warn(point: str, action: str, time: int) -> None:
        log.warning("failpoint.reached", point=point, action=action, time=time)

    if failpoints.arm(text := os.environ.get(failpoints.VARIABLE, ""), warn):
        log.warning("failpoints.on", entries=text, remedy=f"unset {failpoints.VARIABLE}")


async def _run(
    config: Config,
    lake: LakeFactory,
    load: Callable[[], Config],
    accepted: Collection[str],
    *,
    once: bool,
) -> None:
    log = structlog.get_logger("ingestd")
    asyncio.get_running_loop().set_exception_handler(logs.LoopErrors())
    stop, hangups = asyncio.Event(), asyncio.Event()
    metrics = Metrics()
    status = DaemonStatus(__version__, utc_now(), lake=config.lake.uri)
    building = SourceBuilder(lake, metrics, status, config.redactor, accepted, once=once)
    _react_to_signals(stop, hangups, building.under_way)
    supervisor = building.supervisor
    for name in config.sources:
        building.source(config, name)
    async with AsyncExitStack() as stack:
        if config.http.listen is not None:
            protection = protection_of(config.http)
            server = HttpServer(
                config.http.listen,
                metrics,
                status,
                config.redactor,
                supervisor,
                pausing=supervisor,
                protection=protection,
            )
            await stack.enter_async_context(server)
            log.info("http.listening", address=str(server.address))
            if why := openness(config.http.listen, protection):
                log.warning("http.open", address=str(server.address), reason=why)
            if server.commands.off is not None:
                log.warning("http.commands_off", reason=server.commands.off, remedy=OFF_REMEDY)
        log.info(
            "daemon.started",
            version=__version__,
            sources=len(config.sources),
            compiled=native.compiled is not None,
        )
        notifying = notifying_service_manager(
            partial(ready, status), config.redactor, stop, paused=partial(paused, status)
        )
        service_manager = await stack.enter_async_context(notifying)
        reloading = ConfigReload(
            config,
            load,
            building,
            supervisor,
            service_manager.reload_began,
            service_manager.reload_ended,
        )
        task = asyncio.create_task(reloading.run(hangups), name="reloading")
        stack.callback(task.cancel)
        watching = asyncio.create_task(StorageTelemetry(status, log).run(), name="storage")
        stack.callback(watching.cancel)
        if config.catalog is not None:
            registration = CatalogRegistration(config.catalog, lake, status, metrics, log)
            registering = asyncio.create_task(registration.run(), name="catalog")
            stack.callback(registering.cancel)
        await supervisor.run(stop)
    log.info("daemon.stopped")


def _react_to_signals(
    stop: asyncio.Event, hangups: asyncio.Event, under_way: Callable[[], Sequence[str]]
) -> None:
    """Install the signal handlers.

    SIGTERM, SIGINT: stop within the limit, exit code 0; a second one exits immediately. Work that
    is still `under_way` at the limit is abandoned, and the exit code is CUT_OFF.

    SIGHUP: re-read the config. If the daemon was started on a terminal that has closed, SIGHUP
    reports just that, and acts as SIGTERM: the daemon was not detached on purpose.
    """
    loop = asyncio.get_running_loop()
    had_terminal = os.isatty(2)

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()
        limit = threading.Timer(EXIT_WITHIN_S, _cut_off, (under_way,))
        limit.daemon = True
        limit.start()

    def on_hangup() -> None:
        if not had_terminal or os.isatty(2):
            hangups.set()
        elif not stop.is_set():
            on_signal()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    loop.add_signal_handler(signal.SIGHUP, on_hangup)


def _cut_off(under_way: Callable[[], Sequence[str]]) -> None:
    """End the process, from a separate thread: the loop or another thread is blocked."""
    left = under_way()
    if left:
        log = structlog.get_logger("ingestd")
        log.warning("daemon.cut_off", seconds=EXIT_WITHIN_S, under_way=left)
        sys.stderr.flush()
    os._exit(CUT_OFF if left else 0)
