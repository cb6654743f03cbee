"""Detection of a dead peer, and what must not be mistaken for one."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import struct
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import structlog
from psycopg import sql
from psycopg.conninfo import make_conninfo

from ingestd.decode.pgoutput.messages import split_frames
from ingestd.model.errors import TransientError
from ingestd.model.lsn import ZERO
from ingestd.postgres.connection import session
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.liveness import (
    LivenessCheckedConnection,
    LivenessPolicy,
    ServerInstance,
)
from ingestd.postgres.connection.session import DEFAULTS
from ingestd.postgres.transport.copy_out import CopyOut
from ingestd.postgres.wal.replication_stream import ReplicationStream, StreamLimits, open_stream
from tests.harness.databases import query_server_id
from tests.harness.flaky_network import STREAM, FlakyNetwork

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.harness.databases import Database

LIMIT_S = 60
ALLOWED_S = 30
"""Within which a silent peer has to be noticed."""
SHORT_S = 0.3
IMPATIENT = LivenessPolicy(
    silent_s=SHORT_S,
    again_s=SHORT_S,
    probe_interval_s=0.7,
    in_flight_s=SHORT_S,
    ask_after_s=SHORT_S,
)

FAULTS = (FlakyNetwork.blackhole, pytest.param(FlakyNetwork.stall, marks=pytest.mark.long))


@pytest.fixture
def network(database: Database) -> Iterator[FlakyNetwork]:
    with FlakyNetwork(database.server.port) as running:
        yield running


async def connect(dsn: str, liveness: LivenessPolicy = IMPATIENT) -> LivenessCheckedConnection:
    return await session.connect(dsn, liveness=liveness)


def test_a_silent_peer_is_noticed_within_half_a_minute() -> None:
    number = {name: int(value) for name, value in DEFAULTS.items() if value.isdigit()}
    probes_s = number["keepalives_interval"] * number["keepalives_count"]
    assert number["keepalives_idle"] + probes_s <= ALLOWED_S
    assert number["tcp_user_timeout"] / 1000 <= ALLOWED_S
    assert number["connect_timeout"] <= ALLOWED_S
    policy = LivenessPolicy()
    away_s = policy.silent_s + policy.probes * policy.probe_interval_s
    answering_s = policy.silent_s + 2 * (policy.in_flight_s + policy.probe_interval_s)
    assert policy.ask_after_s + max(away_s, answering_s) < ALLOWED_S - 5


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("is_all", [True, False], ids=["everything", "this connection"])
async def test_a_query_without_an_answer_is_given_up(
    database: Database,
    network: FlakyNetwork,
    fault: Callable[..., int],
    *,
    is_all: bool,
) -> None:
    connection = await connect(network.dsn(database.dsn))
    await connection.execute("SELECT 'mine'")
    async with asyncio.timeout(LIMIT_S):
        fault(network, b"" if is_all else b"'mine'")
        with pytest.raises(psycopg.OperationalError) as caught:
            await connection.execute("SELECT 1")
    error = classify(caught.value, "source shop, health", database.dsn)
    assert isinstance(error, TransientError)
    assert error.reason == "connection_lost"
    elsewhere = "a second connection can't reach the server" if is_all else "is not working on it"
    assert elsewhere in error.what
    assert connection.closed


@pytest.mark.thorough
async def test_a_copy_whose_rows_do_not_arrive_is_given_up(
    database: Database, network: FlakyNetwork
) -> None:
    copy = CopyOut(await connect(network.dsn(database.dsn)))
    rows = sql.SQL("SELECT repeat('x', 1000) FROM generate_series(1, 100000)")
    async with asyncio.timeout(LIMIT_S):
        await copy.start(sql.SQL("COPY ({}) TO STDOUT").format(rows))
        await copy.read_block()
        network.blackhole()
        with pytest.raises(psycopg.OperationalError, match="no answer arrives"):
            await read_to_the_end(copy)
        await copy.close()


async def read_to_the_end(copy: CopyOut) -> None:
    while not (await copy.read_block()).is_last:
        pass


async def test_what_takes_long_is_waited_for(database: Database, network: FlakyNetwork) -> None:
    database.execute("CREATE TABLE t ()")
    async with (
        asyncio.timeout(LIMIT_S),
        await connect(network.dsn(database.dsn)) as one,
        await connect(network.dsn(database.dsn)) as other,
        await connect(network.dsn(database.dsn)) as idle,
    ):
        with database.connect(autocommit=False) as holder:
            holder.execute("LOCK t")
            waiting = asyncio.create_task(other.execute("SELECT FROM public.t"))
            await one.execute("SELECT pg_sleep(%s)", (6 * SHORT_S,))
            assert not waiting.done()
        await waiting
        await idle.execute("SELECT 1")  # nothing was expected of it meanwhile
        network.slow_down(20_000)
        await one.execute("SELECT repeat('x', %s)", (int(20_000 * 6 * SHORT_S),))


# --- what the looks come to -------------------------------------------------------------------

if TYPE_CHECKING:
    Route = Callable[[int, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def routed(database: Database, route: Route) -> AsyncIterator[str]:
    """A proxy that decides for each connection, the first being 0; return the DSN through it."""
    accepted = 0
    serving: set[asyncio.Task[Any]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal accepted
        accepted += 1
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await route(accepted - 1, reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield make_conninfo(database.dsn, host="127.0.0.1", port=port, dbname="postgres")
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving)


async def pass_on(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    there, back = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.gather(pump(reader, back), pump(there, writer))


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.closing(writer):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()


async def refuse_in_russian(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As a server does whose `lc_messages` is ru_RU and whose connections are all taken."""
    encryption = {80877103, 80877104}
    while struct.unpack("!ii", start := await reader.readexactly(8))[1] in encryption:
        writer.write(b"N")
    await reader.readexactly(struct.unpack("!i", start[:4])[0] - len(start))
    fields = {"S": "ВАЖНО", "V": "FATAL", "C": "53300", "M": "извините, слишком много клиентов"}
    body = b"".join(f"{name}{text}\0".encode() for name, text in fields.items()) + b"\0"
    writer.write(b"E" + struct.pack("!i", len(body) + 4) + body)
    await writer.drain()


async def test_a_server_that_refuses_to_say_is_no_sign_of_its_end(database: Database) -> None:
    user = f"u_{database.name}"
    database.execute(f"CREATE ROLE {user} LOGIN CONNECTION LIMIT 1")
    refused = []

    async def route(n: int, *ends: Any) -> None:
        await pass_on(database.server.port, *ends)
        refused.append(n)

    try:
        async with (
            routed(database, route) as dsn,
            await connect(make_conninfo(dsn, user=user)) as one,
        ):
            await one.execute("SELECT pg_sleep(%s)", (6 * SHORT_S,))
            assert len(refused) > 1
    finally:
        database.execute(f"DROP ROLE {user}")


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["refused", "slow"])
async def test_one_connection_that_fails_is_no_sign_of_the_end(
    database: Database, how: str
) -> None:
    liveness = replace(IMPATIENT, probe_interval_s=1.0)
    seen = []

    async def route(n: int, *ends: Any) -> None:
        seen.append(n)
        if n != 1:
            await pass_on(database.server.port, *ends)
        elif how == "slow":
            await asyncio.Event().wait()

    async with (
        asyncio.timeout(LIMIT_S),
        routed(database, route) as dsn,
        await connect(dsn, liveness) as one,
    ):
        await one.execute("SELECT pg_sleep(3)")
    assert len(seen) > 2


async def test_a_refusal_in_another_language_is_no_sign_of_the_end(database: Database) -> None:
    seen = []

    async def route(n: int, *ends: Any) -> None:
        seen.append(n)
        if n == 0:
            await pass_on(database.server.port, *ends)
        else:
            await refuse_in_russian(*ends)

    async with asyncio.timeout(LIMIT_S), routed(database, route) as dsn, await connect(dsn) as one:
        await one.execute("SELECT pg_sleep(3)")
    assert len(seen) > 1


@pytest.mark.thorough
async def test_what_another_server_says_counts_for_nothing(
    database: Database, own_postgres: PostgresServer
) -> None:
    """A balancer over several servers, that of the session among them or not."""
    seen = []

    async def route(n: int, *ends: Any) -> None:
        seen.append(n)
        await pass_on((database.server if n == 0 else own_postgres).port, *ends)

    async with asyncio.timeout(LIMIT_S), routed(database, route) as dsn, await connect(dsn) as one:
        await one.execute("SELECT pg_sleep(3)")
    assert len(seen) > 1


def test_a_server_is_known_by_when_it_was_started() -> None:
    ours = ServerInstance(started_us=100, place="10.0.0.1:5432", now_us=200)
    elsewhere = "10.0.0.2:5432"
    assert not ours.is_another(ServerInstance(100, ours.place, 300))
    assert not ours.is_another(ServerInstance(100, elsewhere, 300))  # it has two addresses
    assert not ours.is_another(ServerInstance(250, ours.place, 300))  # was restarted
    assert ours.is_another(ServerInstance(50, ours.place, 300))  # containers with one address
    assert ours.is_another(ServerInstance(250, elsewhere, 300))


@pytest.mark.thorough
async def test_a_server_that_may_not_say_is_still_missed(
    database: Database, network: FlakyNetwork, stranger: str
) -> None:
    database.execute("REVOKE SELECT ON pg_catalog.pg_stat_activity FROM PUBLIC")
    dsn = network.dsn(database.dsn, user=stranger)
    with structlog.testing.capture_logs() as told:
        async with asyncio.timeout(LIMIT_S), await connect(dsn) as one:
            await one.execute("SELECT pg_sleep(3)")
            network.blackhole()
            with pytest.raises(psycopg.OperationalError, match="a second connection can't reach"):
                await one.execute("SELECT 1")
    [line] = told
    assert line["event"] == "watch.refused"
    assert "pg_stat_activity" in line["reason"]


async def test_it_is_cut_with_no_file_to_be_had(database: Database, network: FlakyNetwork) -> None:
    one = await connect(network.dsn(database.dsn))
    await one.execute("SELECT 1")
    network.blackhole()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(psycopg.OperationalError, match="no answer arrives"):
                await one.execute("SELECT 1")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await one.close()


# --- the stream -------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def streamed(database: Database, dsn: str) -> AsyncIterator[ReplicationStream]:
    name = database.name
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY)",
        "CREATE TABLE elsewhere (id int, note text)",
        f"CREATE PUBLICATION {name} FOR TABLE orders",
        f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')",
    )
    stream = await open_stream(
        dsn,
        name,
        name,
        ZERO,
        ZERO,
        queried_id=await query_server_id(database.dsn),
        where="source shop, stream",
        limits=StreamLimits(1 << 20, liveness=IMPATIENT),
    )
    stream.begin_reporting()
    try:
        yield stream
    finally:
        await stream.close()


async def next_commit(stream: ReplicationStream) -> None:
    while True:
        block = (await stream.receive()).block()
        frames = split_frames(block.buffer, block.starts, block.ends)
        if any(block.buffer[start : start + 1] == b"C" for start in frames.starts.tolist()):
            return


async def take_for_ever(stream: ReplicationStream) -> None:
    while True:
        await stream.receive()


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("saw", [b"", STREAM], ids=["everything", "the stream"])
async def test_a_silent_stream_is_given_up_and_an_idle_one_is_not(
    database: Database, network: FlakyNetwork, fault: Callable[..., int], saw: bytes
) -> None:
    async with (
        asyncio.timeout(LIMIT_S),
        streamed(database, network.dsn(database.dsn)) as stream,
    ):
        idle_until = time.monotonic() + 6 * SHORT_S
        with contextlib.suppress(TimeoutError):
            while (left_s := idle_until - time.monotonic()) > 0:
                async with asyncio.timeout(left_s):
                    (await stream.receive()).block()  # signs of life
        database.execute("INSERT INTO orders VALUES (1)")
        await next_commit(stream)
        fault(network, saw)
        with pytest.raises(TransientError, match="no answer arrives") as caught:
            await take_for_ever(stream)
        assert caught.value.reason == "connection_lost"


async def test_a_walsender_that_decodes_without_sending_is_awaited(
    database: Database, network: FlakyNetwork
) -> None:
    async with (
        asyncio.timeout(LIMIT_S),
        streamed(database, network.dsn(database.dsn)) as stream,
    ):
        database.execute(
            "INSERT INTO elsewhere SELECT i, repeat('x', 50) FROM generate_series(1, 300000) i",
            "INSERT INTO orders VALUES (1)",
        )
        await next_commit(stream)


async def test_a_stream_blocked_by_the_lake_is_not_taken_for_silent(
    database: Database, network: FlakyNetwork
) -> None:
    async with (
        asyncio.timeout(LIMIT_S),
        streamed(database, network.dsn(database.dsn)) as stream,
    ):
        database.execute("INSERT INTO orders SELECT generate_series(1, 200000)")
        (await stream.receive()).block()  # whatever it ends amid
        await asyncio.sleep(8 * SHORT_S)  # the time is what is tested: the lake takes it
        await next_commit(stream)


async def test_a_stream_that_was_reset_says_what_was_lost(
    database: Database, network: FlakyNetwork
) -> None:
    async with (
        asyncio.timeout(LIMIT_S),
        streamed(database, network.dsn(database.dsn)) as stream,
    ):
        network.reset(STREAM)
        with pytest.raises(TransientError, match="the connection to the server was lost: ") as lost:
            await take_for_ever(stream)
        assert lost.value.reason == "connection_lost"
