"""Connections that never send a request: they are counted, and lock no client out."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ingestd.config.redaction import Redactor
from ingestd.config.units import Address
from ingestd.http.auth import Protection
from ingestd.http.connections import MAX_CONNECTIONS, Connections
from ingestd.http.server import HttpServer
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import DaemonStatus
from tests.harness.certificates import Authority
from tests.unit.http.test_server import ANY_PORT, Unasked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SILENT = 3 * MAX_CONNECTIONS
REQUEST = b"GET /healthz HTTP/1.0\r\n\r\n"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def context(authority: Authority) -> ssl.SSLContext:
    """Return the server's TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certified = authority.sign("localhost", "localhost")
    context.load_cert_chain(certified.cert, certified.key)
    return context


@pytest.fixture
def trusting(authority: Authority) -> ssl.SSLContext:
    """Return the clients' TLS."""
    return ssl.create_default_context(cafile=str(authority.cert))


def server_with(context: ssl.SSLContext) -> HttpServer:
    status = DaemonStatus("0.1.0", datetime(2026, 1, 2, tzinfo=UTC), {})
    protection = Protection(tls=context)
    return HttpServer(ANY_PORT, Metrics(), status, Redactor(), Unasked(), protection=protection)


@pytest.fixture
async def server(context: ssl.SSLContext) -> AsyncIterator[HttpServer]:
    async with server_with(context) as server:
        yield server


async def healthz(address: Address, trusting: ssl.SSLContext) -> bytes:
    reader, writer = await asyncio.open_connection(
        address.host, address.port, ssl=trusting, server_hostname="localhost"
    )
    writer.write(REQUEST)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


def files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_clients_without_a_handshake_do_not_lock_others_out(
    server: HttpServer, trusting: ssl.SSLContext
) -> None:
    address = server.address
    before = files()
    held = [await asyncio.open_connection(address.host, address.port) for _ in range(SILENT)]
    assert (await healthz(address, trusting)).endswith(b"ok\n")
    assert files() - before <= SILENT + MAX_CONNECTIONS + 1  # its ends of them, and ours
    for reader, _ in held[: SILENT - MAX_CONNECTIONS]:  # the oldest were ended
        assert await asyncio.wait_for(reader.read(), 10) == b""
    assert not held[-1][0].at_eof()
    for _, writer in held:
        writer.close()


async def test_what_is_no_tls_is_ended_and_logs_nothing(
    server: HttpServer, trusting: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection(server.address.host, server.address.port)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    assert b"200" not in await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert (await healthz(server.address, trusting)).endswith(b"ok\n")
    assert not caplog.records


async def test_a_request_in_the_packet_of_the_handshake_is_not_lost(
    context: ssl.SSLContext, trusting: ssl.SSLContext
) -> None:
    """Clients of TLS 1.3 send both in one packet."""
    spoken: asyncio.Queue[bytes] = asyncio.Queue()

    class Spoken(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            spoken.put_nowait(data)

    connections = Connections(Spoken, context)
    listening = await connections.listen(ANY_PORT)
    port = listening.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    writer.write(outgoing.read())
    while True:
        incoming.write(await asyncio.wait_for(reader.read(65536), 10))
        try:
            client.do_handshake()
        except ssl.SSLWantReadError:
            continue
        break
    client.write(REQUEST)
    writer.write(outgoing.read())
    assert await asyncio.wait_for(spoken.get(), 10) == REQUEST
    connections.close_all()
    writer.close()
    listening.close()


async def test_it_closes_while_someone_has_not_shaken_hands(
    context: ssl.SSLContext, trusting: ssl.SSLContext
) -> None:
    async with server_with(context) as server:
        address = server.address
        reader, writer = await asyncio.open_connection(address.host, address.port)
        assert (await healthz(address, trusting)).endswith(b"ok\n")  # so that one is accepted too
        assert not reader.at_eof()
    assert await asyncio.wait_for(reader.read(), 2) == b""
    writer.close()
