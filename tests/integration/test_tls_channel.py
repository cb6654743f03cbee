"""TLS sessions that are read without libpq, however their records are cut and end (I9)."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Self

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from ingestd.postgres.connection.session import connect
from ingestd.postgres.transport.channels import tls
from ingestd.postgres.transport.channels.choice import Channels
from ingestd.postgres.transport.channels.tls import TlsChannel
from ingestd.postgres.transport.copy_out import CopyOut
from ingestd.postgres.transport.copy_reader import CopyReader
from tests.harness.certificates import Authority
from tests.harness.channels import encrypted
from tests.harness.databases import fresh_database
from tests.harness.flaky_network import FlakyNetwork
from tests.harness.poolers import pooler_of
from tests.harness.tls_proxy import ENDS, TlsProxy
from tests.harness.tls_servers import NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ingestd.postgres.connection.liveness import LivenessCheckedConnection
    from ingestd.postgres.transport.channels.channel import Channel
    from tests.harness.databases import Database
    from tests.harness.tls_servers import TlsServer

LIMIT_S = 60
ROWS = "SELECT repeat('d', n % 700) || n FROM generate_series(1, 3000) n"
EXPECTED = [b"d" * (n % 700) + b"%d\n" % n for n in range(1, 3001)]
MANY = "SELECT repeat('x', 1000) FROM generate_series(1, 200000)"


@pytest.fixture
def shop(secure: TlsServer) -> Iterator[Database]:
    with fresh_database(secure.server) as made:
        yield made


async def start(copy: CopyOut, rows: str) -> None:
    await copy.start(sql.SQL("COPY ({}) TO STDOUT").format(sql.SQL(rows)))


async def read_on(copy: CopyOut) -> list[bytes]:
    found: list[bytes] = []
    is_last = False
    while not is_last:
        block = await copy.read_block()
        cut = zip(block.starts.tolist(), block.ends.tolist(), strict=True)
        found += [block.buffer[a:b] for a, b in cut]
        is_last = block.is_last
    return found


async def kind_of(connection: LivenessCheckedConnection) -> type[Channel]:
    channel = await Channels(connection).open()
    channel.release()
    channel.close()
    return type(channel)


async def assert_reads(dsn: str) -> None:
    """COPYs, and statements by libpq between them and after."""
    connection = await connect(dsn)
    assert await kind_of(connection) is TlsChannel
    copy = CopyOut(connection)
    async with asyncio.timeout(LIMIT_S):
        for n in range(3):
            await start(copy, ROWS)
            assert await read_on(copy) == EXPECTED
            row = await (await connection.execute("SELECT repeat('y', 40000), %s", (n,))).fetchone()
            assert row == ("y" * 40_000, n)
        await copy.close()


@pytest.fixture
def proxied(database: Database, tmp_path: Path) -> Iterator[Proxies]:
    with Proxies(database, Authority(tmp_path)) as proxies:
        yield proxies


class Proxies:
    def __init__(self, database: Database, authority: Authority) -> None:
        self._database = database
        self._authority = authority
        self._running: list[TlsProxy] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for proxy in self._running:
            proxy.__exit__()

    def begin(self, sizes: Callable[[], int]) -> tuple[TlsProxy, str]:
        """Run one; return it and the DSN through it."""
        proxy = TlsProxy(self._database.server.port, self._authority, sizes)
        self._running.append(proxy.__enter__())
        dsn = make_conninfo(
            self._database.dsn,
            host=NAME,
            hostaddr="127.0.0.1",
            port=proxy.port,
            sslmode="verify-full",
            sslrootcert=str(self._authority.cert),
        )
        return proxy, dsn


@pytest.mark.parametrize("most", [150, 8000, 1 << 14], ids=["small", "some", "largest"])
async def test_records_of_every_size_are_read(proxied: Proxies, seed: int, most: int) -> None:
    dice = random.Random(seed)
    _, dsn = proxied.begin(lambda: most if most == 1 << 14 else dice.randint(1, most))
    await assert_reads(dsn)


async def test_records_that_come_in_pieces_are_read(
    secure: TlsServer, shop: Database, seed: int
) -> None:
    with FlakyNetwork(secure.server.port) as network:
        network.split(seed, 3000)
        await assert_reads(network.dsn(encrypted(shop.dsn, secure)))


@pytest.mark.parametrize("how", ENDS)
async def test_an_end_in_the_middle_is_an_operational_error(proxied: Proxies, how: str) -> None:
    """And complete messages before it do not count: the COPY did not end."""
    proxy, dsn = proxied.begin(lambda: 8192)
    copy = CopyOut(await connect(dsn))
    proxy.end_after = 4_000_000, how
    async with asyncio.timeout(LIMIT_S):
        await start(copy, MANY)
        with pytest.raises(psycopg.OperationalError) as caught:
            await read_on(copy)
        await copy.close()
    if how == "garbage":
        assert "bad record mac" in str(caught.value)
    elif how == "reset":
        assert "reset by peer" in str(caught.value)
    else:
        assert "server closed the connection unexpectedly" in str(caught.value)


async def test_keys_that_are_changed_meanwhile_are_followed(
    secure: TlsServer, shop: Database
) -> None:
    """A key update of TLS 1.3, which asks the server for another."""
    connection = await connect(encrypted(shop.dsn, secure))
    assert connection.pgconn.ssl_in_use
    library = tls.find_library()
    update = ctypes.PyDLL(tls.file_of_libpq()).SSL_key_update
    update.argtypes = [ctypes.c_void_p, ctypes.c_int]
    copy = CopyOut(connection)
    async with asyncio.timeout(LIMIT_S):
        for _ in range(3):
            session = library.session(getattr(connection.pgconn, "pgconn_ptr", None), b"OpenSSL")
            assert update(session, 1) == 1
            await start(copy, ROWS)
            assert await read_on(copy) == EXPECTED
            await connection.execute("SELECT 1")
        await copy.close()


async def test_a_connection_that_is_closed_under_the_reader_ends_it(
    secure: TlsServer, shop: Database
) -> None:
    """The session is freed by that: nothing may touch it any more."""
    for _ in range(10):
        connection = await connect(encrypted(shop.dsn, secure))
        reader = CopyReader(await Channels(connection).open())
        async with asyncio.timeout(LIMIT_S):
            await reader.start(f"COPY ({MANY}) TO STDOUT".encode())
            while not reader.has_read_on:
                await reader.collect(0.05)
                reader.read_nowait()
            reading = asyncio.create_task(reader.collect(5.0))
            await asyncio.sleep(0)
            await connection.close()
            await asyncio.gather(reading, return_exceptions=True)  # what came before
            with pytest.raises(EOFError):
                await reader.collect(5.0)
            with pytest.raises(EOFError):
                await reader.send(b"")
            await reader.close()


async def test_the_first_reachable_of_several_hosts_is_read(
    secure: TlsServer, shop: Database
) -> None:
    dsn = make_conninfo(
        encrypted(shop.dsn, secure),
        host=f"{NAME},{NAME}",
        hostaddr="127.0.0.1,127.0.0.1",
        port=f"1,{secure.server.port}",
    )
    await assert_reads(dsn)


async def test_a_pooler_that_speaks_tls_is_read(database: Database, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with pooler_of(database, "session", certified=authority.sign("pooler", NAME)) as pooler:
        await assert_reads(
            make_conninfo(
                pooler.dsn,
                host=NAME,
                hostaddr="127.0.0.1",
                sslmode="verify-full",
                sslrootcert=str(authority.cert),
            )
        )


def test_without_openssls_functions_there_is_no_channel() -> None:
    """Then libpq reads (`dsn_by`)."""
    assert tls.usable_library() is not None
    lacking = {**tls.FUNCTIONS, "read": ("SSL_read_no_more", ctypes.c_int, [])}
    assert tls.usable_library(lacking) is None


def test_a_function_that_the_program_has_too_is_not_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The linker may have chosen it for libpq."""
    own = ctypes.PyDLL(tls.file_of_libpq())

    class Program:
        SSL_read = own.SSL_write

    real = ctypes.PyDLL
    monkeypatch.setattr(
        ctypes, "PyDLL", lambda name, **more: Program if name is None else real(name, **more)
    )
    with pytest.raises(AttributeError, match="two functions SSL_read"):
        tls.find_library()


SCRIPT = """
import asyncio, sys
from psycopg import pq, sql
from ingestd.postgres.transport.channels.choice import Channels
from ingestd.postgres.transport.copy_out import CopyOut
from ingestd.postgres.connection.session import connect
async def main():
    connection = await connect(sys.argv[1])
    channel = await Channels(connection).open()
    print(pq.__impl__, type(channel).__name__)
    channel.release()
    copy = CopyOut(connection)
    await copy.start(sql.SQL("COPY (SELECT generate_series(1, 100000)) TO STDOUT"))
    rows, is_last = 0, False
    while not is_last:
        block = await copy.read_block()
        rows, is_last = rows + len(block.starts), block.is_last
    cursor = await connection.execute("SELECT 'then'")
    print(rows, await cursor.fetchone())
    await copy.close()
asyncio.run(main())
"""


def test_psycopg_in_python_is_read_too(secure: TlsServer, shop: Database) -> None:
    """With the system's libpq and its OpenSSL, whichever they are."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, encrypted(shop.dsn, secure)],
        env={**os.environ, "PSYCOPG_IMPL": "python"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if "libpq library not found" in done.stderr:
        pytest.skip("no libpq of the system's")
    first, second = done.stdout.splitlines()
    assert first in {"python TlsChannel", "python LibpqChannel"}
    assert second == "100000 ('then',)"
