"""The status as a stream of events, over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from ingestd.config.redaction import Redactor
from ingestd.config.units import Address
from ingestd.http.auth import Protection
from ingestd.http.server import HttpServer
from ingestd.http.sse import MAX_READERS, EventsFeed
from ingestd.model.errors import OperatorError
from ingestd.model.lake_state import TableState
from ingestd.observe.history import INTERVAL_S
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import DaemonStatus, SourceState, SourceStatus
from tests.harness.page_server import NoCommands

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

T0 = datetime(2026, 1, 2, tzinfo=UTC)
ANY_PORT = Address("127.0.0.1", 0)
LIMIT_S = 20


@pytest.fixture
def status() -> DaemonStatus:
    return DaemonStatus("0.1.0", T0, {"shop": SourceStatus("shop", T0)})


@pytest.fixture
async def server(status: DaemonStatus) -> AsyncIterator[HttpServer]:
    async with HttpServer(ANY_PORT, Metrics(), status, Redactor(), NoCommands()) as server:
        yield server


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


def url(server: HttpServer) -> str:
    return f"http://{server.address}/status/events"


async def event(response: aiohttp.ClientResponse) -> tuple[str, Any]:
    async with asyncio.timeout(LIMIT_S):
        text = await response.content.readuntil(b"\n\n")
    name, data = text.decode().strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def until(condition: Any, *, ticking: EventsFeed | None = None) -> None:
    """Wait for a state of the server. `ticking`: a feed whose next second need not be awaited."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            if ticking is not None:
                ticking.tick()
            await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_first_comes_all_then_what_is_new(
    server: HttpServer, status: DaemonStatus, session: aiohttp.ClientSession
) -> None:
    shop = status.sources["shop"]
    shop.table("public.orders", TableState.LIVE, T0)
    async with session.get(url(server)) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        name, all_of_it = await event(response)
        assert name == "state"
        assert [t["table"] for t in all_of_it["sources"]["shop"]["tables"]] == ["public.orders"]
        shop.table("public.items", TableState.LIVE, T0)
        name, new = await event(response)
        assert name == "change"
        assert [t["table"] for t in new["sources"]["shop"]["tables"]] == ["public.items"]
        async with session.get(url(server)) as other:
            assert len((await event(other))[1]["sources"]["shop"]["tables"]) == 2
            shop.enter(SourceState.STREAMING, T0)
            told = [(await event(r))[1] for r in (response, other)]
            assert told[0] == told[1]
            assert told[0]["sources"]["shop"]["state"] == "streaming"
    await until(lambda: server.feed.readers == 0)


async def test_bounded_there_are_so_many_streams_and_no_more(
    server: HttpServer, session: aiohttp.ClientSession
) -> None:
    streams = [await session.get(url(server)) for _ in range(MAX_READERS)]
    async with session.get(url(server)) as refused:
        assert refused.status == 503
        assert "status pages are open" in (await refused.json())["error"]
    streams.pop().close()
    await until(lambda: server.feed.readers < MAX_READERS, ticking=server.feed)
    async with session.get(url(server)) as taken:
        assert (await event(taken))[0] == "state"
    for stream in streams:
        stream.close()


async def test_bounded_a_reader_that_does_not_read_is_cut_off(
    server: HttpServer, status: DaemonStatus, session: aiohttp.ClientSession
) -> None:
    shop = status.sources["shop"]
    idle = socket.socket()
    idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    idle.setblocking(False)  # noqa: FBT003 - its only form
    loop = asyncio.get_running_loop()
    await loop.sock_connect(idle, (server.address.host, server.address.port))
    await loop.sock_sendall(idle, b"GET /status/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await until(lambda: server.feed.readers == 1)
    async with session.get(url(server)) as busy:
        await event(busy)
        for n in range(400):
            # an error of 200 kB, sent again each time
            shop.enter(SourceState.STOPPED, T0, OperatorError(f"{n} " + "x" * 20_000))
            server.feed.tick()
            await event(busy)
            if server.feed.readers == 1:
                break
        assert server.feed.readers == 1
        shop.enter(SourceState.STREAMING, T0)
        server.feed.tick()
        assert (await event(busy))[0] == "change"
    async with asyncio.timeout(LIMIT_S):
        with suppress(ConnectionResetError):
            while await loop.sock_recv(idle, 1 << 20):  # what was on its way already
                pass
    idle.close()


async def test_streams_end_with_the_daemon(
    status: DaemonStatus, session: aiohttp.ClientSession
) -> None:
    async with HttpServer(ANY_PORT, Metrics(), status, Redactor(), NoCommands()) as server:
        response = await session.get(url(server))
        await event(response)
        closing = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - closing < 5
    async with asyncio.timeout(LIMIT_S):
        await response.content.read()


async def test_a_disconnected_reader_is_noticed_without_an_update(
    server: HttpServer, session: aiohttp.ClientSession
) -> None:
    response = await session.get(url(server))
    await event(response)
    before = server.feed.history.of_source("shop").added
    response.close()
    await until(lambda: server.feed.readers == 0, ticking=server.feed)
    assert server.feed.history.of_source("shop").added == before


async def test_with_a_token_there_is_no_stream_without_it(
    status: DaemonStatus, session: aiohttp.ClientSession
) -> None:
    protection = Protection("the-token-of-it")
    async with HttpServer(
        ANY_PORT, Metrics(), status, Redactor(), NoCommands(), protection=protection
    ) as server:
        async with session.get(url(server)) as response:
            assert response.status == 401
        async with session.get(f"{url(server)}?token=the-token-of-it") as response:
            assert response.status == 401
        headers = {"Authorization": "Bearer the-token-of-it"}
        async with session.get(url(server), headers=headers) as response:
            assert (await event(response))[0] == "state"


async def test_the_history_continues_without_readers(status: DaemonStatus) -> None:
    clock = [0.0]
    feed = EventsFeed(status, Redactor(), monotonic=lambda: clock[0])
    for _ in range(100):
        feed.tick()
        clock[0] += 1
    assert feed.history.of_source("shop").added == 100 / INTERVAL_S


async def test_a_page_without_further_updates_is_notified(
    server: HttpServer,
    status: DaemonStatus,
    session: aiohttp.ClientSession,
) -> None:
    async with session.get(url(server)) as response:
        await event(response)
        with capture_logs() as logged:
            status.sources = None  # type: ignore[assignment] # a fault of ours
            async with asyncio.timeout(LIMIT_S):
                await response.content.read()
            await until(lambda: logged)
    assert logged[0]["event"] == "page.failed"
