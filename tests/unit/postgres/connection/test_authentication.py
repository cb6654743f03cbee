"""No password for an impostor of the server, and no requirement without a password."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import pq

from ingestd.postgres.connection.authentication import check_lines, required
from ingestd.postgres.connection.dsn import read_dsn
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.session import connect, parameters_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PASSWORD = "S3cr3tPassword"
SCRAM = {"require_auth": "scram-sha-256"}
CLEARTEXT, MD5, OK = (
    struct.pack("!ci", b"R", 4 + len(body)) + body
    for body in (struct.pack("!i", 3), struct.pack("!i", 5) + b"salt", struct.pack("!i", 0))
)
LOCAL = f"host=127.0.0.1 port=9 user=u dbname=d password={PASSWORD}"


@pytest.fixture(autouse=True)
def _nothing_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("PG")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@contextlib.asynccontextmanager
async def squatter(asks: bytes, path: Path | None = None) -> AsyncIterator[tuple[int, bytearray]]:
    """Listen in a server's place, refuse TLS, and ask for a password; yields the port."""
    heard = bytearray()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                size = struct.unpack("!i", await reader.readexactly(4))[0]
                start = await reader.readexactly(size - 4)
                if size != 8:
                    break
                writer.write(b"N")  # no TLS, no Kerberos
            heard.extend(start)
            writer.write(asks)
            heard.extend(await reader.read(10_000))
        writer.close()

    server = (
        await asyncio.start_server(answer, "127.0.0.1", 0)
        if path is None
        else await asyncio.start_unix_server(answer, path / ".s.PGSQL.5432")
    )
    async with server:
        yield (server.sockets[0].getsockname()[1] if path is None else 5432), heard


@pytest.mark.parametrize("asks", [CLEARTEXT, MD5, OK], ids=["cleartext", "md5", "none"])
@pytest.mark.parametrize("replication", [False, True])
@pytest.mark.parametrize("way", ["dsn", "PGPASSWORD", "passfile", "socket", "service"])
async def test_a_squatter_gets_nothing(
    asks: bytes, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, replication: bool
) -> None:
    async with squatter(asks, tmp_path if way == "socket" else None) as (port, heard):
        host = str(tmp_path) if way == "socket" else "127.0.0.1"
        dsn = f"host={host} port={port} user=u dbname=d"
        if way in {"dsn", "socket"}:
            dsn += f" password={PASSWORD}"
        elif way == "PGPASSWORD":
            monkeypatch.setenv("PGPASSWORD", PASSWORD)
        elif way == "passfile":
            file = tmp_path / ".pgpass"
            file.write_text(f"# of us\n*:{port}:d:u:{PASSWORD}\n")
            file.chmod(0o600)
        else:
            file = tmp_path / "services"
            file.write_text(f"[s]\nhost=127.0.0.1\nport={port}\nuser=u\npassword={PASSWORD}\n")
            monkeypatch.setenv("PGSERVICEFILE", str(file))
            dsn = "service=s"
        with pytest.raises(psycopg.OperationalError) as caught:
            await connect(dsn, replication=replication)
        fault = classify(caught.value, "source shop", dsn)
    assert b"database" in heard or b"user" in heard
    assert PASSWORD.encode() not in heard
    assert b"p\0" not in heard  # no PasswordMessage at all
    assert "method requirement" in fault.what
    assert "require_auth=" in (fault.remedy or "")
    assert PASSWORD not in str(fault)


async def test_what_the_remedy_says_works() -> None:
    """The squatter is what the DSN trusts now: it gets the password."""
    async with squatter(CLEARTEXT) as (port, heard):
        dsn = f"host=127.0.0.1 port={port} user=u password={PASSWORD}"
        with pytest.raises(psycopg.OperationalError) as caught:
            await connect(dsn)
        fault = classify(caught.value, "source shop", dsn)
        addition = (fault.remedy or "").rpartition(" ")[2]
        assert addition == "require_auth=password"
        heard.clear()
        with pytest.raises(psycopg.OperationalError):
            await connect(f"{dsn} {addition}")
    assert PASSWORD.encode() in heard


@pytest.mark.parametrize(
    ("dsn", "expected"),
    [
        (LOCAL, SCRAM),
        ("host=127.0.0.1 user=u", {}),
        ("host=/run/postgresql user=u", {}),
        (f"host=/run/postgresql user=u password={PASSWORD}", SCRAM),
        (f"host=/run/postgresql sslmode=verify-full password={PASSWORD}", SCRAM),
        (f"user=u password={PASSWORD}", SCRAM),
        (f"host=db.example password={PASSWORD}", {}),  # verify-full by default
        (f"host=db.example sslmode=verify-ca password={PASSWORD}", {}),
        (f"host=db.example sslmode=require password={PASSWORD}", SCRAM),
        (f"host=127.0.0.1 sslmode=verify-full password={PASSWORD}", {}),
        (f"host=db.example,/run/x password={PASSWORD} sslmode=verify-full", SCRAM),
        (f"{LOCAL} require_auth=md5", {}),
        (f"postgresql://u:{PASSWORD}@localhost/d", SCRAM),
        (f"postgresql://u:{PASSWORD}@localhost/d?require_auth=none", {}),
    ],
)
def test_what_is_required(dsn: str, expected: dict[str, str]) -> None:
    assert required(read_dsn(dsn)) == expected
    made = parameters_of(dsn)
    assert made.get("require_auth") == expected.get(
        "require_auth", read_dsn(dsn).get("require_auth")
    )


@pytest.mark.parametrize("name", ["PGREQUIREAUTH", "service"])
def test_what_the_environment_says_goes_before(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if name == "service":
        (tmp_path / "s").write_text("[s]\nhost=127.0.0.1\npassword=x\nrequire_auth=md5\n")
        monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "s"))
        assert required({"service": "s"}) == {}
    else:
        monkeypatch.setenv(name, "password")
        assert required(read_dsn(LOCAL)) == {}
    [line] = check_lines("shop", {"service": "s"} if name == "service" else read_dsn(LOCAL))
    assert line.level == "warn"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("*:*:*:*:x", SCRAM),
        ("127.0.0.1:5432:d:u:x", SCRAM),
        (r"127\.0.0.1:1:d:u:x", SCRAM),
        ("db.example:*:*:*:x", {}),
        ("*:*:other:*:x", {}),
        ("*:*:*:other:x", {}),
        ("*:*:*:*", {}),
        ("*:*:*:*:", {}),
        ("#*:*:*:*:x", {}),
    ],
)
def test_the_password_file_counts_if_it_is_for_this_server(
    entry: str, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pass"
    file.write_text(f"{entry}\n")
    file.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(file))
    asked = {"host": "127.0.0.1", "user": "u", "dbname": "d"}
    assert required(asked) == expected
    file.chmod(0o644)  # libpq leaves it alone
    assert required(asked) == {}


def test_check_says_what_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def levels(dsn: str) -> list[tuple[str, str]]:
        return [(x.subject, x.level) for x in check_lines("shop", read_dsn(dsn))]

    assert levels(LOCAL) == [("authentication", "ok")]
    assert levels(f"{LOCAL} require_auth=scram-sha-256") == []
    assert levels(f"{LOCAL} require_auth=!password") == [("authentication", "warn")]
    assert levels(f"{LOCAL} require_auth=!password,!md5") == []
    tmp_path.chmod(0o1777)
    assert levels(f"host={tmp_path}") == [("socket", "warn")]
    assert levels(f"host={tmp_path} requirepeer=postgres") == []
    tmp_path.chmod(0o755)
    assert levels(f"host={tmp_path}") == []
    monkeypatch.setattr(pq, "version", lambda: 150004)
    assert required(read_dsn(LOCAL)) == {}
    [line] = check_lines("shop", read_dsn(LOCAL))
    assert "libpq 15 has no require_auth" in line.detail


def test_it_is_the_libpq_that_is_installed() -> None:
    assert pq.version() >= 160000
