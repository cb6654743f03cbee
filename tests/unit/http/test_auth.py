"""Which clients are answered over HTTP: by token, by TLS, and on loopback without either."""

from __future__ import annotations

import asyncio
import hmac
import os
import ssl
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from ingestd.config import HttpSettings
from ingestd.config.redaction import Redactor
from ingestd.config.units import Address
from ingestd.http.auth import Protection, check_http, openness, protection_of
from ingestd.http.client import (
    Endpoint,
    cancel_snapshot,
    endpoint_in,
    fetch_status,
    request_snapshot,
)
from ingestd.http.server import HttpServer
from ingestd.model.errors import OperatorError
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import DaemonStatus, SourceState, SourceStatus
from tests.harness.certificates import Authority

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from ingestd.model.schema import TableId

T0 = datetime(2026, 1, 2, tzinfo=UTC)
TOKEN = "0123456789abcdef-._~+/=="
ORDERS = {"tables": ["public.orders"]}
GUARDED = ["/metrics", "/status", "/readyz", "/sources/shop/snapshot", "/nowhere"]


class Asked:
    def __init__(self) -> None:
        self.tables: list[str] = []

    def request_snapshot(
        self, source: str, tables: Sequence[TableId], where: str | None = None
    ) -> None:
        del source, where
        self.tables += map(str, tables)

    def cancel_snapshot(self, source: str, tables: Sequence[TableId]) -> None:
        del source
        self.tables += [f"not {table}" for table in tables]


@pytest.fixture
def asked() -> Asked:
    return Asked()


def server_with(protection: Protection, asked: Asked, host: str = "127.0.0.1") -> HttpServer:
    shop = SourceStatus("shop", T0)
    shop.enter(SourceState.STREAMING, T0)
    status = DaemonStatus("0.1.0", T0, {"shop": shop})
    redactor = Redactor()
    return HttpServer(Address(host, 0), Metrics(), status, redactor, asked, protection=protection)


@pytest.fixture
async def server(asked: Asked) -> AsyncIterator[HttpServer]:
    async with server_with(Protection(TOKEN), asked) as server:
        yield server


async def answered(
    server: HttpServer, path: str, *, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    url = f"http://127.0.0.1:{server.address.port}{path}"
    body: dict[str, Any] = {"json": ORDERS} if method != "GET" else {}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, headers=headers, **body) as response,
    ):
        return response.status, dict(response.headers), await response.text()


# --- the token -------------------------------------------------------------------------------


async def test_only_healthz_answers_without_the_token(server: HttpServer) -> None:
    assert (await answered(server, "/healthz"))[0] == 200
    for path in GUARDED:
        code, headers, text = await answered(server, path)
        assert code == 401, path
        assert headers["WWW-Authenticate"] == "Bearer"
        assert headers["Cache-Control"] == "no-store"
        assert "shop" not in text


@pytest.mark.parametrize(
    "given",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN.upper()}",
        f"Basic {TOKEN}",
        TOKEN,
        "Bearer ünlesbar",
    ],
)
async def test_another_token_is_refused(server: HttpServer, given: str) -> None:
    assert (await answered(server, "/status", Authorization=given))[0] == 401


@pytest.mark.parametrize("given", [b"\xff\xfe", TOKEN.encode() + b"\xff", b"\xed\xb3\xbf"])
async def test_bytes_that_are_no_text_are_another_token(
    server: HttpServer, given: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
    writer.write(b"GET /status HTTP/1.0\r\nAuthorization: Bearer " + given + b"\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.0 401 "), answer
    assert not caplog.records


async def test_a_token_in_the_url_is_none(server: HttpServer) -> None:
    assert (await answered(server, f"/status?token={TOKEN}&access_token={TOKEN}"))[0] == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_the_token_opens_all(server: HttpServer, scheme: str) -> None:
    for path in ("/metrics", "/status", "/readyz"):
        code, _, text = await answered(server, path, Authorization=f"{scheme} {TOKEN}")
        assert code == 200
        assert TOKEN not in text
    assert (await answered(server, "/nowhere", Authorization=f"Bearer {TOKEN}"))[0] == 404


async def test_commands_need_the_token(server: HttpServer, asked: Asked) -> None:
    path = "/sources/shop/snapshot"
    for method in ("POST", "DELETE"):
        assert (await answered(server, path, method=method))[0] == 401
    assert asked.tables == []
    bearer = f"Bearer {TOKEN}"
    assert (await answered(server, path, method="POST", Authorization=bearer))[0] == 202
    assert asked.tables == ["public.orders"]


async def test_with_the_token_commands_come_from_anywhere(asked: Asked) -> None:
    async with server_with(Protection(TOKEN), asked, host="0.0.0.0") as server:
        path, bearer = "/sources/shop/snapshot", f"Bearer {TOKEN}"
        found = await answered(
            server, path, method="POST", Authorization=bearer, Host="daemon.example:9464"
        )
        assert found[0] == 202
        assert (await answered(server, path, method="POST", Host="daemon.example"))[0] == 401
    async with server_with(Protection(), asked, host="0.0.0.0") as server:
        assert (await answered(server, path, method="POST"))[0] == 401
    assert asked.tables == ["public.orders"]


async def test_tokens_are_compared_in_constant_time(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def noting(given: bytes, wanted: bytes) -> bool:
        compared.append((given, wanted))
        return compare(given, wanted)

    monkeypatch.setattr(hmac, "compare_digest", noting)
    await answered(server, "/status", Authorization="Bearer x")
    assert compared == [(b"x", TOKEN.encode())]


def test_its_repr_has_no_token() -> None:
    assert TOKEN not in repr(Protection(TOKEN))
    assert TOKEN not in repr(Endpoint("127.0.0.1", 1, TOKEN))


# --- without one -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", GUARDED)
async def test_a_name_bound_to_loopback_reads_nothing(path: str, asked: Asked) -> None:
    async with server_with(Protection(), asked) as server:
        for host in ("evil.example", "evil.example:9464", "127.0.0.1.evil.example", "10.0.0.1"):
            code, _, text = await answered(server, path, Host=host)
            assert code == 403
            assert "shop" not in text
        assert (await answered(server, "/healthz", Host="evil.example"))[0] == 200
        for host in ("localhost", "127.0.0.1:9464", "[::1]:9464"):
            assert (await answered(server, path, Host=host))[0] != 403


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:3000"])
async def test_no_page_of_a_browser_is_answered(origin: str, asked: Asked) -> None:
    async with server_with(Protection(), asked) as server:
        assert (await answered(server, "/status", Origin=origin))[0] == 403
        path = "/sources/shop/snapshot"
        assert (await answered(server, path, method="POST", Origin=origin))[0] == 403
    assert asked.tables == []


async def test_a_server_on_all_addresses_accepts_any_host_name(asked: Asked) -> None:
    async with server_with(Protection(), asked, host="0.0.0.0") as server:
        assert (await answered(server, "/metrics", Host="daemon.example:9464"))[0] == 200


async def test_every_answer_has_the_security_headers(server: HttpServer) -> None:
    for path in ("/healthz", "/status", "/nowhere"):
        for headers in ({}, {"Authorization": f"Bearer {TOKEN}"}):
            _, found, _ = await answered(server, path, **headers)
            policy = found["Content-Security-Policy"]
            assert policy == "default-src 'none'; frame-ancestors 'none'"
            assert found["X-Content-Type-Options"] == "nosniff"
            assert found["Cache-Control"] == "no-store"
            assert found["Server"] == "ingestd"
            assert not [name for name in found if name.startswith("Access-Control")]


# --- TLS, and the client ---------------------------------------------------------------------


def settings(
    folder: Path, authority: Authority | None = None, file: str = "daemon", **changes: Any
) -> HttpSettings:
    name = "daemon.example"
    made = (authority or Authority(folder)).sign(name, name, file=file)
    values: dict[str, Any] = {"token": TOKEN, "tls_cert": str(made.cert), "tls_key": str(made.key)}
    values = {k: v for k, v in {**values, **changes}.items() if v is not None}
    return HttpSettings.model_validate(values, strict=False)


def at(server: HttpServer, settings: HttpSettings) -> Endpoint:
    found = endpoint_in(settings)
    assert found is not None
    return Endpoint(server.address.host, server.address.port, found.token, found.tls)


async def test_the_client_knows_the_daemon_by_its_certificate(tmp_path: Path, asked: Asked) -> None:
    authority = Authority(tmp_path)
    chosen = settings(tmp_path, authority)
    async with server_with(protection_of(chosen), asked) as server:
        there = at(server, chosen)
        assert there.url == f"https://127.0.0.1:{server.address.port}"
        found = await asyncio.to_thread(fetch_status, there)
        assert found is not None
        assert list(found["sources"]) == ["shop"]
        await asyncio.to_thread(request_snapshot, there, "shop", ["public.orders"])
        await asyncio.to_thread(cancel_snapshot, there, "shop", ["public.orders"])
        assert asked.tables == ["public.orders", "not public.orders"]
        plain = Endpoint(there.host, there.port, TOKEN)
        assert await asyncio.to_thread(fetch_status, plain) is None
        # of the same CA, for the same name: it would get the token
        other = settings(tmp_path, authority, "other")
        stranger = Endpoint(there.host, there.port, TOKEN, at(server, other).tls)
        for ask in (fetch_status, lambda e: request_snapshot(e, "shop", ["public.orders"])):
            with pytest.raises(OperatorError, match="not the daemon's"):
                await asyncio.to_thread(ask, stranger)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_old_versions_of_tls_are_refused(tmp_path: Path, asked: Asked) -> None:
    chosen = settings(tmp_path)
    async with server_with(protection_of(chosen), asked) as server:
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname = False
        old.verify_mode = ssl.CERT_NONE
        old.set_ciphers("ALL:@SECLEVEL=0")
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(server.address.host, server.address.port, ssl=old)


async def test_the_client_says_that_the_token_is_another(server: HttpServer) -> None:
    texts = {None: "rejects the token", "another-token-of-16": "did not prove"}
    for token, text in texts.items():
        there = Endpoint(server.address.host, server.address.port, token)
        for ask in (fetch_status, lambda e: request_snapshot(e, "shop", ["public.orders"])):
            with pytest.raises(OperatorError) as caught:
                await asyncio.to_thread(ask, there)
            assert text in str(caught.value)
            assert TOKEN not in str(caught.value)


def test_a_certificate_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    good = Authority(tmp_path).sign("daemon")
    other = Authority(tmp_path, "other").sign("someone")
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("none\n")
    for cert, key in (
        (tmp_path / "absent", good.key),
        (good.cert, tmp_path / "absent"),
        (nothing, good.key),
        (good.cert, nothing),
        (good.cert, other.key),
    ):
        chosen = HttpSettings(tls_cert=str(cert), tls_key=str(key))
        with pytest.raises(OperatorError) as caught:
            protection_of(chosen)
        assert str(cert) in caught.value.what
        assert caught.value.remedy is not None
        line = check_http(chosen, os.environ)
        assert line is not None
        assert (line.subject, line.level) == ("http", "fail")
    with pytest.raises(OperatorError, match="can't be read"):
        endpoint_in(HttpSettings(tls_cert=str(nothing), tls_key=str(good.key)))


def test_who_is_warned(tmp_path: Path) -> None:
    tls = protection_of(settings(tmp_path)).tls
    wide, narrow = Address("0.0.0.0", 9464), Address("127.0.0.1", 9464)
    assert openness(narrow, Protection()) is None
    assert "no token" in (openness(wide, Protection()) or "")
    assert "no token" in (openness(Address("::", 9464), Protection(None, tls)) or "")
    assert "no tls_cert" in (openness(wide, Protection(TOKEN)) or "")
    assert openness(wide, Protection(TOKEN, tls)) is None
    assert check_http(HttpSettings(), os.environ) is None
    line = check_http(settings(tmp_path, listen="0.0.0.0:1", token=None), os.environ)
    assert line is not None
    assert (line.subject, line.level) == ("http", "warn")
    assert check_http(settings(tmp_path, listen="0.0.0.0:1"), os.environ) is None
