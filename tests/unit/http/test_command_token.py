"""The token that commands need where the config has none: its file, and when it is trusted."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import stat
import subprocess
import tempfile
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.config import HttpSettings
from ingestd.config.redaction import Redactor
from ingestd.config.units import Address
from ingestd.http.auth import check_http
from ingestd.http.client import cancel_snapshot, fetch_status, request_snapshot
from ingestd.http.command_token import CommandToken, read_token, why_off
from ingestd.http.server import HttpServer
from ingestd.model.errors import OperatorError
from ingestd.observe.metrics import Metrics
from ingestd.observe.status import DaemonStatus, SourceStatus
from tests.harness.command_tokens import bearer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ingestd.model.schema import TableId

T0 = datetime(2026, 1, 2, tzinfo=UTC)
PORT = 9464
NO_FOLDERS = {"STATE_DIRECTORY": "/dev/null", "XDG_STATE_HOME": "/dev/null"}


class Asked:
    def __init__(self) -> None:
        self.tables: list[str] = []
        self.where: str | None = None

    def request_snapshot(
        self, source: str, tables: Sequence[TableId], where: str | None = None
    ) -> None:
        self.tables += [f"{source} {table}" for table in tables]
        self.where = where

    def cancel_snapshot(self, source: str, tables: Sequence[TableId]) -> None:
        self.tables += [f"no {source} {table}" for table in tables]


def server_of(asked: Asked, host: str = "127.0.0.1") -> HttpServer:
    status = DaemonStatus("0.1.0", T0, {"shop": SourceStatus("shop", T0)})
    return HttpServer(Address(host, 0), Metrics(), status, Redactor(), asked)


def ask(
    server: HttpServer, method: str, path: str, body: str = "", **headers: str
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.address.port, timeout=10)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        text = response.read().decode()
        return response.status, json.loads(text) if text.startswith("{") else text
    finally:
        connection.close()


def written(folder: Path, port: int = PORT) -> CommandToken:
    token = CommandToken()
    token.write(port, {"STATE_DIRECTORY": str(folder)})
    assert token.off is None
    assert token.path is not None
    return token


@pytest.fixture
def no_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/null/none")


# --- the server ------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_nothing_but_the_token_of_the_file_commands(host: str) -> None:
    asked = Asked()
    body = json.dumps({"tables": ["public.orders"], "where": "pan::regclass IS NULL"})
    async with server_of(asked, host) as server:
        path = "/sources/shop/snapshot"
        for given in ("", "Bearer", "Bearer ", f"Bearer {'0' * 64}", "Basic eA=="):
            headers = {"Authorization": given} if given else {}
            for method in ("POST", "DELETE"):
                code, answer = await asyncio.to_thread(ask, server, method, path, body, **headers)
                assert code == 401
                assert str(server.commands.path) in answer["error"]
        assert asked.tables == []
        for reading in ("/status", "/metrics", "/readyz", "/healthz", "/"):
            assert (await asyncio.to_thread(ask, server, "GET", reading))[0] in {200, 503}
        assert (await asyncio.to_thread(ask, server, "POST", path, body, **bearer(server)))[
            0
        ] == 202
    assert asked.tables == ["shop public.orders"]


async def test_the_remedy_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "it's a $(folder)"
    folder.mkdir()
    monkeypatch.setenv("STATE_DIRECTORY", str(folder))
    asked = Asked()
    where = "note = 'it''s' AND x > \"y\""
    body = json.dumps({"tables": ["public.orders"], "where": where})
    async with server_of(asked) as server:
        refused = await asyncio.to_thread(ask, server, "POST", "/sources/shop/snapshot", body)
        command = refused[1]["remedy"].partition("or root, or: ")[2]
        assert command.startswith("curl ")
        done = await asyncio.to_thread(
            subprocess.run, ["sh", "-c", command], capture_output=True, text=True, timeout=20
        )
    assert done.returncode == 0, command + done.stderr
    assert json.loads(done.stdout)["tables"] == ["public.orders"], done.stderr
    assert (asked.tables, asked.where) == (["shop public.orders"], where)


async def test_the_client_finds_the_token_with_nothing_configured() -> None:
    asked = Asked()
    async with server_of(asked) as server:
        there = server.address
        await asyncio.to_thread(request_snapshot, there, "shop", ["public.orders"])
        await asyncio.to_thread(cancel_snapshot, there, "shop", ["public.orders"])
        status = await asyncio.to_thread(fetch_status, there)
        assert status is not None
        assert status["commands"]["token_file"] == str(server.commands.path)
        assert bearer(server)["Authorization"].split()[1] not in json.dumps(status)
    assert asked.tables == ["shop public.orders", "no shop public.orders"]


async def test_each_start_has_a_new_token_and_a_stop_removes_its_file() -> None:
    async with server_of(Asked()) as first, server_of(Asked()) as second:
        paths = [first.commands.path, second.commands.path]
        assert len({str(path) for path in paths}) == 2
        assert bearer(first) != bearer(second)
        body = '{"tables": ["public.orders"]}'
        answer = await asyncio.to_thread(
            ask, second, "POST", "/sources/shop/snapshot", body, **bearer(first)
        )
        assert answer[0] == 401
    assert not any(path is not None and path.exists() for path in paths)


@pytest.mark.usefixtures("no_temporary")
async def test_without_a_folder_commands_are_off_and_reading_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in NO_FOLDERS.items():
        monkeypatch.setenv(name, value)
    asked = Asked()
    async with server_of(asked) as server:
        body = '{"tables": ["public.orders"]}'
        for given in ({}, {"Authorization": "Bearer None"}, {"Authorization": "Bearer "}):
            code, answer = await asyncio.to_thread(
                ask, server, "POST", "/sources/shop/snapshot", body, **given
            )
            assert code == 503
            assert "commands are off" in answer["error"]
            assert "STATE_DIRECTORY" in answer["remedy"]
        assert (await asyncio.to_thread(ask, server, "GET", "/status"))[0] == 200
        with pytest.raises(OperatorError, match="accepts no commands"):
            await asyncio.to_thread(request_snapshot, server.address, "shop", ["public.orders"])
    assert asked.tables == []
    assert why_off(os.environ) is not None
    line = check_http(HttpSettings(), os.environ)
    assert line is not None
    assert (line.level, "commands would be off" in line.detail) == ("warn", True)


# --- the file --------------------------------------------------------------------------------


def test_the_file_is_its_users_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        token = written(tmp_path)
    finally:
        os.umask(old)
    assert token.path is not None
    found = token.path.lstat()
    assert stat.S_ISREG(found.st_mode)
    assert (stat.S_IMODE(found.st_mode), found.st_uid) == (0o600, os.geteuid())
    assert read_token(token.to_json(), PORT) == token.path.read_text().strip()
    assert len(token.path.read_text()) == 65
    assert sorted(tmp_path.iterdir()) == [token.path]


def test_what_is_planted_in_its_place_is_replaced_not_followed(tmp_path: Path) -> None:
    path = written(tmp_path).path
    assert path is not None
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for plant in (path.symlink_to, path.hardlink_to):
        path.unlink()
        plant(victim)
        assert read_token(written(tmp_path).to_json(), PORT)
        assert victim.read_text() == "mine"
        assert not path.is_symlink()
    path.unlink()
    path.write_text("0" * 64 + "\n")  # a stale one, or one that an attacker knows
    written(tmp_path)
    assert path.read_text() != "0" * 64 + "\n"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_folder_that_everybody_writes_is_not_used(tmp_path: Path, mode: int) -> None:
    folder, other = tmp_path / "open", tmp_path / "home"
    folder.mkdir()
    folder.chmod(mode)
    token = CommandToken()
    token.write(PORT, {"STATE_DIRECTORY": str(folder), "XDG_STATE_HOME": str(other)})
    assert token.path is not None
    assert token.path.parent == other / "ingestd"
    assert stat.S_IMODE(token.path.parent.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder away")
def test_a_folder_of_another_account_is_not_used(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    token = CommandToken()
    token.write(PORT, {"STATE_DIRECTORY": str(tmp_path)})
    assert token.path is not None
    assert token.path.parent != tmp_path
    token.remove()


@pytest.mark.usefixtures("no_temporary")
def test_the_last_folder_is_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    token = CommandToken()
    token.write(PORT, NO_FOLDERS)
    assert token.path is not None
    assert token.path.is_relative_to(tmp_path)
    token.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_the_next_daemon_is_not_removed(tmp_path: Path) -> None:
    first, second = written(tmp_path), written(tmp_path)
    first.remove()
    assert read_token(second.to_json(), PORT)
    second.remove()
    assert list(tmp_path.iterdir()) == []


# --- what listens may name any file ----------------------------------------------------------


def told(path: Path | str) -> dict[str, object]:
    return {"token_file": str(path), "user": "postgres", "off": None}


SECRET = "5" * 64


@pytest.mark.parametrize(
    "kind", ["name", "port", "link", "hard link", "readable", "fifo", "content", "folder", "owner"]
)
def test_no_other_file_is_sent(tmp_path: Path, kind: str) -> None:
    """A process that squats on the port gets nothing that it could not read itself."""
    token = written(tmp_path)
    assert token.path is not None
    path = token.path
    secret = tmp_path / "mask.key"
    secret.write_text(SECRET + "\n")
    secret.chmod(0o600)
    if kind == "name":
        path = secret
    elif kind == "port":
        path = path.rename(path.with_name(path.name.replace("9464", "9465")))
    elif kind in {"link", "hard link"}:
        path.unlink()
        (path.symlink_to if kind == "link" else path.hardlink_to)(secret)
    elif kind == "readable":
        path.chmod(0o640)
    elif kind == "fifo":
        path.unlink()
        os.mkfifo(path, 0o600)
    elif kind == "content":
        path.write_text(SECRET + "\nmore\n")
    elif kind == "folder":
        tmp_path.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        pytest.skip("only root gives a file away")
    with pytest.raises(OperatorError) as caught:
        read_token(told(path), PORT)
    assert SECRET not in str(caught.value)
    assert caught.value.remedy


def of_nobody(folder: Path) -> Path:
    """Return the file that an account puts into a folder of its own."""
    token = written(folder)
    assert token.path is not None
    for path in (folder, token.path):
        os.chown(path, 65534, 65534)
    return token.path


@pytest.mark.attack("account")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root believes others")
@pytest.mark.parametrize(
    "kind", ["below its own", "below everybody's", "another name", "by a link"]
)
def test_root_does_not_trust_a_file_any_account_can_create(kind: str) -> None:
    """A server that knows the token could prove it, and would be sent the condition."""
    with tempfile.TemporaryDirectory(prefix="ingestd-tests-", dir="/var/lib") as made:
        own = Path(made)
        folder = own / "other" if kind == "another name" else own / "above" / "ingestd"
        folder.mkdir(parents=True)
        folder.parent.chmod(0o1777 if kind == "below everybody's" else 0o755)
        if kind == "below its own":
            os.chown(folder.parent, 65534, 65534)
        path = of_nobody(folder)
        if kind == "by a link":
            (own / "link").symlink_to(folder.parent)
            path = own / "link" / "ingestd" / path.name
        with socket.create_server(("127.0.0.1", 0)) as squatter:
            port = squatter.getsockname()[1]
            named = path.rename(path.with_name(path.name.replace(str(PORT), str(port))))
            received: list[bytes] = []
            answering = threading.Thread(target=_answer, args=(squatter, named, received))
            answering.start()
            with pytest.raises(
                OperatorError, match="is not trusted: it belongs to another account"
            ):
                request_snapshot(Address("127.0.0.1", port), "shop", ["a.b"], "note = 'canary'")
            squatter.shutdown(socket.SHUT_RDWR)
            answering.join(10)
        assert received
        assert b"canary" not in b"".join(received)


def _answer(squatter: socket.socket, path: Path, received: list[bytes]) -> None:
    body = json.dumps({"sources": {"shop": {}}, "commands": told(path)}).encode()
    head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    with contextlib.suppress(OSError):
        while True:
            with squatter.accept()[0] as client:
                client.settimeout(10)
                received.append(client.recv(1 << 16))
                client.sendall(head.encode() + body)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root believes others")
def test_root_believes_the_daemons_user_in_its_state_directory() -> None:
    with tempfile.TemporaryDirectory(prefix="ingestd-tests-", dir="/var/lib") as made:
        assert len(read_token(told(of_nobody(Path(made))), PORT)) == len(SECRET)


@pytest.mark.parametrize("path", ["relative", "http-h-9464.token", "", "/none/http-h-9464.token"])
def test_a_path_that_is_none_is_named(path: str) -> None:
    with pytest.raises(OperatorError) as caught:
        read_token(told(path), PORT)
    assert caught.value.remedy


def test_a_path_does_not_speak_to_the_terminal() -> None:
    with pytest.raises(OperatorError) as caught:
        read_token(told("/x\x1b[31m/http-h-9464.token"), PORT)
    assert "\x1b" not in str(caught.value)


def test_a_squatter_gets_the_token_of_no_other_daemon(tmp_path: Path) -> None:
    """It answers /status like a daemon, and names the file of one that runs on another port."""
    token = written(tmp_path, 9471)
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        squatter.settimeout(10)
        there = Address("127.0.0.1", squatter.getsockname()[1])
        status = json.dumps({"sources": {"shop": {}}, "commands": token.to_json()})
        failed: list[Exception] = []

        def run() -> None:
            try:
                request_snapshot(there, "shop", ["public.orders"])
            except OperatorError as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        connection, _ = squatter.accept()
        heard = connection.recv(65536)
        answer = f"HTTP/1.1 200 OK\r\nContent-Length: {len(status)}\r\n\r\n{status}"
        connection.sendall(answer.encode())
        connection.close()
        thread.join(20)
    assert failed
    assert b"Authorization" not in heard
