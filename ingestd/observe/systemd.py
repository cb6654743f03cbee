"""Notifications to systemd (sd_notify(3)): readiness, status, watchdog, reload and stop.

Nothing is sent if `NOTIFY_SOCKET` is not set. The event loop itself sends the watchdog messages. A
loop that hangs sends none, and systemd restarts the daemon (`WatchdogSec=`).
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from ingestd.config.redaction import Redactor

READY_WITHIN_S = 30.0
"""A daemon whose sources don't deliver by then counts as started: it keeps retrying."""
LOOK_INTERVAL_S = 0.5
"""How often readiness is checked until it is sent."""
STATUS_INTERVAL_S = 5.0
"""How often the status is checked after that."""
_STATUS_CHARS = 400

Readiness = Callable[[], tuple[bool, list[str]]]
"""Return whether every source delivers, and the reasons if not."""


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """A service manager's socket. `watchdog_s`: its watchdog period, or None.

    `address`: a path, or `@` and an abstract name (unix(7)).
    """

    address: str
    watchdog_s: float | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], pid: int) -> ServiceManager | None:
        """Return the service manager of this process; None without one, or an unknown address."""
        address = environment.get("NOTIFY_SOCKET", "")
        if not address.startswith(("/", "@")):
            return None
        period = environment.get("WATCHDOG_USEC", "")
        is_ours = environment.get("WATCHDOG_PID", str(pid)) == str(pid)
        watched = is_ours and period.isascii() and period.isdigit() and int(period) > 0
        return cls(address, int(period) / 1e6 if watched else None)

    def notify(self, *assignments: str) -> None:
        """Send these (`READY=1`, ...) as one message, without waiting. Raises OSError."""
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        name = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        with socket.socket(socket.AF_UNIX, kind) as sender:
            sender.connect(name)
            sender.send("\n".join(assignments).encode())


class SystemdNotifier:
    """The messages already sent and those now due; `now`: monotonic seconds."""

    def __init__(
        self,
        readiness: Readiness,
        redactor: Redactor,
        began: float,
        *,
        paused: Callable[[], list[str]] = list,
    ) -> None:
        self._readiness = readiness
        self._paused = paused
        self._redactor = redactor
        self._gives_up_at = began + READY_WITHIN_S
        self._is_ready_sent = False
        self._is_stopping_sent = False
        self._last_status = ""

    @property
    def is_ready_sent(self) -> bool:
        """True once the service counts as started."""
        return self._is_ready_sent

    def due(self, now: float, *, stopping: bool) -> list[str]:
        """Return the messages that are due now, and record them as sent."""
        if stopping:
            if self._is_stopping_sent:
                return []
            self._is_stopping_sent = True
            return ["STOPPING=1", "STATUS=stopping"]
        found: list[str] = []
        is_ready, reasons = self._readiness()
        if not self._is_ready_sent and (is_ready or now >= self._gives_up_at):
            self._is_ready_sent = True
            found.append("READY=1")
        words = "delivering" if is_ready else f"not delivering: {'; '.join(reasons)}"
        if is_ready and (paused := self._paused()):
            words = f"ready; {'; '.join(paused)}"
        status = " ".join(self._redactor.text(words).split())[:_STATUS_CHARS]
        if status != self._last_status:
            self._last_status = status
            found.append(f"STATUS={status}")
        return found


class ReloadNotifier:
    """Notifies the service manager, if there is one, when a reload begins and ends."""

    def __init__(
        self, manager: ServiceManager | None = None, notifier: SystemdNotifier | None = None
    ) -> None:
        self._manager = manager
        self._notifier = notifier

    def reload_began(self) -> None:
        """Send that the config is being re-read. `Type=notify-reload` requires the time."""
        usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._notify("RELOADING=1", f"MONOTONIC_USEC={usec}")

    def reload_ended(self) -> None:
        """Send that the reload ended. Accepted or refused, the service is as ready as before."""
        self._notify("READY=1")

    def _notify(self, *assignments: str) -> None:
        # A service that has not started yet can't reload, and READY=1 would mark it as started.
        if self._manager is None or self._notifier is None or not self._notifier.is_ready_sent:
            return
        with suppress(OSError):  # `_keep_notifying` below logs it, once
            self._manager.notify(*assignments)


@asynccontextmanager
async def notifying_service_manager(
    readiness: Readiness,
    redactor: Redactor,
    stop: asyncio.Event,
    *,
    paused: Callable[[], list[str]] = list,
    environment: Mapping[str, str] = os.environ,
) -> AsyncIterator[ReloadNotifier]:
    """Notify the service manager, if there is one, while this context is entered.

    `stop`: set when the daemon begins to stop. `paused`: the paused sources; not a fault.
    """
    manager = ServiceManager.from_environment(environment, os.getpid())
    if manager is None:
        yield ReloadNotifier()
        return
    notifier = SystemdNotifier(readiness, redactor, time.monotonic(), paused=paused)
    task = asyncio.create_task(_keep_notifying(manager, notifier, stop), name="service manager")
    try:
        yield ReloadNotifier(manager, notifier)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _keep_notifying(
    manager: ServiceManager, notifier: SystemdNotifier, stop: asyncio.Event
) -> None:
    log = structlog.get_logger("ingestd")
    sign = [] if manager.watchdog_s is None else ["WATCHDOG=1"]
    # systemd recommends at most half of the period
    most_s = STATUS_INTERVAL_S if manager.watchdog_s is None else manager.watchdog_s / 3
    is_heard = True
    while True:
        words = notifier.due(time.monotonic(), stopping=stop.is_set()) + sign
        try:
            if words:
                manager.notify(*words)
            is_heard = True
        except OSError as error:
            if is_heard:
                log.warning("service_manager.unreachable", reason=error.strerror)
            is_heard = False
        interval_s = STATUS_INTERVAL_S if notifier.is_ready_sent else LOOK_INTERVAL_S
        await _wait(stop, min(most_s, interval_s))


async def _wait(stop: asyncio.Event, limit_s: float) -> None:
    """Wait that long, or until the daemon begins to stop; after that, always that long."""
    if stop.is_set():
        await asyncio.sleep(limit_s)
        return
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), limit_s)
