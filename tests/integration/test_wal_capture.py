from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from pydantic import SecretStr

from ingestd.lake.delta.read import read_raw
from ingestd.lake.delta_lake import DeltaLake
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from ingestd.pipeline.filling_epoch import EpochPolicy
from ingestd.pipeline.pipeline import Pipeline
from ingestd.pipeline.policy import PipelinePolicy
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.capture import WalCapture
from ingestd.postgres.wal.drain.drain import DrainPolicy
from ingestd.testing.embedded.daemon import module_environment
from ingestd.testing.embedded.ports import free_port
from ingestd.testing.oracle.comparison import compare_source
from tests.harness.compare import (
    assert_change_log_is_sound,
    assert_lake_equals_source,
    epochs,
)
from tests.harness.config import wal_config
from tests.harness.databases import Database, fresh_database
from tests.harness.waiting import await_until
from tests.harness.workload import Workload, create_schema
from tests.unit.pipeline.fixtures import watch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from ingestd.model.schema import Table
    from ingestd.ports import Snapshot
    from ingestd.testing.embedded.daemon import Daemon
    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.conftest import MakeDaemon

LIMIT_S = 30.0
ORDERS = TableId("public", "orders")


@pytest.fixture
def shop(database: Database) -> Database:
    return with_orders(database)


@pytest.fixture
def own_shop(own_postgres: PostgresServer) -> Iterator[Database]:
    with fresh_database(own_postgres) as made:
        yield with_orders(made)


def with_orders(database: Database) -> Database:
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note text)",
        "INSERT INTO orders SELECT i, 'first ' || i FROM generate_series(1, 100) i",
    )
    return database


def config(database: Database, lake: Path, **changes: Any) -> str:
    """One source `shop`; its slot has the database's name, so that tests don't meet."""
    extra = changes.pop("source_extra", "")
    return wal_config(
        lake=lake, dsn=database.dsn, source_extra=f'slot = "{database.name}"\n{extra}', **changes
    )


def assert_equal(database: Database, lake: Path) -> None:
    """Once the slot is confirmed up to now, the folded lake is the source."""
    assert_lake_equals_source(database, lake, slot=database.name, limit_s=LIMIT_S)


def assert_equal_now(database: Database, lake: Path) -> None:
    with database.connect() as connection:
        comparisons = compare_source(connection, str(lake), "shop")
    assert comparisons
    assert all(c.is_equal for c in comparisons), "\n".join(map(str, comparisons))


def source_status(daemon: Daemon) -> dict[str, Any]:
    status = daemon.status()
    return {} if status is None else status["sources"]["shop"]


def await_received(daemon: Daemon, database: Database) -> None:
    """Wait until the daemon has read what is written now; it need not be committed."""
    now = Lsn.parse(database.value("SELECT pg_current_wal_lsn()::text"))

    def has_received() -> bool:
        text = source_status(daemon).get("received_lsn")
        return text is not None and Lsn.parse(text) >= now

    await_until(has_received, LIMIT_S, lambda: f"the daemon to read up to {now}\n{daemon.tail()}")


def confirmed(database: Database) -> Lsn:
    query = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
    return Lsn.parse(database.value(query, database.name))


# --- stopping --------------------------------------------------------------------------------


def test_sigterm_commits_the_open_epoch_and_ends_with_0(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(config(shop, lake, max_delay="1h"))
    daemon.start_ready()
    shop.execute("INSERT INTO orders VALUES (1001, 'late')", "DELETE FROM orders WHERE id = 1")
    await_received(daemon, shop)
    before = source_status(daemon)["epoch"]
    assert daemon.sigterm(10.0) == 0
    assert_equal_now(shop, lake)
    assert [e["epoch"] for e in daemon.events("epoch.committed")][-1] == before + 1
    shop.execute("UPDATE orders SET note = 'while it was away' WHERE id > 50")
    daemon.write_config(config(shop, lake))
    daemon.start_ready()
    assert_equal(shop, lake)
    assert not daemon.events("source.slot_lost")
    assert_change_log_is_sound(shop, lake)


def test_sigterm_ends_a_start_that_waits_for_a_transaction(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(config(shop, lake))
    with shop.connect(autocommit=False) as writer:
        writer.execute("INSERT INTO orders VALUES (1002, 'not committed')")
        daemon.start()
        query = """SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database()
                      AND query LIKE 'CREATE_REPLICATION_SLOT%%' AND state = 'active'"""
        await_until(lambda: shop.value(query), LIMIT_S, "the slot to wait for the transaction")
        assert daemon.sigterm(5.0) == 0
        await_until(lambda: not shop.slots(), LIMIT_S, "the unfinished slot to go")
    assert "Traceback" not in daemon.tail()


STUCK = """
import functools, pathlib, sys, time
from ingestd.app import daemon
from ingestd.lake import factory
def stick(step):
    if step == "public.orders":
        pathlib.Path("stuck").touch()
        time.sleep(600)
factory.DeltaLake = functools.partial(factory.DeltaLake, before_commit=stick)
sys.exit(daemon.run(pathlib.Path("ingestd.toml")))
"""
"""A daemon whose commits to `orders` hang, as those to a dead network disk would."""


@pytest.mark.thorough
@pytest.mark.parametrize(("signals", "code"), [(1, 75), (2, 1)])
def test_a_commit_that_hangs_does_not_keep_the_daemon(
    shop: Database, lake: Path, tmp_path: Path, signals: int, code: int
) -> None:
    at_least_s, limit_s = (5.0, 10.5) if signals == 1 else (0.0, 3.0)
    http = f'[http]\nlisten = "127.0.0.1:{free_port()}"'
    (tmp_path / "ingestd.toml").write_text(config(shop, lake, extra=http))
    with subprocess.Popen(
        [sys.executable, "-c", STUCK],
        cwd=tmp_path,
        env=module_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            await_until((tmp_path / "stuck").exists, LIMIT_S, "the commit to hang")
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            if signals == 2:
                # the first must have been taken, else the two are one
                await_until(lambda: closing(process.pid), LIMIT_S, "the first signal to be taken")
                process.send_signal(signal.SIGTERM)
            assert process.wait(limit_s) == code
            assert time.monotonic() - began >= at_least_s  # it was given the time to finish
        finally:
            process.kill()


def closing(pid: int) -> bool:
    """Whether no signal waits to be taken by the process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    pending = re.findall(r"^(?:Sig|Shd)Pnd:\s*(\S+)", status, re.MULTILINE)
    return all(int(mask, 16) == 0 for mask in pending)


# --- the slot is lost ------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["resnapshot", "stop"])
def test_a_slot_dropped_by_hand_is_noticed(
    shop: Database, lake: Path, make_daemon: MakeDaemon, policy: str
) -> None:
    text = config(shop, lake, source_extra=f'slot_lost = "{policy}"')
    daemon = make_daemon(text)
    daemon.start_ready()
    assert daemon.sigterm() == 0
    shop.execute(
        "DELETE FROM orders WHERE id <= 10",
        f"SELECT pg_drop_replication_slot('{shop.name}')",
        "UPDATE orders SET note = 'unseen' WHERE id > 90",
    )
    daemon.start()
    if policy == "stop":

        def stopped() -> bool:
            return source_status(daemon).get("state") == "stopped"

        await_until(stopped, LIMIT_S, lambda: f"the source to stop\n{daemon.tail()}")
        [failed] = daemon.events("source.failed")
        assert "changes may be lost" in failed["reason"]
        assert "resnapshot" in failed["remedy"]
        assert shop.slots() == []
        return
    daemon.await_ready()
    assert_equal(shop, lake)
    [lost] = daemon.events("source.slot_lost")
    assert "does not exist" in lost["reason"]
    markers = [op for op in read_raw(str(lake), "shop", ORDERS)["_cdc_op"].to_pylist() if op == "t"]
    assert len(markers) == 2


def test_a_slot_lost_under_a_running_daemon_is_resnapshotted(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(config(shop, lake))
    daemon.start_ready()
    shop.execute("DELETE FROM orders WHERE id <= 10")
    drop = """SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots
               WHERE slot_name = %s AND active"""

    def dropped() -> bool:
        shop.rows(drop, shop.name)
        try:
            shop.rows("SELECT pg_drop_replication_slot(%s)", shop.name)
        except psycopg.errors.ObjectInUse:
            return False
        return True

    await_until(dropped, LIMIT_S, "the slot to be dropped", poll_s=0.001)
    await_until(
        lambda: daemon.events("source.slot_lost"),
        LIMIT_S,
        lambda: f"the loss to be noticed\n{daemon.tail()}",
    )
    daemon.await_ready()
    assert_equal(shop, lake)


@pytest.mark.thorough
def test_a_slot_whose_wal_was_removed_is_resnapshotted(
    own_postgres: PostgresServer, lake: Path, make_daemon: MakeDaemon
) -> None:
    own_postgres.settings |= {"max_slot_wal_keep_size": "16MB", "max_wal_size": "32MB"}
    own_postgres.restart()
    with fresh_database(own_postgres) as shop:
        daemon = make_daemon(config(with_orders(shop), lake))
        daemon.start_ready()
        assert daemon.sigterm() == 0
        query = "SELECT wal_status FROM pg_replication_slots WHERE slot_name = %s"

        def lost() -> bool:
            shop.execute(
                "UPDATE orders SET note = repeat(md5(random()::text), 3000)",
                "SELECT pg_switch_wal()",
                "CHECKPOINT",
            )
            return bool(shop.value(query, shop.name) == "lost")

        await_until(lost, LIMIT_S, "the server to give up the slot")
        daemon.start_ready()
        assert_equal(shop, lake)
        [event] = daemon.events("source.slot_lost")
        assert "removed WAL" in event["reason"]
        assert shop.value(query, shop.name) in {"reserved", "extended"}
        daemon.close()


# --- positions -------------------------------------------------------------------------------


def test_idle_advances_the_slot_while_only_others_write(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    shop.execute("CREATE TABLE elsewhere (id int)")
    daemon = make_daemon(config(shop, lake, tables=["public.orders"]))
    daemon.start_ready()
    epoch = source_status(daemon)["epoch"]
    shop.execute("INSERT INTO elsewhere SELECT generate_series(1, 10000)")
    target = Lsn.parse(shop.value("SELECT pg_current_wal_lsn()::text"))
    await_until(lambda: confirmed(shop) >= target, LIMIT_S, "the slot to advance")
    assert source_status(daemon)["epoch"] == epoch


class TruncatingCapture(WalCapture):
    """Has the source truncated and refilled between the snapshot's point and its reading."""

    meanwhile: Callable[[], None]

    async def snapshot(self, tables: Sequence[Table], **how: Any) -> Snapshot:
        snapshot = await super().snapshot(tables, **how)
        self.meanwhile()
        return snapshot


def capture_of(
    database: Database, kind: type[WalCapture] = WalCapture, options: str = ""
) -> WalCapture:
    dsn = psycopg.conninfo.make_conninfo(database.dsn, options=options)
    settings = WalSettings(
        kind="wal",
        dsn=SecretStr(dsn),
        tables=["public.*"],
        slot=database.name,
        publication=database.name,
    )
    drain_policy = DrainPolicy(64_000_000)
    return kind("shop", settings, memory_bytes=64 << 20, drain_policy=drain_policy)


@asynccontextmanager
async def pipeline(capture: WalCapture, lake: DeltaLake) -> AsyncIterator[asyncio.Task[None]]:
    """Run a pipeline in this process; at the end it is stopped as by SIGTERM."""
    stop = asyncio.Event()
    policy = PipelinePolicy(EpochPolicy(0.1, 64 << 20))
    task = asyncio.create_task(Pipeline(capture, lake, policy, watch()).run(stop))
    try:
        yield task
    finally:
        stop.set()
        await task


async def test_snapshot_boundary_a_truncate_before_the_table_is_read(
    shop: Database, lake: Path
) -> None:
    capture = capture_of(shop, TruncatingCapture)
    assert isinstance(capture, TruncatingCapture)
    capture.meanwhile = lambda: shop.execute(
        "TRUNCATE orders", "INSERT INTO orders VALUES (7, 'after')"
    )

    def arrived() -> bool:
        # the first epoch has the snapshot alone, or the changes as well
        found = (lake / "shop/public/orders/_delta_log").exists()
        return found and "c" in read_raw(str(lake), "shop", ORDERS)["_cdc_op"].to_pylist()

    async with pipeline(capture, DeltaLake(str(lake), "shop")):
        await asyncio.to_thread(await_until, arrived, LIMIT_S, "the insert")
    rows = read_raw(str(lake), "shop", ORDERS).to_pylist()
    assert sorted(Counter(r["_cdc_op"] for r in rows).items()) == [("c", 1), ("t", 2)]
    assert_equal_now(shop, lake)


def await_orders(database: Database, lake: Path) -> None:
    now = Lsn.parse(database.value("SELECT pg_current_wal_lsn()::text"))

    def arrived() -> bool:
        return bool(epochs(lake)) and confirmed(database) >= now

    await_until(arrived, LIMIT_S, f"the lake to reach {now}")


@pytest.mark.thorough
@pytest.mark.parametrize("stalled_s", [5, pytest.param(300, marks=pytest.mark.long)])
async def test_a_stalled_lake_does_not_lose_the_connection(
    shop: Database, lake: Path, stalled_s: int
) -> None:
    timeout_s = 2
    limit_s = stalled_s + LIMIT_S
    goes_on = threading.Event()
    stalled = threading.Event()

    def stall(step: str) -> None:
        if step == "public.orders" and armed.is_set():
            stalled.set()
            assert goes_on.wait(2 * limit_s)

    armed = threading.Event()
    capture = capture_of(shop, options=f"-c wal_sender_timeout={timeout_s}s")
    sender = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s"
    age = f"SELECT clock_timestamp() - %s::timestamptz > interval '{stalled_s} s'"
    async with pipeline(capture, DeltaLake(str(lake), "shop", before_commit=stall)) as task:
        await asyncio.to_thread(await_orders, shop, lake)
        pid = shop.value(sender, shop.name)
        armed.set()
        shop.execute("INSERT INTO orders VALUES (1003, 'stalls')")
        assert await asyncio.to_thread(stalled.wait, LIMIT_S)
        since = shop.value("SELECT clock_timestamp()")
        # more than all buffers hold: the server must wait, and must not think us dead
        await asyncio.to_thread(  # or the daemon, in this thread, is silent meanwhile
            shop.execute,
            "INSERT INTO orders SELECT i, repeat('x', 2000) FROM generate_series(2000, 40000) i",
        )
        await asyncio.to_thread(
            await_until, lambda: shop.value(age, since), limit_s, "time-outs to pass", poll_s=0.5
        )
        assert not task.done()
        assert shop.value(sender, shop.name) == pid
        goes_on.set()
        await asyncio.to_thread(await_orders, shop, lake)
        assert shop.value(sender, shop.name) == pid
    assert_equal_now(shop, lake)


# --- values and columns ----------------------------------------------------------------------

TYPES: dict[str, list[str]] = {
    "bool": ["true", "false"],
    "int2": ["-32768", "32767"],
    "int4": ["-2147483648", "0"],
    "int8": ["-9223372036854775808", "9223372036854775807"],
    "float4": ["'NaN'", "'-Infinity'", "1e-45", "-0"],
    "float8": ["'NaN'", "'Infinity'", "0.1", "5e-324"],
    "text": ["''", "'a\tb\n\\ 小明'"],
    "varchar(10)": ["'  x '"],
    "char(6)": ["'ab'", "''"],
    "bytea": [r"'\x'", r"'\x00ff'"],
    "date": ["'infinity'", "'0044-03-15 BC'", "'9999-12-31'", "'12345-01-01'", "'2024-02-29'"],
    "timestamp": [
        "'-infinity'",
        "'2024-02-29 23:59:59.999999'",
        "'20000-01-01'",
        "'0001-01-01 BC'",
    ],
    "timestamptz": ["'infinity'", "'1970-01-01 00:00:00.000001+00'", "'0044-03-15 BC'"],
    "numeric(12,2)": ["-9999999999.99", "'NaN'", "0"],
    "numeric(38,10)": ["1234567890123456789012345678.0123456789"],
    "numeric": ["'NaN'", "1e300", "200", "0.000"],
    "numeric(50,3)": ["99999999999999999999999999999999999999999999999.999"],
    "uuid": ["'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'"],
    "json": ["'{\"a\": [1,  2]}'", "'null'"],
    "jsonb": ["'{\"b\": 1e2}'"],
    "xml": ["'<a>ü</a>'"],
    "interval": ["'1 year 2 mons -3 days 04:05:06.7'", "'0'"],
    "time": ["'24:00:00'", "'00:00:00.000001'"],
    "timetz": ["'12:00:00+13:45'"],
    "inet": ["'10.0.0.1'", "'10.0.0.0/8'", "'::1'"],
    "money": ["-12.34"],
    "mood": ["'süß'"],
    "int4range": ["'[1,5)'", "'empty'"],
    "point": ["'(1.5,-2)'"],
    "tsvector": ["'a:1 b:2'"],
    "bit(3)": ["B'101'"],
    "int4[]": ["'{1,NULL,3}'", "'{}'", "'{{1,2},{3,4}}'", "'[0:1]={1,2}'"],
    "text[]": ['\'{a,"b,c",NULL,""}\''],
    "pair": ["'(1,\"x y\")'"],
    "positive": ["5"],
}
"""Type to its odd values, as SQL."""


def has_xml(database: Database) -> bool:
    """Whether the server was built with libxml."""
    try:
        return bool(database.value("SELECT '<a/>'::xml IS NOT NULL"))
    except psycopg.errors.FeatureNotSupported:
        return False


def test_lossless_every_type_by_snapshot_and_stream(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    types = {t: v for t, v in TYPES.items() if t != "xml" or has_xml(database)}
    columns = ", ".join(f"c{i} {pg_type}" for i, pg_type in enumerate(types))
    database.execute(
        "CREATE TYPE mood AS ENUM ('süß', 'sour')",
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE DOMAIN positive AS int CHECK (VALUE > 0)",
        f"CREATE TABLE kinds (id int PRIMARY KEY, {columns})",
    )

    def insert(first_id: int) -> int:
        most = max(map(len, types.values()))
        for n in range(most + 1):  # the last row is all nulls
            values = ", ".join(v[n] if n < len(v) else "NULL" for v in types.values())
            database.execute(f"INSERT INTO kinds VALUES ({first_id + n}, {values})")
        return first_id + most + 1

    streamed_from = insert(1)
    daemon = make_daemon(config(database, lake))
    daemon.start_ready()
    insert(streamed_from)
    assert_equal(database, lake)
    rows = {r["id"]: r for r in read_raw(str(lake), "shop", TableId("public", "kinds")).to_pylist()}
    names = {pg_type: f"c{i}" for i, pg_type in enumerate(types)}
    for first in (1, streamed_from):
        raw = dict(rows[first]["_cdc_raw"])
        assert raw[names["date"]] == "infinity"
        assert raw[names["timestamp"]] == "-infinity"
        assert dict(rows[first + 1]["_cdc_raw"])[names["numeric(12,2)"]] == "NaN"
        assert rows[first][names["date"]] is None
        assert rows[first][names["char(6)"]] == "ab    "
        assert rows[first][names["inet"]] == "10.0.0.1"
        assert rows[first][names["interval"]] == "P1Y2M-3DT4H5M6.7S"
    same = [n for n in rows[1] if not n.startswith("_cdc_") and n != "id"]
    for offset in range(streamed_from - 1):
        snapshot, stream = rows[1 + offset], rows[streamed_from + offset]
        assert [repr(snapshot[n]) for n in same] == [repr(stream[n]) for n in same]
        assert snapshot["_cdc_raw"] == stream["_cdc_raw"]


def test_a_column_added_while_running_comes_to_the_lake(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(config(shop, lake))
    daemon.start_ready()
    shop.execute(
        "INSERT INTO orders VALUES (2001, 'before')",
        "ALTER TABLE orders ADD COLUMN amount numeric(10,2)",
        "INSERT INTO orders VALUES (2002, 'after', 12.50)",
        "UPDATE orders SET amount = 1.25 WHERE id = 5",
    )
    assert_equal(shop, lake)
    rows = {r["id"]: r for r in read_raw(str(lake), "shop", ORDERS).to_pylist()}
    assert str(rows[2002]["amount"]) == "12.50"
    assert rows[2001]["amount"] is None
    daemon.sigkill()
    daemon.start_ready()
    shop.execute("INSERT INTO orders VALUES (2003, 'later', 3)")
    assert_equal(shop, lake)


# --- server and daemons come and go ----------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_server_restart_is_survived_and_not_held_up(
    own_postgres: PostgresServer, lake: Path, make_daemon: MakeDaemon, mode: Any
) -> None:
    with fresh_database(own_postgres) as database:
        create_schema(database.dsn)
        daemon = make_daemon(config(database, lake, max_delay="1s"))
        daemon.start_ready()
        with Workload(database.dsn, seed=11, transactions=600, limit_s=60, pause_s=0.005) as work:
            await_until(lambda: work.committed > 100, LIMIT_S, "some writing")
            began = time.monotonic()
            own_postgres.stop(mode, limit_s=20.0)
            assert time.monotonic() - began < 10.0
            own_postgres.start()
            work.join()
        daemon.await_ready()
        assert_equal(database, lake)
        assert_change_log_is_sound(database, lake)
        states = {e["state"] for e in daemon.events("source.failed")}
        assert states <= {"backing_off"}, daemon.tail()
        daemon.close()


def test_one_writer_the_second_daemon_takes_over_after_a_kill(
    shop: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    text = config(shop, lake)
    first, second = make_daemon(text, "first"), make_daemon(text, "second")
    first.start_ready()
    second.start()

    def waits() -> bool:
        return source_status(second).get("state") == "backing_off"

    await_until(waits, LIMIT_S, lambda: f"the second to back off\n{second.tail()}")
    shop.execute("UPDATE orders SET note = 'by the first'")
    assert_equal(shop, lake)
    assert not second.events("epoch.committed")
    first.sigkill()
    shop.execute("DELETE FROM orders WHERE id % 2 = 0")
    second.await_ready()
    shop.execute("INSERT INTO orders VALUES (3001, 'to the second')")
    assert_equal(shop, lake)
    assert_change_log_is_sound(shop, lake)
