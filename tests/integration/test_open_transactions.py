"""Transactions that the server sends while they are open: undone parts, DDL, positions, no room."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from pydantic import SecretStr

from ingestd.lake.delta_lake import DeltaLake
from ingestd.model.errors import TransientError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from ingestd.pipeline.filling_epoch import EpochPolicy
from ingestd.pipeline.pipeline import Pipeline
from ingestd.pipeline.policy import PipelinePolicy
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.capture import WalCapture
from ingestd.postgres.wal.drain.drain import DrainPolicy
from ingestd.postgres.wal.spool import FileSpool, SpoolPolicy
from tests.harness.compare import assert_change_log_is_sound, assert_lake_equals_source, raw_rows
from tests.harness.open_transactions import (
    OpenWriters,
    meanings,
    send_while_open,
    sent_while_open,
)
from tests.harness.waiting import await_until
from tests.unit.decode.test_streamed_transactions import ordered
from tests.unit.pipeline.fixtures import watch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.harness.databases import Database

LIMIT_S = 60.0
ROWS = "INSERT INTO {table} SELECT g, repeat(md5(g::text), 5) FROM generate_series({a}, {b}) g"


@pytest.fixture
def source(database: Database) -> Database:
    send_while_open(database)
    database.execute(
        "CREATE TABLE large (id int PRIMARY KEY, note text)",
        "CREATE TABLE small (id int PRIMARY KEY, note text)",
    )
    return database


@asynccontextmanager
async def running(
    database: Database, lake: Path, policy: SpoolPolicy | None = None
) -> AsyncIterator[asyncio.Task[None]]:
    settings = WalSettings(
        kind="wal",
        dsn=SecretStr(database.dsn),
        tables=["public.*"],
        slot=database.name,
        publication=database.name,
    )
    capture = WalCapture(
        "shop",
        settings,
        memory_bytes=1 << 20,  # 128 kB for open transactions, the rest goes to a file
        drain_policy=DrainPolicy(1 << 40),
        spool=policy or SpoolPolicy(1 << 30),
    )
    stop = asyncio.Event()
    pipeline = Pipeline(
        capture,
        DeltaLake(str(lake), "shop"),
        PipelinePolicy(EpochPolicy(0.1, 64 << 20), idle_interval_s=0.1),
        watch(),
    )
    task = asyncio.create_task(pipeline.run(stop))
    try:
        yield task
    finally:
        stop.set()
        await asyncio.wait([task])


def rows(lake: Path, table: str) -> int:
    return sum(row["_cdc_op"] != "t" for row in raw_rows(lake, TableId("public", table)))


def confirmed(database: Database) -> Lsn:
    return Lsn.parse(
        database.value(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s",
            database.name,
        )
    )


async def until_row(database: Database, lake: Path, number: int) -> None:
    """Commit a small transaction, and wait until it is in the lake."""
    await asyncio.to_thread(database.execute, f"INSERT INTO small VALUES ({number}, 'beside')")
    await until(lambda: rows(lake, "small") >= number, f"small row {number}")


async def until(condition: Any, what: str) -> None:
    await asyncio.to_thread(await_until, condition, LIMIT_S, what)


def insert(session: psycopg.Connection[Any], a: int, b: int, table: str = "large") -> None:
    session.execute(ROWS.format(table=table, a=a, b=b).encode())


async def test_undone_parts_and_ddl_of_an_open_transaction(source: Database, lake: Path) -> None:
    """I2, I3: savepoints nested, released, rolled back; columns added in both kinds."""
    with psycopg.connect(source.dsn) as session:
        async with running(source, lake):
            await until_row(source, lake, 1)
            insert(session, 1, 1000)
            session.execute("SAVEPOINT undone")
            session.execute("ALTER TABLE large ADD COLUMN never text")
            insert(session, 1001, 2000)
            await until_row(source, lake, 2)  # what was written by now has been sent
            session.execute("SAVEPOINT within")
            insert(session, 2001, 3000)
            session.execute("RELEASE within")
            insert(session, 3001, 3500)
            await until_row(source, lake, 3)
            session.execute("ROLLBACK TO undone")
            insert(session, 3001, 4000)
            await until_row(source, lake, 4)
            session.execute("SAVEPOINT kept")
            session.execute("ALTER TABLE large ADD COLUMN more int")
            insert(session, 4001, 5000)
            session.execute("RELEASE kept")
            session.execute("UPDATE large SET more = id WHERE id % 10 = 0")
            await until_row(source, lake, 5)
            assert rows(lake, "large") == 0
            session.commit()
            await asyncio.to_thread(
                assert_lake_equals_source, source, lake, slot=source.name, limit_s=LIMIT_S
            )
            insert(session, 5001, 5010)  # with the definition that was sent inside
            session.commit()
            await asyncio.to_thread(
                assert_lake_equals_source, source, lake, slot=source.name, limit_s=LIMIT_S
            )
    assert_change_log_is_sound(source, lake)
    await until(lambda: sent_while_open(source, source.name) > 0, "streamed transactions")


async def test_ack_after_durable_positions_pass_an_open_transaction(
    source: Database, lake: Path
) -> None:
    """I1, I10: small transactions are confirmed meanwhile; a restart has all of it sent again."""
    with psycopg.connect(source.dsn) as session:
        async with running(source, lake):
            await until_row(source, lake, 1)
            insert(session, 1, 3000)
            await until_row(source, lake, 2)
            begun = Lsn.parse(source.value("SELECT pg_current_wal_lsn()::text"))
            await until_row(source, lake, 3)
            await until(lambda: confirmed(source) > begun, "confirmed beyond the open one")
        async with running(source, lake):
            insert(session, 3001, 4000)
            await until_row(source, lake, 4)
            assert rows(lake, "large") == 0
        await asyncio.to_thread(session.commit)
        async with running(source, lake):
            await asyncio.to_thread(
                assert_lake_equals_source, source, lake, slot=source.name, limit_s=LIMIT_S
            )
    assert rows(lake, "large") == 4000
    assert_change_log_is_sound(source, lake)


def spooled_bytes() -> int:
    """Return the size of this process's files of open transactions, which have no name."""
    total = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if descriptor.readlink().name.startswith("ingestd-"):
                total += descriptor.stat().st_size
    return total


async def test_a_transaction_that_is_rolled_back_leaves_nothing(
    source: Database, lake: Path
) -> None:
    with psycopg.connect(source.dsn) as session:
        async with running(source, lake):
            await until_row(source, lake, 1)
            insert(session, 1, 3000)
            await until_row(source, lake, 2)
            await until(lambda: spooled_bytes() > 100_000, "what is kept")
            session.rollback()
            await until_row(source, lake, 3)
            await until(lambda: spooled_bytes() == 0, "nothing kept")
            assert rows(lake, "large") == 0
    assert_change_log_is_sound(source, lake)


@pytest.mark.parametrize("folder", [None, "/nowhere/at/all"])
async def test_without_spool_room_a_reconnect_has_them_sent_at_commit(
    source: Database, lake: Path, monkeypatch: pytest.MonkeyPatch, folder: str | None
) -> None:
    if folder is not None:
        monkeypatch.setattr(tempfile, "tempdir", folder)
    policy = SpoolPolicy(200_000 if folder is None else 1 << 30)
    with psycopg.connect(source.dsn) as session:
        async with running(source, lake, policy) as task:
            await until_row(source, lake, 1)
            insert(session, 1, 3000)
            with pytest.raises(TransientError, match="still open") as raised:
                await asyncio.wait_for(task, LIMIT_S)
            assert raised.value.reason == "open_transactions"
        async with running(source, lake, policy):
            await until_row(source, lake, 2)
            assert rows(lake, "large") == 0
            session.commit()
            await asyncio.to_thread(
                assert_lake_equals_source, source, lake, slot=source.name, limit_s=LIMIT_S
            )
    assert_change_log_is_sound(source, lake)


async def test_where_the_server_fails_the_next_connection_goes_without(
    source: Database, lake: Path
) -> None:
    """PostgreSQL 15 to 18 can't find a table while its second ALTER is not decoded yet."""
    policy = SpoolPolicy(1 << 30)
    async with running(source, lake, policy):
        await until_row(source, lake, 1)
    with psycopg.connect(source.dsn) as session:
        session.execute("ALTER TABLE large ADD COLUMN kept int")
        session.execute("SAVEPOINT undone")
        session.execute("ALTER TABLE large ADD COLUMN never int")
        insert(session, 1, 10)
        session.execute("ROLLBACK TO undone")
        insert(session, 1, 3000)
        session.execute("ALTER TABLE large ADD COLUMN second int")
        insert(session, 3001, 3010)
    for _ in range(2):
        async with running(source, lake, policy) as task:
            await until(lambda: task.done() or rows(lake, "large") == 3010, "rows, or a fault")
        if task.exception() is None:
            break
        assert isinstance(task.exception(), TransientError), task.exception()
    async with running(source, lake, policy):  # the server writes WAL of its own after the rows
        await asyncio.to_thread(
            assert_lake_equals_source, source, lake, slot=source.name, limit_s=LIMIT_S
        )
    assert_change_log_is_sound(source, lake)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
def test_commit_order_is_that_of_a_server_without_streaming(database: Database, seed: int) -> None:
    """The same WAL decoded both ways by the server: the same changes, definitions, commits."""
    publication, slot = database.name, database.name
    writers = OpenWriters(
        database, seed=seed, sessions=3, transactions=60 if seed > 1 else 15, keeps_ddl=True
    )
    database.execute(
        f"CREATE PUBLICATION {publication} FOR ALL TABLES",
        f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')",
    )
    with writers:
        writers.join()
    with database.connect() as connection:
        connection.execute("SET logical_decoding_work_mem = '64kB'")
        peek = (
            "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL,"
            " 'proto_version', '2', 'streaming', %s, 'publication_names', %s)"
        )
        off = connection.execute(peek, [slot, "off", publication]).fetchall()
        on = connection.execute(peek, [slot, "on", publication]).fetchall()
    wire = [bytes(data) for (data,) in on]
    assert sum(data[:1] == b"c" for data in wire) > 10
    assert sum(data[:1] == b"A" and data[1:5] != data[5:] for data in wire) > 10
    spool = FileSpool(SpoolPolicy(1 << 30), memory_bytes=1 << 18, where="here")
    cuts = random.Random(seed).choices(range(len(wire)), k=40)
    found = ordered(wire, cuts, spool)
    assert spool.nbytes == 0
    assert list(meanings(found)) == list(meanings([data for (data,) in off]))
