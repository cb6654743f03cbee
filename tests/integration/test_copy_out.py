"""COPYs by each kind of channel: their data, their end, and libpq afterwards."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg import sql

from ingestd.postgres.connection.session import connect
from ingestd.postgres.transport.copy_out import CopyOut
from tests.harness.channels import WAYS, dsn_by
from tests.harness.databases import fresh_database
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness.databases import Database
    from tests.harness.tls_servers import TlsServer

LIMIT_S = 30
NOTHING = "SELECT 'x' WHERE false"
ASLEEP = "UNION ALL SELECT pg_sleep(60)::text"


@pytest.fixture
def database(secure: TlsServer) -> Iterator[Database]:
    with fresh_database(secure.server) as made:
        yield made


@pytest.fixture(params=WAYS)
def dsn(
    request: pytest.FixtureRequest,
    secure: TlsServer,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    return dsn_by(request.param, secure, database, monkeypatch)


def texts(rows: str) -> sql.Composed:
    return sql.SQL("COPY ({}) TO STDOUT").format(sql.SQL(rows))


async def read(copy: CopyOut, rows: str) -> list[bytes]:
    await copy.start(texts(rows))
    found: list[bytes] = []
    is_last = False
    while not is_last:
        block = await copy.read_block()
        cut = zip(block.starts.tolist(), block.ends.tolist(), strict=True)
        found += [block.buffer[a:b] for a, b in cut]
        is_last = block.is_last
    return found


async def await_sleep(database: Database, pid: int) -> None:
    event = "SELECT coalesce(max(wait_event), '') FROM pg_stat_activity WHERE pid = %s"
    await asyncio.to_thread(
        await_until, lambda: database.value(event, pid) == "PgSleep", LIMIT_S, "the session's sleep"
    )


async def test_one_copy_after_another_and_queries_between(dsn: str) -> None:
    connection = await connect(dsn)
    copy = CopyOut(connection)
    async with asyncio.timeout(LIMIT_S):
        assert await read(copy, "SELECT") == [b"\n"]
        assert await read(copy, "SELECT 1 WHERE false") == []
        rows = "SELECT repeat('d', n % 3000) || n FROM generate_series(1, 50000) n"
        found = await read(copy, rows)
        assert found == [b"d" * (n % 3000) + b"%d\n" % n for n in range(1, 50_001)]
        row = await (await connection.execute("SELECT pg_sleep(0.1), 'asked'")).fetchone()
        assert row == ("", "asked")
        large = "SELECT repeat('d', 20000000) FROM generate_series(1, 3)"
        assert await read(copy, large) == [b"d" * 20_000_000 + b"\n"] * 3
        long = f"SELECT length('{'q' * 5_000_000}')"  # sent in parts
        assert await read(copy, long) == [b"5000000\n"]
        await copy.close()
    assert connection.closed


@pytest.mark.parametrize("after", [0, 100_000])
async def test_an_error_of_the_server_is_that_which_libpq_gives(dsn: str, after: int) -> None:
    copy = CopyOut(await connect(dsn))
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(psycopg.errors.DivisionByZero, match="division by zero") as caught:
            await read(copy, f"SELECT 1 / ({after} - n) FROM generate_series(0, {after}) n")
        await copy.close()
    assert caught.value.diag.sqlstate == "22012"


@pytest.mark.parametrize("begun", [False, True])
async def test_a_session_that_is_ended_is_an_operational_error(
    database: Database, dsn: str, *, begun: bool
) -> None:
    connection = await connect(dsn)
    copy = CopyOut(connection)
    pid = connection.info.backend_pid
    rows = "SELECT repeat('x', 1000) FROM generate_series(1, 100000)"
    async with asyncio.timeout(LIMIT_S):
        reading = asyncio.create_task(read(copy, f"{rows if begun else NOTHING} {ASLEEP}"))
        await await_sleep(database, pid)
        database.execute(f"SELECT pg_terminate_backend({pid})")
        with pytest.raises(psycopg.errors.AdminShutdown):
            await reading
        await copy.close()


async def test_one_whose_connection_is_cut_says_why(database: Database, dsn: str) -> None:
    connection = await connect(dsn)
    copy = CopyOut(connection)
    rows = f"SELECT repeat('x', 1000) FROM generate_series(1, 100000) {ASLEEP}"
    async with asyncio.timeout(LIMIT_S):
        reading = asyncio.create_task(read(copy, rows))
        await await_sleep(database, connection.info.backend_pid)
        connection.cut("as if no answer came")
        with pytest.raises(psycopg.OperationalError, match="as if no answer came"):
            await reading
        await copy.close()


async def test_one_that_is_cancelled_leaves_its_connection_to_others(
    database: Database, dsn: str
) -> None:
    connection = await connect(dsn)
    copy = CopyOut(connection)
    rows = f"SELECT repeat('x', 1000) FROM generate_series(1, 100000) {ASLEEP}"
    async with asyncio.timeout(LIMIT_S):
        for _ in range(2):
            reading = asyncio.create_task(read(copy, rows))
            await await_sleep(database, connection.info.backend_pid)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await connection.cancel_safe()
            await copy.discard_rest()
            row = await (await connection.execute("SELECT repeat('y', 40000)")).fetchone()
            assert row == ("y" * 40_000,)
        await copy.close()


@pytest.mark.parametrize("begun", [False, True])
async def test_one_that_is_closed_under_way_ends_at_the_server(
    database: Database, dsn: str, *, begun: bool
) -> None:
    connection = await connect(dsn)
    pid = connection.info.backend_pid
    copy = CopyOut(connection)
    rows = "SELECT repeat('x', 1000) FROM generate_series(1, 100000)"
    async with asyncio.timeout(LIMIT_S):
        reading = asyncio.create_task(read(copy, f"{rows if begun else NOTHING} {ASLEEP}"))
        await await_sleep(database, pid)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await copy.close()
        await copy.close()
        assert connection.closed
    left = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
    await asyncio.to_thread(
        await_until, lambda: database.value(left, pid) == 0, LIMIT_S, "the session's end"
    )
