"""Requesting a snapshot over HTTP: which clients may, and the responses."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from ingestd.config.redaction import Redactor
from ingestd.config.units import Address, is_loopback
from ingestd.http.auth import host_of
from ingestd.http.client import Endpoint, cancel_snapshot, endpoint_of, request_snapshot
from ingestd.http.server import HttpServer
from ingestd.model.errors import (
    ConfigError,
    IngestdError,
    OperatorError,
    TableError,
    TransientError,
)
from ingestd.model.schema import TableId
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import DaemonStatus, SourceStatus
from tests.harness.command_tokens import bearer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

T0 = datetime(2026, 1, 2, tzinfo=UTC)
LOOPBACK = Address("127.0.0.1", 0)
ORDERS = {"tables": ["public.orders"]}


class Asked:
    """Takes requests, or raises `error`."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, list[str]]] = []
        self.conditions: list[str | None] = []
        self.cancelled: list[tuple[str, list[str]]] = []
        self.error: IngestdError | None = None

    def request_snapshot(
        self, source: str, tables: Sequence[TableId], where: str | None = None
    ) -> None:
        if self.error is not None:
            raise self.error
        self.requests.append((source, [str(t) for t in tables]))
        self.conditions.append(where)

    def cancel_snapshot(self, source: str, tables: Sequence[TableId]) -> None:
        if self.error is not None:
            raise self.error
        self.cancelled.append((source, [str(t) for t in tables]))


@pytest.fixture
def asked() -> Asked:
    return Asked()


def server_on(listen: Address, asked: Asked) -> HttpServer:
    status = DaemonStatus("0.1.0", T0, {"shop": SourceStatus("shop", T0)})
    return HttpServer(listen, Metrics(), status, Redactor(["sesame"]), asked)


@pytest.fixture
async def server(asked: Asked) -> AsyncIterator[HttpServer]:
    async with server_on(LOOPBACK, asked) as server:
        yield server


async def post(
    server: HttpServer,
    body: str | bytes,
    *,
    method: str = "POST",
    source: str = "shop",
    host: str | None = None,
    content_type: str = "application/json",
) -> tuple[int, Any]:
    headers = {"Content-Type": content_type, **bearer(server)}
    headers |= {} if host is None else {"Host": host}
    url = f"http://127.0.0.1:{server.address.port}/sources/{source}/snapshot"
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, data=body, headers=headers) as response,
    ):
        assert "Access-Control-Allow-Origin" not in response.headers
        return response.status, json.loads(await response.text())


async def test_a_request_is_passed_on_and_repeated(server: HttpServer, asked: Asked) -> None:
    tables = ["public.orders", '"a.b".c', "public.orders"]
    code, answer = await post(server, json.dumps({"tables": tables}))
    assert code == 202
    assert answer == {"source": "shop", "tables": ["public.orders", '"a.b".c']}
    assert asked.requests == [("shop", ["public.orders", '"a.b".c'])]
    assert asked.conditions == [None]


async def test_a_condition_is_passed_on_and_repeated(server: HttpServer, asked: Asked) -> None:
    body = {**ORDERS, "where": "id > 7 AND note <> ';'"}
    assert await post(server, json.dumps(body)) == (202, {"source": "shop", **body})
    assert asked.conditions == [body["where"]]


async def test_a_snapshot_is_cancelled(server: HttpServer, asked: Asked) -> None:
    answer = await post(server, json.dumps(ORDERS), method="DELETE")
    assert answer == (200, {"source": "shop", **ORDERS})
    assert (asked.requests, asked.cancelled) == ([], [("shop", ["public.orders"])])


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9464", "10.0.0.1", "127.0.0.1.evil.example", "[::2]:1"]
)
async def test_a_name_bound_to_loopback_is_refused(
    server: HttpServer, asked: Asked, host: str, method: str
) -> None:
    code, answer = await post(server, json.dumps(ORDERS), host=host, method=method)
    assert code == 403
    assert "Host" in answer["error"]
    assert (asked.requests, asked.cancelled) == ([], [])


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9464", "127.0.0.1", "[::1]:9464"])
async def test_every_name_of_loopback_is_taken(server: HttpServer, asked: Asked, host: str) -> None:
    assert (await post(server, json.dumps(ORDERS), host=host))[0] == 202
    assert len(asked.requests) == 1


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"],
)
async def test_what_a_page_may_send_unasked_is_refused(
    server: HttpServer, asked: Asked, content_type: str
) -> None:
    code, answer = await post(server, json.dumps(ORDERS), content_type=content_type)
    assert code == 415
    assert "application/json" in answer["remedy"]
    assert asked.requests == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"{",
        b"[]",
        b'["public.orders"]',
        b'{"tables": []}',
        b'{"tables": "public.orders"}',
        b'{"tables": [1]}',
        b'{"tables": ["public.orders"], "and": 1}',
        b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_a_body_of_another_shape_is_refused(
    server: HttpServer, asked: Asked, body: bytes, method: str
) -> None:
    code, answer = await post(server, body, method=method)
    assert code == 400
    assert '{"tables": ["public.orders"]}' in answer["error"]
    assert (asked.requests, asked.cancelled) == ([], [])


@pytest.mark.parametrize("where", ["", " ", 1, ["id > 1"], "id > '\0'"])
async def test_a_condition_of_another_shape_is_refused(
    server: HttpServer, asked: Asked, where: object
) -> None:
    code, answer = await post(server, json.dumps({**ORDERS, "where": where}))
    assert code == 400
    assert '"where": "id < 1000"' in answer["error"]
    assert asked.requests == []


async def test_cancelling_takes_no_condition(server: HttpServer, asked: Asked) -> None:
    body = json.dumps({**ORDERS, "where": "id > 1"})
    assert (await post(server, body, method="DELETE"))[0] == 400
    assert asked.cancelled == []


async def test_a_table_without_schema_is_refused(server: HttpServer, asked: Asked) -> None:
    code, answer = await post(server, '{"tables": ["public.orders", "orders"]}')
    assert code == 422
    assert "orders" in answer["error"]
    assert asked.requests == []


async def test_an_unknown_source_is_named(server: HttpServer, asked: Asked) -> None:
    code, answer = await post(server, json.dumps(ORDERS), source="shpo")
    assert (code, answer["error"]) == (404, "sources.shpo: no such source; there is shop")
    assert asked.requests == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OperatorError("table public.order is not captured", remedy="did you mean sesame?"), 422),
        (TableError(TableId("public", "order"), "no key", remedy="did you mean sesame?"), 422),
        (TransientError("source shop is stopped: x", reason="y", remedy="use sesame?"), 409),
    ],
)
async def test_a_refusal_is_reported_without_secrets(
    server: HttpServer, asked: Asked, error: IngestdError, code: int
) -> None:
    asked.error = error
    for method in ("POST", "DELETE"):
        found, answer = await post(server, json.dumps(ORDERS), method=method)
        assert (found, answer["error"]) == (code, error.what)
        assert answer["remedy"] == (error.remedy or "").replace("sesame", "***")


async def test_a_request_by_get_changes_nothing(server: HttpServer, asked: Asked) -> None:
    url = f"http://{server.address}/sources/shop/snapshot"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        assert response.status == 405
    assert asked.requests == []


# --- the client ------------------------------------------------------------------------------


async def test_the_client_asks(server: HttpServer, asked: Asked) -> None:
    await asyncio.to_thread(request_snapshot, server.address, "shop", ["public.orders"])
    await asyncio.to_thread(request_snapshot, server.address, "shop", ["public.orders"], "id > 'ü'")
    assert asked.requests == [("shop", ["public.orders"])] * 2
    assert asked.conditions == [None, "id > 'ü'"]
    await asyncio.to_thread(cancel_snapshot, server.address, "shop", ["public.orders"])
    assert asked.cancelled == [("shop", ["public.orders"])]


@pytest.mark.parametrize(
    ("source", "error", "kind"),
    [
        ("no/such", None, ConfigError),
        ("shop", OperatorError("not captured", remedy="do"), OperatorError),
        ("shop", TransientError("it is stopped", reason="x", remedy="do"), TransientError),
    ],
)
async def test_the_client_raises_what_the_daemon_says(
    server: HttpServer,
    asked: Asked,
    source: str,
    error: IngestdError | None,
    kind: type[IngestdError],
) -> None:
    asked.error = error
    with pytest.raises(kind) as caught:
        await asyncio.to_thread(request_snapshot, server.address, source, ["public.orders"])
    assert type(caught.value) is kind
    if error is not None:
        assert (caught.value.what, caught.value.remedy) == (error.what, "do")
    else:
        assert caught.value.what == "sources.no/such: no such source; there is shop"


async def test_something_else_on_the_port_is_an_operators_matter() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\nno\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        listen = Address("127.0.0.1", other.sockets[0].getsockname()[1])
        with pytest.raises(OperatorError, match="knows no such command"):
            await asyncio.to_thread(request_snapshot, listen, "shop", ["public.orders"])


async def test_a_daemon_that_went_away_is_transient(asked: Asked) -> None:
    async with server_on(LOOPBACK, asked) as server:
        gone = server.address
    with pytest.raises(TransientError, match="no response"):
        await asyncio.to_thread(request_snapshot, gone, "shop", ["public.orders"])


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("http://127.0.0.1:9464", "127.0.0.1", 9464),
        ("http://[::1]:9464/", "::1", 9464),
        ("http://localhost", "localhost", 80),
        ("https://daemon.example", "daemon.example", 443),
        ("https://daemon.example:9464", "daemon.example", 9464),
    ],
)
def test_a_url_is_an_address(text: str, host: str, port: int) -> None:
    found = endpoint_of(text, "t")
    assert found == Endpoint(host, port, "t")
    assert (found.tls is not None) is text.startswith("https")
    assert "t" not in repr(found).split("=")


@pytest.mark.parametrize(
    "text", ["", "127.0.0.1:9464", "ftp://x", "http://", "http://x:port", "http://x/status"]
)
def test_what_is_no_url_of_a_daemon(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        endpoint_of(text)


@pytest.mark.parametrize(
    "host", ["daemon.example:9464", "10.0.0.5", "127.0.0.1.example", "[fe80::1]"]
)
def test_the_token_is_not_sent_in_clear_to_another_machine(host: str) -> None:
    with pytest.raises(ValueError, match="the token would cross the network unencrypted"):
        endpoint_of(f"http://{host}", "t")
    assert endpoint_of(f"http://{host}").token is None
    assert endpoint_of(f"https://{host}", "t").token == "t"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("127.0.0.1:9464", True),
        ("127.8.9.1", True),
        ("[::1]", True),
        ("localhost.:1", True),
        ("", False),
        ("0.0.0.0:9464", False),
        ("[::ffff:10.0.0.1]:1", False),
        ("localhost.evil.example", False),
        ("127.0.0.1@evil.example", False),
    ],
)
def test_loopback_hosts(header: str, *, expected: bool) -> None:
    assert is_loopback(host_of(header)) is expected
