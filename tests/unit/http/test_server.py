"""The HTTP side, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import socket
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import aiohttp
import pytest
import structlog

from ingestd.config import LogSettings
from ingestd.config.redaction import Redactor
from ingestd.config.units import Address
from ingestd.http.client import fetch_status
from ingestd.http.connections import MAX_CONNECTIONS
from ingestd.http.responses import HEADERS
from ingestd.http.server import HttpServer
from ingestd.model.errors import OperatorError
from ingestd.model.lake_state import TableState
from ingestd.observe.logs import configure
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import DaemonStatus, SourceState, SourceStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from ingestd.model.schema import TableId

T0 = datetime(2026, 1, 2, tzinfo=UTC)
ANY_PORT = Address("127.0.0.1", 0)


class Unasked:
    """A daemon that receives no commands."""

    def request_snapshot(
        self, source: str, tables: Sequence[TableId], where: str | None = None
    ) -> None:
        raise AssertionError((source, tables, where))

    def cancel_snapshot(self, source: str, tables: Sequence[TableId]) -> None:
        raise AssertionError((source, tables))


@pytest.fixture
def status() -> DaemonStatus:
    return DaemonStatus("0.1.0", T0, {"shop": SourceStatus("shop", T0)})


@pytest.fixture
async def server(status: DaemonStatus) -> AsyncIterator[HttpServer]:
    async with HttpServer(ANY_PORT, Metrics(), status, Redactor(["sesame"]), Unasked()) as server:
        yield server


async def get(server: HttpServer, path: str) -> tuple[int, str, dict[str, str]]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{server.address}{path}") as response,
    ):
        return response.status, await response.text(), dict(response.headers)


async def test_healthz_tells_that_the_loop_lives(server: HttpServer) -> None:
    code, text, headers = await get(server, "/healthz")
    assert (code, text) == (200, "ok\n")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert "aiohttp" not in headers["Server"]


async def test_readyz_follows_the_sources(server: HttpServer, status: DaemonStatus) -> None:
    shop = status.sources["shop"]
    shop.enter(SourceState.STOPPED, T0, OperatorError("password sesame was refused"))
    code, text, _ = await get(server, "/readyz")
    assert (code, text) == (503, "source shop is stopped: password *** was refused\n")
    shop.enter(SourceState.STREAMING, T0)
    code, text, _ = await get(server, "/readyz")
    assert (code, text) == (200, "ready\n")


async def test_status_is_json_without_secrets(server: HttpServer, status: DaemonStatus) -> None:
    status.sources["shop"].enter(SourceState.STOPPED, T0, OperatorError("x", remedy="use sesame"))
    found = await asyncio.to_thread(fetch_status, server.address)
    assert found is not None
    assert found["sources"]["shop"]["remedy"] == "use ***"
    assert found["started_at"] == "2026-01-02T00:00:00.000+00:00"


async def test_metrics_are_prometheus_text(server: HttpServer) -> None:
    code, text, headers = await get(server, "/metrics")
    assert code == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    assert "# TYPE ingestd_lag_bytes gauge" in text


async def test_anything_else_is_not_found(server: HttpServer) -> None:
    assert (await get(server, "/etc/passwd"))[0] == 404


async def test_a_port_in_use_is_named_with_the_remedy(status: DaemonStatus) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(OperatorError) as caught:
            async with HttpServer(listen, Metrics(), status, Redactor(), Unasked()):
                pass
    assert caught.value.what == f"http.listen: {listen} is in use"
    assert caught.value.remedy is not None


async def test_an_address_of_another_machine_is_refused(status: DaemonStatus) -> None:
    with pytest.raises(OperatorError, match=r"http\.listen: 192\.0\.2\.1:80 can't be used"):
        async with HttpServer(Address("192.0.2.1", 80), Metrics(), status, Redactor(), Unasked()):
            pass


async def test_it_closes_while_a_client_stays_connected(status: DaemonStatus) -> None:
    async with HttpServer(ANY_PORT, Metrics(), status, Redactor(), Unasked()) as server:
        address = server.address
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        closing = asyncio.timeout(5)
        await closing.__aenter__()
    await closing.__aexit__(None, None, None)
    writer.close()
    assert fetch_status(address) is None


def test_no_daemon_is_no_status() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    assert fetch_status(Address("127.0.0.1", port)) is None


async def test_clients_with_many_connections_do_not_lock_others_out(server: HttpServer) -> None:
    address = server.address
    held = []
    for number in range(3 * MAX_CONNECTIONS):
        held.append(await asyncio.open_connection(address.host, address.port))
        if number % 2:
            held[-1][1].write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
    assert (await get(server, "/healthz"))[0] == 200
    for reader, _ in held[:MAX_CONNECTIONS]:  # the oldest were ended
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
    assert not held[-1][0].at_eof()
    for _, writer in held:
        writer.close()


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    kept = root.handlers[:], root.level
    stream = io.StringIO()
    configure(LogSettings(format="json"), Redactor(), stream)
    yield stream
    root.handlers[:], level = kept
    root.setLevel(level)
    structlog.reset_defaults()


async def answer_to(server: HttpServer, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    finally:
        writer.close()


COMMAND = b"POST /sources/shop/snapshot HTTP/1.1\r\nHost: 127.0.0.1\r\n"
GZIP = b"Content-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\n"
NOT_HTTP = [
    b"GET /status HTTP/1.1\r\nNo Header\r\n\r\n",
    b"GET /status HTTP/1.1\r\nAuthorization: Bearer " + b"sesame" * 2000 + b"\r\n\r\n",
    b"GET /" + b"x" * 20000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    COMMAND + b"Content-Length: x\r\n\r\n",
    COMMAND + GZIP + b"plain",
]


ODD = [*NOT_HTTP, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET http://x:99999999/ HTTP/1.1\r\n\r\n"]


@pytest.mark.parametrize("request_", ODD, ids=range(len(ODD)))
async def test_what_is_no_request_is_answered_as_guardedly_as_all_else(
    server: HttpServer, request_: bytes
) -> None:
    first, *headers = (await answer_to(server, request_)).decode().splitlines()
    assert " 400 " in first
    assert {f"{name}: {value}" for name, value in HEADERS.items()} <= set(headers)
    assert len([header for header in headers if header.startswith("Server:")]) == 1


async def test_requests_that_are_not_http_are_logged_in_one_line(
    logged: io.StringIO, server: HttpServer
) -> None:
    for request in NOT_HTTP:
        assert b" 400 " in await answer_to(server, request)
    assert (await get(server, "/healthz"))[0] == 200
    lines = [json.loads(line) for line in logged.getvalue().splitlines()]
    assert [(x["event"], x["level"], x["count"]) for x in lines] == [
        ("http.bad_request", "warning", 1)
    ]
    assert "exception" not in lines[0]
    assert "sesame" not in logged.getvalue()


async def test_a_fault_of_our_own_is_logged_with_its_place(
    logged: io.StringIO, status: DaemonStatus
) -> None:
    class FailingMetrics(Metrics):
        def text(self) -> bytes:
            raise ZeroDivisionError

    async with HttpServer(ANY_PORT, FailingMetrics(), status, Redactor(), Unasked()) as server:
        assert (await get(server, "/metrics"))[0] == 500
    (line,) = [json.loads(line) for line in logged.getvalue().splitlines()]
    assert "ZeroDivisionError" in line["exception"]


async def test_readiness_is_printable_and_keeps_what_is_quoted(status: DaemonStatus) -> None:
    why = OperatorError(
        "table public.nopk\x1b[31m\x9b31m has no key",
        remedy='ALTER TABLE "two  spaces" ...;\n  or not',
    )
    status.sources["shop"].table("public.nopk\x1b[31m", TableState.STOPPED, T0, why)
    async with HttpServer(ANY_PORT, Metrics(), status, Redactor(), Unasked()) as server:
        _, text, _ = await get(server, "/readyz")
    assert "\x1b" not in text
    assert "\x9b" not in text
    assert '"two  spaces" ...; or not\n' in text
