"""The keeper of a Spark driver's snapshots: which task gets which, and when they end."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from ingestd.model.errors import OperatorError, TransientError
from ingestd.testing.embedded.waiting import await_until
from spark_jobs.source.exported_snapshot import IdlePolicy
from spark_jobs.source.keeper import AUTHENTICATION_LIMIT_S, KeeperServer, SnapshotKeeper
from spark_jobs.source.keeper_process import keeper_of
from spark_jobs.source.keeper_protocol import GREETING_BYTES, NONCE_BYTES, KeeperAddress
from spark_jobs.source.lease import _LeaseConnection, is_there, leased, register
from spark_jobs.source.options import parse_options
from spark_jobs.source.read_plan import ReadPlan
from spark_jobs.source.table import find_table
from tests.harness.config import wal_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.harness.databases import Database

LIMIT_S = 30.0


@dataclass
class Driver:
    """A process that stands for a Spark driver's JVM, its keeper, and a plan for four tasks."""

    database: Database
    process: subprocess.Popen[bytes]
    keeper: KeeperAddress
    plan: ReadPlan
    plan_id: str = field(default="")

    def snapshot(self, execution: str | None, partition: int) -> str:
        """Read a partition; return the snapshot that it was of."""
        with leased(self.keeper, self.plan_id, execution, partition) as lease:
            lease.confirm_complete()
            [name] = {split.snapshot for split in lease.granted.splits}
        return name

    def sessions(self) -> int:
        found = self.database.value(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'ingestd spark'"
        )
        return int(found)

    def await_no_session(self) -> None:
        await_until(lambda: self.sessions() == 0, LIMIT_S, "the sessions to end")

    def keeper_process(self) -> psutil.Process:
        words = ["spark_jobs.source.keeper", "127.0.0.1", str(self.process.pid)]
        [found] = [
            p
            for p in psutil.process_iter(["cmdline"])
            if p.info["cmdline"] and p.info["cmdline"][-5:-2] == words
        ]
        return found


@contextmanager
def standing_in() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
async def driver(database: Database, tmp_path: Path) -> AsyncIterator[Driver]:
    database.execute(
        "CREATE TABLE read (id int PRIMARY KEY, filler text)",
        "INSERT INTO read SELECT i, repeat('x', 100) FROM generate_series(1, 5000) i",
    )
    config = tmp_path / "ingestd.toml"
    config.write_text(wal_config(lake=tmp_path / "lake", dsn=database.dsn))
    options = {"config": str(config), "source": "shop", "table": "public.read"}
    source = await find_table(parse_options(options))
    plan = ReadPlan(source, 4, 64_000_000, resumable=False, idle_s=0.3, limit_s=600.0)
    with standing_in() as process:
        keeper = keeper_of(process.pid, "127.0.0.1")
        found = Driver(database, process, keeper, plan)
        found.plan_id, count = register(keeper, plan)
        assert count == 4
        yield found


def test_an_execution_has_one_snapshot_and_the_next_another(driver: Driver) -> None:
    first = {driver.snapshot("1", n) for n in range(4)}
    assert len(first) == 1
    # a task that is tried again, and a sort's second pass
    assert {driver.snapshot("1", 2)} == first
    assert {driver.snapshot("2", n) for n in range(4)}.isdisjoint(first)
    driver.await_no_session()


def test_two_tables_of_one_execution_share_it(driver: Driver) -> None:
    other, _ = register(driver.keeper, driver.plan)
    with (
        leased(driver.keeper, driver.plan_id, "1", 0) as one,
        leased(driver.keeper, other, "1", 0) as two,
    ):
        assert one.granted.splits[0].snapshot == two.granted.splits[0].snapshot
        assert driver.sessions() == 1


async def test_a_pause_between_two_stages_ends_no_snapshot(driver: Driver) -> None:
    """After all of one table, Spark may sort or build a hash table before it reads the next."""
    policy = IdlePolicy(idle_s=LIMIT_S, crowded_s=0.1, most=2)
    async with keeper_here(SnapshotKeeper(policy)) as keeper:
        driver.keeper, plan = keeper, replace(driver.plan, idle_s=None)
        plans = [(await asyncio.to_thread(register, keeper, plan))[0] for _ in range(2)]

        async def read(execution: str, plan_id: str) -> set[str]:
            driver.plan_id = plan_id
            reads = [asyncio.to_thread(driver.snapshot, execution, n) for n in range(4)]
            return {await each for each in reads}

        first = await read("1", plans[0])
        await asyncio.sleep(5 * policy.crowded_s)
        assert await read("1", plans[1]) == first
        for number in range(2, 6):
            await read(str(number), plans[0])
        await asyncio.to_thread(
            await_until, lambda: driver.sessions() == 2, LIMIT_S, "all but two to end"
        )


def test_a_lease_holds_the_snapshot(driver: Driver) -> None:
    with ExitStack() as leases:
        leases.enter_context(leased(driver.keeper, driver.plan_id, "1", 0))
        driver.snapshot("2", 0)
        # the second, idle one has ended; the first, older one stays
        await_until(lambda: driver.sessions() == 1, LIMIT_S, "one to end")
        driver.snapshot("1", 1)
    driver.await_no_session()


def test_who_comes_late_gets_no_other_snapshot(driver: Driver) -> None:
    driver.snapshot("1", 0)
    driver.await_no_session()
    with pytest.raises(TransientError, match="the snapshot that this query read has ended"):
        driver.snapshot("1", 1)
    driver.snapshot(None, 0)
    driver.await_no_session()
    with pytest.raises(OperatorError, match=r"df\.rdd"):
        driver.snapshot(None, 0)


def test_a_truncated_table_does_not_count_as_read(driver: Driver) -> None:
    with leased(driver.keeper, driver.plan_id, "1", 0) as lease:
        driver.database.execute("TRUNCATE read")
        with pytest.raises(OperatorError, match="truncated or rewritten"):
            lease.confirm_complete()


def test_nothing_is_left_when_the_driver_dies(driver: Driver) -> None:
    with leased(driver.keeper, driver.plan_id, "1", 0):
        assert driver.sessions() == 1
        driver.process.kill()
        driver.await_no_session()
    assert not is_there(driver.keeper)


def test_nothing_is_left_when_the_keeper_dies(driver: Driver) -> None:
    with leased(driver.keeper, driver.plan_id, "1", 0) as lease:
        driver.keeper_process().kill()
        driver.await_no_session()
        with pytest.raises(TransientError, match="is unreachable"):
            lease.confirm_complete()
    again = keeper_of(driver.process.pid, "127.0.0.1")
    with (
        pytest.raises(OperatorError, match="a keeper of snapshots that has ended"),
        leased(again, driver.plan_id, "2", 0),
    ):
        pass
    assert register(again, driver.plan)[1] == 4


def test_a_snapshot_ends_at_its_limit_though_it_is_read(driver: Driver) -> None:
    plan_id, _ = register(driver.keeper, replace(driver.plan, limit_s=0.2))
    with leased(driver.keeper, plan_id, "1", 0) as lease:
        driver.await_no_session()
        with pytest.raises(TransientError, match="has ended"):
            lease.confirm_complete()


def test_strangers_take_neither_memory_nor_time() -> None:
    """Any client can send anything; only a nonce and a greeting are read."""
    with standing_in() as process:
        keeper = keeper_of(process.pid, "127.0.0.1")
        [child] = [p for p in psutil.process_iter() if listens_at(p, keeper.port)]
        before = child.memory_info().rss
        with ExitStack() as open_ones:
            for first in (b"", b"n" * 32 + b"\n", b"\n" * 33, b"n" * 33 + b"0" * 67 + b"\n"):
                for _ in range(4):
                    stranger = socket.create_connection((keeper.host, keeper.port), LIMIT_S)
                    open_ones.enter_context(stranger)
                    with suppress(ConnectionError):
                        stranger.sendall(first)
                        for _ in range(32):
                            stranger.sendall(b"x" * (1 << 20))
                        pytest.fail("all was read")
            assert is_there(keeper)
            assert child.memory_info().rss - before < 16 << 20
            await_until(
                lambda: len(child.net_connections()) == 1,
                AUTHENTICATION_LIMIT_S - 1,
                "all connections to be closed",
            )


def listens_at(process: psutil.Process, port: int) -> bool:
    with suppress(psutil.Error):
        return any(c.laddr.port == port for c in process.net_connections() if c.status == "LISTEN")
    return False


@pytest.mark.parametrize("says", [b"", b"n", b"n" * 32 + b"\n", b"n" * 32 + b"\n" + b"0" * 67])
async def test_a_stranger_has_little_time(says: bytes) -> None:
    async with keeper_here(authentication_limit_s=0.3) as keeper:
        reader, writer = await asyncio.open_connection(keeper.host, keeper.port)
        writer.write(says)
        async with asyncio.timeout(LIMIT_S):
            told = await reader.read()
        assert len(told) in {NONCE_BYTES, NONCE_BYTES + GREETING_BYTES}
        writer.close()
        assert await asyncio.to_thread(is_there, keeper)


async def test_strangers_do_not_keep_readers_out() -> None:
    async with keeper_here(most_strangers=4) as keeper, asyncio.timeout(LIMIT_S):
        own, _ = await asyncio.to_thread(connected, keeper)
        strangers = []
        for _ in range(12):
            strangers.append(await asyncio.open_connection(keeper.host, keeper.port))
            assert await asyncio.to_thread(is_there, keeper)
        for reader, _ in strangers[:8]:
            assert len(await reader.read()) == NONCE_BYTES
        assert not any(reader.at_eof() for reader, _ in strangers[9:])
        own.say({"asks": "there"})
        assert await asyncio.to_thread(own.answer) == {}
        for _, writer in strangers:
            writer.close()


def connected(keeper: KeeperAddress) -> tuple[_LeaseConnection, socket.socket]:
    connection = socket.create_connection((keeper.host, keeper.port), LIMIT_S)
    return _LeaseConnection(connection, connection.makefile("rb"), keeper.token, "here"), connection


@asynccontextmanager
async def keeper_here(
    keeper: SnapshotKeeper | None = None, **limits: Any
) -> AsyncIterator[KeeperAddress]:
    """Run a keeper in this event loop."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = KeeperServer(keeper or SnapshotKeeper(), "token", **limits)
        serving = asyncio.create_task(server.serve(listener))
        yield KeeperAddress("127.0.0.1", listener.getsockname()[1], "token")
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


def test_one_keeper_serves_all_planning_of_a_driver(driver: Driver) -> None:
    assert keeper_of(driver.process.pid, "127.0.0.1") == driver.keeper
    driver.keeper_process().send_signal(signal.SIGTERM)
    await_until(lambda: not is_there(driver.keeper), LIMIT_S, "the keeper to end")
    assert keeper_of(driver.process.pid, "127.0.0.1") != driver.keeper
