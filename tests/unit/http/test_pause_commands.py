"""Pausing and resuming over HTTP: the responses, and how the client handles them."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import pytest

from ingestd.config.redaction import Redactor
from ingestd.config.units import Address
from ingestd.http.auth import Protection
from ingestd.http.client import request_pause, request_resume
from ingestd.http.server import HttpServer
from ingestd.model.errors import ConfigError, IngestdError, OperatorError, TransientError
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import DaemonStatus, SourceStatus
from tests.harness.command_tokens import bearer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ingestd.http.commands import SnapshotControl

T0 = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


class Pausing:
    """Takes commands, or raises `error`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.error: IngestdError | None = None

    async def pause(self, source: str) -> datetime:
        self._take(f"pause {source}")
        return T0

    async def resume(self, source: str) -> bool:
        self._take(f"resume {source}")
        return len(self.asked) == 1

    def _take(self, what: str) -> None:
        if self.error is not None:
            raise self.error
        self.asked.append(what)


@pytest.fixture
def status() -> DaemonStatus:
    return DaemonStatus("0.1.0", T0, {"shop": SourceStatus("shop", T0)})


@pytest.fixture
def pausing() -> Pausing:
    return Pausing()


def server_of(
    status: DaemonStatus, pausing: Pausing, host: str = "127.0.0.1", token: str | None = None
) -> HttpServer:
    return HttpServer(
        Address(host, 0),
        Metrics(),
        status,
        Redactor(["sesame"]),
        cast("SnapshotControl", None),
        pausing=pausing,
        protection=Protection(token=token),
    )


@pytest.fixture
async def server(status: DaemonStatus, pausing: Pausing) -> AsyncIterator[HttpServer]:
    async with server_of(status, pausing) as server:
        yield server


async def send(
    server: HttpServer, method: str, body: str = "{}", content_type: str = "application/json"
) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{server.address.port}/sources/shop/pause"
    headers = {"Content-Type": content_type, **bearer(server)}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, data=body, headers=headers) as response,
    ):
        return response.status, json.loads(await response.text())


async def test_a_pause_is_answered_with_since_when(server: HttpServer, pausing: Pausing) -> None:
    told = {"source": "shop", "since": "2026-01-02T03:04:05.000+00:00"}
    assert await send(server, "POST") == (202, told)
    assert await send(server, "DELETE") == (200, {"source": "shop", "was_paused": False})
    assert pausing.asked == ["pause shop", "resume shop"]


@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_what_is_not_such_a_command_is_refused(
    server: HttpServer, pausing: Pausing, method: str
) -> None:
    assert (await send(server, method, '{"tables": []}'))[0] == 400
    assert (await send(server, method, "["))[0] == 400
    assert (await send(server, method, content_type="text/plain"))[0] == 415
    assert pausing.asked == []


async def test_without_a_token_nothing_is_paused(status: DaemonStatus, pausing: Pausing) -> None:
    url = "/sources/shop/pause"
    async with (
        server_of(status, pausing) as server,
        aiohttp.ClientSession() as session,
        session.post(f"http://{server.address}{url}", json={}) as response,
    ):
        assert response.status == 401
    async with server_of(status, pausing, token="t" * 32) as server:
        assert (await send(server, "POST"))[0] == 401
    assert pausing.asked == []


async def test_the_client_tells_the_same(server: HttpServer) -> None:
    assert await asyncio.to_thread(request_pause, server.address, "shop") == T0
    assert not await asyncio.to_thread(request_resume, server.address, "shop")
    with pytest.raises(ConfigError, match=r"sources\.shp: no such source; there is shop"):
        await asyncio.to_thread(request_pause, server.address, "shp")


@pytest.mark.parametrize("kind", [OperatorError, TransientError])
async def test_an_unwritable_lake_is_reported(
    server: HttpServer, pausing: Pausing, kind: type[IngestdError]
) -> None:
    what = "lake ./lake: the disk is full of sesame"
    pausing.error = (
        OperatorError(what) if kind is OperatorError else TransientError(what, reason="storage")
    )
    with pytest.raises(kind, match=r"the disk is full of \*\*\*"):
        await asyncio.to_thread(request_pause, server.address, "shop")


async def test_readiness_names_what_is_paused(status: DaemonStatus, server: HttpServer) -> None:
    status.sources["shop"].pause(T0)
    url = f"http://127.0.0.1:{server.address.port}/readyz"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 200
        assert (await response.text()).splitlines() == [
            "ready",
            "source shop is paused since 2026-01-02 03:04:05 UTC",
        ]
