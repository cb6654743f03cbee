"""Messages to a service manager, on real datagram sockets, by names and by paths."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing, suppress
from pathlib import Path
from uuid import uuid4

import pytest
from structlog.testing import capture_logs

from ingestd.config.redaction import Redactor
from ingestd.observe.systemd import (
    READY_WITHIN_S,
    ServiceManager,
    SystemdNotifier,
    notifying_service_manager,
)

LIMIT_S = 20.0


class Readiness:
    """`reasons`: why not every source delivers; none: all do."""

    def __init__(self, *reasons: str) -> None:
        self.reasons = list(reasons)

    def __call__(self) -> tuple[bool, list[str]]:
        return not self.reasons, self.reasons


def listening(name: str) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    found.bind("\0" + name[1:] if name.startswith("@") else name)
    found.settimeout(LIMIT_S)
    return found


@pytest.fixture(params=["path", "abstract"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "notify") if request.param == "path" else f"@ingestd-{uuid4().hex}"


async def heard(manager: socket.socket) -> list[str]:
    """The next message, while the loop runs."""
    return (await asyncio.to_thread(manager.recv, 4096)).decode().split("\n")


async def heard_until(manager: socket.socket, wanted: str) -> list[str]:
    """All messages up to `wanted`, which is the last."""
    found: list[str] = []
    async with asyncio.timeout(LIMIT_S):
        while wanted not in found:
            found += await heard(manager)
    return found


def heard_while_hanging(manager: socket.socket) -> int:
    """Wait in the loop, which therefore hangs, until no message comes any more; count them."""
    count = 0
    with suppress(TimeoutError):
        while True:
            manager.recv(4096)
            count += 1
    return count


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"NOTIFY_SOCKET": ""}, None),
        ({"NOTIFY_SOCKET": "vsock:2:1234"}, None),
        ({"NOTIFY_SOCKET": "/run/n"}, ServiceManager("/run/n")),
        ({"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "3000000"}, ServiceManager("@n", 3.0)),
        (
            {"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "500000", "WATCHDOG_PID": "7"},
            ServiceManager("@n", 0.5),
        ),
        # meant for another process, or nonsense
        (
            {"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "500000", "WATCHDOG_PID": "8"},
            ServiceManager("@n"),
        ),
        ({"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "0"}, ServiceManager("@n")),
        ({"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "-1"}, ServiceManager("@n")),
        ({"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "soon"}, ServiceManager("@n")),
    ],
)
def test_what_systemd_says_to_a_service(
    environment: dict[str, str], found: ServiceManager | None
) -> None:
    assert ServiceManager.from_environment(environment, 7) == found


async def test_ready_when_all_sources_deliver_and_status_follows(
    address: str,
) -> None:
    readiness, stop = Readiness("source shop is starting"), asyncio.Event()
    environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "100000"}
    with closing(listening(address)) as manager:
        async with notifying_service_manager(readiness, Redactor(), stop, environment=environment):
            first = await heard(manager)
            assert first == ["STATUS=not delivering: source shop is starting", "WATCHDOG=1"]
            readiness.reasons.clear()
            messages = await heard_until(manager, "STATUS=delivering")
            assert "READY=1" in messages
            readiness.reasons.append("source shop is backing_off:\n  connection refused")
            messages = await heard_until(
                manager, "STATUS=not delivering: source shop is backing_off: connection refused"
            )
            assert "READY=1" not in messages  # once
            stop.set()
            messages = await heard_until(manager, "STOPPING=1")
            messages += await heard_until(manager, "WATCHDOG=1")  # it lives while it stops
            assert messages.count("STOPPING=1") == 1


async def test_a_loop_that_hangs_gives_no_sign_of_life(address: str) -> None:
    period_s = 0.1
    environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": str(int(period_s * 1e6))}
    with closing(listening(address)) as manager:
        async with notifying_service_manager(
            Readiness(), Redactor(), asyncio.Event(), environment=environment
        ):
            for _ in range(5):
                await heard_until(manager, "WATCHDOG=1")
            manager.settimeout(2 * period_s)
            assert heard_while_hanging(manager) <= 1  # what was sent before
            manager.settimeout(LIMIT_S)
            await heard_until(manager, "WATCHDOG=1")


def test_an_unreachable_source_does_not_block_readiness_forever() -> None:
    notifier = SystemdNotifier(
        Readiness("source shop is backing_off: no route"), Redactor(), began=100.0
    )
    status = "STATUS=not delivering: source shop is backing_off: no route"
    assert notifier.due(100.0, stopping=False) == [status]
    assert notifier.due(99.9 + READY_WITHIN_S, stopping=False) == []
    assert not notifier.is_ready_sent
    assert notifier.due(100.0 + READY_WITHIN_S, stopping=False) == ["READY=1"]
    assert notifier.is_ready_sent


def test_a_status_is_one_short_line_without_secrets() -> None:
    readiness = Readiness("cannot reach\nREADY=1 sesame-4711", "x" * 1000)
    notifier = SystemdNotifier(readiness, Redactor(["sesame-4711"]), began=0.0)
    [status] = notifier.due(0.0, stopping=False)
    assert "\n" not in status
    assert "sesame" not in status
    assert len(status) < 420


async def test_a_manager_that_does_not_listen_is_reported_once(
    tmp_path: Path,
) -> None:
    address = str(tmp_path / "nobody")
    environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "60000"}
    with capture_logs() as logs:
        async with notifying_service_manager(
            Readiness(), Redactor(), asyncio.Event(), environment=environment
        ):
            async with asyncio.timeout(LIMIT_S):
                while not logs:  # noqa: ASYNC110 - a list notifies no one
                    await asyncio.sleep(0)
            with closing(listening(address)) as manager:  # there it is
                await heard_until(manager, "WATCHDOG=1")
    assert [log["event"] for log in logs] == ["service_manager.unreachable"]


async def test_a_reload_is_reported_at_its_beginning_and_end(address: str) -> None:
    with closing(listening(address)) as manager:
        async with notifying_service_manager(
            Readiness(), Redactor(), asyncio.Event(), environment={"NOTIFY_SOCKET": address}
        ) as reloads:
            await heard_until(manager, "READY=1")
            reloads.reload_began()
            messages = await heard_until(manager, "RELOADING=1")
            [time] = [word for word in messages if word.startswith("MONOTONIC_USEC=")]
            assert int(time.partition("=")[2]) > 0
            reloads.reload_ended()
            await heard_until(manager, "READY=1")


async def rest(manager: socket.socket) -> list[str]:
    """What waits to be heard: nothing, if it was all in one message."""
    manager.settimeout(0.0)
    found: list[str] = []
    with suppress(BlockingIOError):
        found = await heard(manager)
    manager.settimeout(LIMIT_S)
    return found


async def test_a_reload_does_not_report_an_unstarted_service_as_ready(
    address: str,
) -> None:
    readiness = Readiness("source shop is starting")
    with closing(listening(address)) as manager:
        async with notifying_service_manager(
            readiness, Redactor(), asyncio.Event(), environment={"NOTIFY_SOCKET": address}
        ) as reloads:
            await heard(manager)
            reloads.reload_began()
            reloads.reload_ended()
            assert await rest(manager) == []


def test_a_paused_source_is_named_and_is_no_fault() -> None:
    paused = ["source shop is paused since 2026-01-02 03:04:05 UTC"]
    notifier = SystemdNotifier(Readiness(), Redactor(), began=0.0, paused=lambda: paused)
    assert notifier.due(0.0, stopping=False) == ["READY=1", f"STATUS=ready; {paused[0]}"]


async def test_without_a_manager_nothing_is_done() -> None:
    before = asyncio.all_tasks()
    async with notifying_service_manager(
        Readiness(), Redactor(), asyncio.Event(), environment={}
    ) as reloads:
        assert asyncio.all_tasks() == before
        reloads.reload_began()
        reloads.reload_ended()
