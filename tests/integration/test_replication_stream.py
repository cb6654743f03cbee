"""A replication connection read by each kind of channel."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from ingestd.decode.pgoutput.messages import split_frames
from ingestd.model.errors import OperatorError, TransientError
from ingestd.model.lsn import ZERO, Lsn
from ingestd.postgres.connection.session import connect
from ingestd.postgres.transport.channels.choice import Channels
from ingestd.postgres.transport.copy_reader import CopyReader
from ingestd.postgres.wal.replication_stream import ReplicationStream, StreamLimits
from tests.harness.channels import WAYS, dsn_by
from tests.harness.databases import fresh_database
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.harness.databases import Database
    from tests.harness.tls_servers import TlsServer

LIMIT_S = 30
ROWS = 40_000


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
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note text)",
        f"CREATE PUBLICATION {database.name} FOR TABLE orders",
        f"SELECT pg_create_logical_replication_slot('{database.name}', 'pgoutput')",
    )
    return dsn_by(request.param, secure, database, monkeypatch)


@contextlib.asynccontextmanager
async def streaming(
    dsn: str,
    name: str,
    limit_bytes: int = 1 << 20,
    *,
    reports: bool = True,
) -> AsyncIterator[ReplicationStream]:
    connection = await connect(dsn, replication=True)
    reader = CopyReader(await Channels(connection).open())
    stream = ReplicationStream(connection, reader, "here", StreamLimits(limit_bytes))
    try:
        await stream.start(name, name, ZERO, ZERO)
        if reports:
            stream.begin_reporting()
        yield stream
    finally:
        await stream.close()


async def read(stream: ReplicationStream, commits: int) -> list[bytes]:
    """Take until so many transactions are complete; return their messages."""
    found: list[bytes] = []
    async with asyncio.timeout(LIMIT_S):
        while sum(message[:1] == b"C" for message in found) < commits:
            block = (await stream.receive()).block()
            assert block.ended is None
            frames = split_frames(block.buffer, block.starts, block.ends)
            ranges = zip(frames.starts.tolist(), frames.ends.tolist(), strict=True)
            found += [block.buffer[start:end] for start, end in ranges]
    return found


async def read_to_the_end(stream: ReplicationStream) -> None:
    async with asyncio.timeout(LIMIT_S):
        while (ended := (await stream.receive()).block().ended) is None:
            pass
    raise stream.fault(ended)


async def test_what_the_server_says_aside_is_passed(dsn: str, database: Database) -> None:
    """With this setting it logs that decoding begins, before it says that data may come."""
    database.execute("INSERT INTO orders VALUES (1, 'first')")
    talkative = f"{dsn} options='-c client_min_messages=log'"
    async with asyncio.timeout(LIMIT_S), streaming(talkative, database.name) as stream:
        assert len(await read(stream, commits=1)) >= 3


async def test_no_status_is_sent_before_reporting_begins(dsn: str, database: Database) -> None:
    """It may have skipped something: a status would make some servers move the slot back."""

    def has_been_told() -> bool:
        told: bool = database.value(
            "SELECT reply_time IS NOT NULL FROM pg_stat_replication JOIN pg_replication_slots"
            " ON pid = active_pid WHERE slot_name = %s",
            database.name,
        )
        return told

    database.execute("INSERT INTO orders VALUES (1, 'first')")
    async with streaming(dsn, database.name, reports=False) as stream:
        await read(stream, commits=1)
        assert not has_been_told()
        stream.begin_reporting()
        await asyncio.to_thread(await_until, has_been_told, LIMIT_S, "a status update")


async def test_it_is_closed_at_any_time_and_twice(dsn: str, database: Database) -> None:
    async with streaming(dsn, database.name) as stream:
        await stream.close()


async def test_it_is_closed_although_that_is_cancelled(dsn: str, database: Database) -> None:
    """As by a fault during the closing of a failed stream: the slot is free."""

    def is_free() -> bool:
        return not database.value(
            "SELECT active FROM pg_replication_slots WHERE slot_name = %s", database.name
        )

    async with streaming(dsn, database.name) as stream:
        closing = asyncio.create_task(stream.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await asyncio.to_thread(await_until, is_free, LIMIT_S, "the slot to be free")


@pytest.mark.thorough
async def test_every_message_comes_once_and_in_order(dsn: str, database: Database) -> None:
    database.execute(
        f"INSERT INTO orders SELECT i, repeat('d', i % 300) FROM generate_series(1, {ROWS}) i",
        f"INSERT INTO orders VALUES (0, repeat('x', {3 << 20}))",
    )
    async with streaming(dsn, database.name) as stream:
        found = await read(stream, 2)
    inserts = [m for m in found if m[:1] == b"I"]
    texts = [m[m.index(b"N", 5) + 3 :] for m in inserts]  # past the number of columns
    ids = [int(t[5 : 5 + int.from_bytes(t[1:5], "big")]) for t in texts]
    assert ids == [*range(1, ROWS + 1), 0]
    assert [m[:1] for m in found if m[:1] in b"BC"] == [b"B", b"C", b"B", b"C"]
    assert inserts[-1].endswith(b"x" * (3 << 20))


async def test_reading_stops_at_the_limit_and_status_continues(
    dsn: str, database: Database
) -> None:
    database.execute(
        f"INSERT INTO orders SELECT i, repeat('x', 500) FROM generate_series(1, {ROWS}) i"
    )
    now = Lsn.parse(database.value("SELECT pg_current_wal_lsn()::text"))
    async with streaming(dsn, database.name, limit_bytes=1 << 16) as stream:
        found = await asyncio.wait_for(stream.receive(), LIMIT_S)
        assert len(found.block().buffer) < 5 << 20  # a turn or two, not all
        await stream.report_durable(now)

        def confirmed() -> bool:
            text = database.value(
                "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s",
                database.name,
            )
            return Lsn.parse(text) == now

        await asyncio.to_thread(await_until, confirmed, LIMIT_S, "the slot to be confirmed")


async def test_a_slot_in_use_and_one_that_is_not_there(dsn: str, database: Database) -> None:
    async with streaming(dsn, database.name):
        with pytest.raises(TransientError, match="is active for PID") as raised:
            async with streaming(dsn, database.name):
                pass
    assert raised.value.reason == "slot_active"
    with pytest.raises(OperatorError, match="does not exist"):
        async with streaming(dsn, "missing"):
            pass


async def test_what_came_before_the_end_is_given(dsn: str, database: Database) -> None:
    async with streaming(dsn, database.name) as stream:
        database.execute("INSERT INTO orders VALUES (1, 'one')")
        assert b"one" in b"".join(await read(stream, 1))
        database.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
            " WHERE active_pid IS NOT NULL"
        )
        with pytest.raises(TransientError, match="terminating connection") as raised:
            await read_to_the_end(stream)
    assert raised.value.reason == "server_restarting"
