"""No token and no condition is sent to what listens in the daemon's place."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from typer.testing import CliRunner

from ingestd import cli
from ingestd.config.redaction import Redactor
from ingestd.config.units import Address
from ingestd.http.auth import OPEN, Protection
from ingestd.http.client import (
    Endpoint,
    UnprovenError,
    cancel_snapshot,
    fetch_status,
    request_pause,
    request_resume,
    request_snapshot,
)
from ingestd.http.command_token import CommandToken
from ingestd.http.server import HttpServer
from ingestd.http.token_proof import ProofKey, new_challenge, written_address
from ingestd.model.errors import IngestdError, OperatorError
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import DaemonStatus, SourceStatus
from tests.harness.config import wal_config
from tests.unit.http.test_command_token import Asked

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

pytestmark = pytest.mark.attack("account")
T0 = datetime(2026, 1, 2, tzinfo=UTC)
TOKEN = "token-canary-0123456789"
WHERE = "note = 'condition-canary'"
TABLES = ["public.orders"]
REQUESTS: dict[str, Callable[[Endpoint], object]] = {
    "status": fetch_status,
    "snapshot": lambda there: request_snapshot(there, "shop", TABLES, WHERE),
    "cancel": lambda there: cancel_snapshot(there, "shop", TABLES),
    "pause": lambda there: request_pause(there, "shop"),
    "resume": lambda there: request_resume(there, "shop"),
}


def server_of(asked: Asked, token: str | None = TOKEN) -> HttpServer:
    status = DaemonStatus("0.1.0", T0, {"shop": SourceStatus("shop", T0)})
    protection = OPEN if token is None else Protection(token)
    return HttpServer(
        Address("127.0.0.1", 0), Metrics(), status, Redactor(), asked, protection=protection
    )


@dataclass
class Squatter:
    """Listens in the daemon's place, records what it gets, and answers with `bodies`, by path.

    A body may be a function of the request's target.
    `relayed`: where it passes everything on to, instead. `closes`: after each answer.
    """

    bodies: dict[str, object] = field(default_factory=dict)
    relayed: Address | None = None
    closes: bool = False
    heard: bytes = b""

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[Endpoint]:
        async with await asyncio.start_server(self._answer, "127.0.0.1", 0) as server:
            yield Endpoint("127.0.0.1", server.sockets[0].getsockname()[1], TOKEN)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heard += head
                target = head.split()[1].decode()
                path = target.partition("?")[0]
                if self.relayed is not None:
                    writer.write(await self._relay(head))
                else:
                    found = self.bodies.get(path, {"sources": {"shop": {}}})
                    found = found(target) if callable(found) else found
                    body = found if isinstance(found, bytes) else json.dumps(found).encode()
                    close = b"Connection: close\r\n" if self.closes else b""
                    size = b"Content-Length: %d\r\n\r\n" % len(body)
                    writer.write(b"HTTP/1.1 200 OK\r\nServer: ingestd\r\n" + close + size + body)
                await writer.drain()
                if self.closes:
                    break
        self.heard += await reader.read(4096)
        writer.close()

    async def _relay(self, head: bytes) -> bytes:
        assert self.relayed is not None
        reader, writer = await asyncio.open_connection(self.relayed.host, self.relayed.port)
        writer.write(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        answer = await reader.read()
        writer.close()
        return answer

    def assert_learned_nothing(self) -> None:
        assert self.heard
        assert TOKEN.encode() not in self.heard
        assert b"canary" not in self.heard
        assert b"Authorization" not in self.heard


LIES: dict[str, object] = {
    "nothing": {},
    "no JSON object": ["x"],
    "a number": {"address": 1, "proof": 2},
    "a proof by another token": None,
    "the challenge": {"proof": "0" * 64, "address": "127.0.0.1 1"},
    "a long answer": {"proof": "x" * 100_000},
    "an answer as deep as it is long": b"[" * 4000,
    "an address without characters": {"proof": "0" * 64, "address": "\ud800"},
}


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("lie", LIES)
async def test_a_squatter_learns_nothing(kind: str, lie: str) -> None:
    body = LIES[lie]
    if body is None:
        body = {"address": "x", "proof": ProofKey("another").proof(new_challenge(), "x")}
    squatter = Squatter({"/proof": body})
    async with squatter.listening() as there:
        with pytest.raises(UnprovenError, match="is not this daemon") as caught:
            await asyncio.to_thread(REQUESTS[kind], there)
    assert caught.value.remedy is not None
    squatter.assert_learned_nothing()


@pytest.mark.parametrize("kind", REQUESTS)
async def test_a_squatter_that_relays_to_a_daemon_learns_nothing(kind: str) -> None:
    """To one with the same token that listens elsewhere."""
    async with server_of(asked := Asked()) as server:
        squatter = Squatter(relayed=server.address)
        async with squatter.listening() as there:
            with pytest.raises(UnprovenError, match=f"forwards to .* port {server.address.port}"):
                await asyncio.to_thread(REQUESTS[kind], there)
    squatter.assert_learned_nothing()
    assert asked.tables == []


async def test_what_follows_the_proof_goes_nowhere_else() -> None:
    """A daemon that ends after its proof: a new connection would reach the next listener."""
    proof = ProofKey(TOKEN)
    squatter = Squatter(closes=True)
    async with squatter.listening() as there:
        address = f"127.0.0.1 {there.port}"

        def prove(target: str) -> object:
            challenge = target.partition("challenge=")[2]
            return {"address": address, "proof": proof.proof(challenge, address)}

        squatter.bodies["/proof"] = prove
        assert await asyncio.to_thread(fetch_status, there) is None
        with pytest.raises(IngestdError, match="no response"):
            await asyncio.to_thread(REQUESTS["snapshot"], there)
    squatter.assert_learned_nothing()


async def test_a_condition_awaits_the_proof_of_a_token_of_this_start(
    tmp_path: Path,
) -> None:
    """A killed daemon leaves its file behind, and the squatter names it."""
    squatter = Squatter()
    async with squatter.listening() as there:
        left = CommandToken()
        left.write(there.port, {"STATE_DIRECTORY": str(tmp_path)})
        told: dict[str, Any] = {"sources": {"shop": {}}, "commands": left.to_json()}
        for told["commands"] in (left.to_json(), {"off": None}, None):
            squatter.bodies["/status"] = told
            with pytest.raises(OperatorError, match=r"is not this daemon|knows no such command"):
                await asyncio.to_thread(REQUESTS["snapshot"], Endpoint(there.host, there.port))
    squatter.assert_learned_nothing()
    assert (left.value() or "").encode() not in squatter.heard


@pytest.mark.parametrize("token", [TOKEN, None])
async def test_the_daemon_proves_itself(token: str | None) -> None:
    async with server_of(asked := Asked(), token) as server:
        there = Endpoint(server.address.host, server.address.port, token)
        assert await asyncio.to_thread(fetch_status, there) is not None
        await asyncio.to_thread(REQUESTS["snapshot"], there)
    assert asked.where == WHERE


async def test_a_challenge_is_no_oracle() -> None:
    """Only 64 hexadecimal digits are answered, and never with the token or an answer twice."""
    async with server_of(Asked()) as server, aiohttp.ClientSession() as session:
        get = partial(session.get, f"http://{server.address}/proof")
        for challenge in ("", "x", "0" * 63, "0" * 65, "A" * 64, "0" * 63 + "\n", TOKEN):
            async with get(params={"challenge": challenge}) as response:
                assert response.status == 400
                assert TOKEN not in await response.text()
        found = set()
        for challenge in (new_challenge(), new_challenge()):
            async with get(params={"challenge": challenge}) as response:
                told = await response.json()
            assert told["address"] == written_address((server.address.host, server.address.port))
            assert ProofKey(TOKEN).is_proven(challenge, told["address"], told["proof"])
            found.add(told["proof"])
        assert len(found) == 2
        async with session.get(f"http://{server.address}/status") as response:
            assert response.status == 401


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (("127.0.0.1", 1), "127.0.0.1 1"),
        (("::ffff:127.0.0.1", 1, 0, 0), "127.0.0.1 1"),
        (("0:0:0:0:0:0:0:1", 1, 0, 0), "::1 1"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::1 1"),
    ],
)
def test_an_address_has_one_spelling(name: tuple[object, ...], text: str) -> None:
    assert written_address(name) == text


@pytest.mark.parametrize(
    "arguments",
    [
        ("snapshot", "shop", "public.orders", "--where", WHERE),
        ("pause", "shop"),
        ("resume", "shop"),
        ("status",),
    ],
)
async def test_a_command_says_who_does_not_listen(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    squatter = Squatter()
    async with squatter.listening() as there:
        config = tmp_path / "ingestd.toml"
        text = wal_config(lake=tmp_path / "lake", dsn="host=127.0.0.1 port=1 user=u dbname=d")
        config.write_text(f'{text}\n[http]\nlisten = "{there}"\ntoken = "{TOKEN}"\n')
        command = partial(CliRunner().invoke, cli.app, [*arguments, "-c", str(config)])
        done = await asyncio.to_thread(command)
    assert "is not this daemon" in " ".join(done.output.split()), done.output
    assert done.exit_code == (0 if arguments == ("status",) else 1)
    squatter.assert_learned_nothing()


@pytest.mark.parametrize("body", [b"[" * 200_000, b'"' + b"x" * 5000, b"\xff", b""])
async def test_of_a_status_that_is_none_no_more_than_a_bound_is_read(body: bytes) -> None:
    fetch = partial(fetch_status, limit_bytes=300_000 if body[:1] == b"[" else 1000)
    async with Squatter({"/status": body}).listening() as listen:
        without_token = Address(listen.host, listen.port)
        assert await asyncio.to_thread(fetch, without_token) is None
