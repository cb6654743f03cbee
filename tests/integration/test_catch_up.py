"""Draining a backlog: where the server refuses it, and by how many slots."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import psycopg
import pytest
import structlog
from psycopg import sql
from pydantic import SecretStr

from ingestd import failpoints
from ingestd.lake.delta_lake import DeltaLake
from ingestd.model.errors import TransientError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from ingestd.pipeline.filling_epoch import EpochPolicy
from ingestd.pipeline.pipeline import Pipeline
from ingestd.pipeline.policy import PipelinePolicy
from ingestd.postgres.connection.session import connect
from ingestd.postgres.settings import WalSettings
from ingestd.postgres.wal.capture import WalCapture
from ingestd.postgres.wal.change_stream import ChangeStream
from ingestd.postgres.wal.drain import slot_copy as drain_slot
from ingestd.postgres.wal.drain.decision import LATE_CHECKS
from ingestd.postgres.wal.drain.drain import DrainPolicy
from ingestd.postgres.wal.drain.slot_copy import DrainSlot
from ingestd.postgres.wal.relation_cache import Relations
from ingestd.postgres.wal.replication_stream import ReplicationStream, StreamLimits, open_stream
from ingestd.postgres.wal.server import inspect_server, refuse_other
from ingestd.postgres.wal.slot_confirmation import SlotConfirmation
from ingestd.postgres.wal.slots import advance as slot_advance
from ingestd.postgres.wal.slots.advance import SlotAdvance
from ingestd.postgres.wal.slots.decode_gap import SlotDecodeGap
from ingestd.postgres.wal.spool import SpoolPolicy
from tests.harness.compare import assert_change_log_is_sound, raw_rows
from tests.harness.databases import query_server_id
from tests.harness.open_transactions import segmenting
from tests.harness.waiting import await_until
from tests.unit.pipeline.fixtures import watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import ModuleType

    from ingestd.postgres.connection.liveness import LivenessCheckedConnection
    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.harness.databases import Database

LIMIT_S = 30.0
OTHER_SESSIONS = """
SELECT count(*) FROM pg_stat_activity
 WHERE datname = current_database() AND application_name LIKE 'ingestd%'
"""


async def run_until_rows(pipeline: Pipeline, lake: Path, rows: int, dsn: str) -> None:
    """Run until the lake has the rows; return when the server has ended the sessions, too.

    A session that was closed has its claim on the slot for a moment.
    """
    stop = asyncio.Event()
    running = asyncio.create_task(pipeline.run(stop))

    def arrived() -> bool:
        assert not running.done(), running.exception()
        return len(raw_rows(lake, TableId("public", "t"))) == rows

    try:
        await asyncio.to_thread(await_until, arrived, LIMIT_S, f"{rows} rows")
    finally:
        stop.set()
        try:
            await running
        finally:
            await asyncio.to_thread(await_end_of_sessions, dsn)


def await_end_of_sessions(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:

        def has_ended() -> bool:
            return connection.execute(OTHER_SESSIONS).fetchone() == (0,)

        await_until(has_ended, LIMIT_S, "the sessions to end")


def capture_of(dsn: str, slot: str, policy: DrainPolicy) -> WalCapture:
    settings = WalSettings(
        kind="wal", dsn=SecretStr(dsn), tables=["public.t"], slot=slot, publication=slot
    )
    return WalCapture("shop", settings, memory_bytes=8 << 20, drain_policy=policy)


def make_pipeline(
    dsn: str, slot: str, lake: Path, policy: DrainPolicy, *, max_delay_s: float = 0.1
) -> Pipeline:
    epochs = PipelinePolicy(EpochPolicy(max_delay_s=max_delay_s, max_bytes=1 << 20))
    return Pipeline(capture_of(dsn, slot, policy), DeltaLake(str(lake), "shop"), epochs, watch())


async def run_pipeline(server: PostgresServer, lake: Path, policy: DrainPolicy, rows: int) -> None:
    """Run one on a server's only slot until the lake has so many rows."""
    pipeline = make_pipeline(server.dsn(), "only", lake, policy)
    await run_until_rows(pipeline, lake, rows, server.dsn())


@pytest.mark.thorough
@pytest.mark.parametrize("free", [0, 1, 2])
async def test_with_few_free_slots_fewer_drain_with_none_it_streams(
    own_postgres: PostgresServer, lake: Path, free: int
) -> None:
    own_postgres.settings["max_replication_slots"] = str(1 + free)
    await asyncio.to_thread(own_postgres.restart)
    own_postgres.psql("CREATE TABLE t (id int PRIMARY KEY, note text)")
    policy = DrainPolicy(above_bytes=200_000, slots=3, part_bytes=50_000)
    # the `t` of the snapshot
    await run_pipeline(own_postgres, lake, policy, 1)
    for low in range(0, 3000, 1000):
        own_postgres.psql(
            "INSERT INTO t SELECT n, repeat(md5(n::text), 5)"
            f" FROM generate_series({low + 1}, {low + 1000}) n"
        )
    with structlog.testing.capture_logs() as told:
        await run_pipeline(own_postgres, lake, policy, 3001)
    assert policy.is_paused == (free == 0)
    assert policy.drained == min(free, 1)
    refused = [line for line in told if line["event"] == "catch_up.refused"]
    assert len(refused) == (free == 0)
    for line in refused:
        assert line["source"] == "shop"
        assert "all replication slots are in use" in line["reason"]
        assert "higher" in line["remedy"]
    policy.paused_until_s = 0.0  # later, it is tried again
    own_postgres.psql("INSERT INTO t SELECT n, '' FROM generate_series(5001, 8000) n")
    if free == 0:
        own_postgres.settings["max_replication_slots"] = "2"
        await asyncio.to_thread(own_postgres.restart)
    await run_pipeline(own_postgres, lake, policy, 6001)
    assert policy.drained == min(free, 1) + 1


@pytest.mark.thorough
async def test_large_messages_are_drained(database: Database, lake: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
    policy = DrainPolicy(above_bytes=100_000)

    pipeline = make_pipeline(database.dsn, database.name, lake, policy)
    await run_until_rows(pipeline, lake, 1, database.dsn)
    database.execute(
        "INSERT INTO t SELECT n, repeat('x', 100) FROM generate_series(1, 1000) n",
        "INSERT INTO t SELECT n, repeat('x', 100000) FROM generate_series(1001, 1400) n",
    )
    pipeline = make_pipeline(database.dsn, database.name, lake, policy)
    await run_until_rows(pipeline, lake, 1401, database.dsn)
    assert policy.drained == 1
    assert not policy.is_paused


@pytest.mark.parametrize("above_bytes", [1000, 1 << 40], ids=["drained", "streamed"])
async def test_a_backlog_is_committed_when_it_is_given(
    database: Database, lake: Path, above_bytes: int
) -> None:
    """Its epoch does not wait for more."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
    policy = DrainPolicy(above_bytes)
    pipeline = make_pipeline(database.dsn, database.name, lake, policy)
    await run_until_rows(pipeline, lake, 1, database.dsn)
    insert_rows(database, 0)
    pipeline = make_pipeline(database.dsn, database.name, lake, policy, max_delay_s=10 * LIMIT_S)
    await run_until_rows(pipeline, lake, 1001, database.dsn)
    assert policy.drained == (above_bytes == 1000)


@pytest.fixture
def slow_parts() -> Iterator[None]:
    """Make earlier changes durable while the server decodes a part."""
    failpoints.arm("capture.drain.before=delay:0.3@1+", lambda *_: None)
    yield
    failpoints.arm("", lambda *_: None)


@pytest.mark.thorough
@pytest.mark.usefixtures("slow_parts")
@pytest.mark.parametrize("refused", [drain_slot, slot_advance], ids=["drains", "moves"])
async def test_a_backlog_is_delivered_with_only_one_free_connection(
    own_postgres: PostgresServer,
    lake: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: ModuleType,
) -> None:
    """With none for a drain it is streamed; with none to advance the slot meanwhile, that waits."""
    own_postgres.psql(
        "CREATE ROLE crowded LOGIN CONNECTION LIMIT 0;"
        "CREATE TABLE t (id int PRIMARY KEY, note text)"
    )
    own_postgres.share_password()
    attempts: list[str] = []

    async def crowded(_: str, **more: Any) -> LivenessCheckedConnection:
        attempts.append(refused.__name__)
        return await connect(own_postgres.dsn(user="crowded"), **more)

    monkeypatch.setattr(refused, "connect", crowded)
    policy = DrainPolicy(above_bytes=200_000, part_bytes=100_000)
    await run_pipeline(own_postgres, lake, policy, 1)  # the `t` of the snapshot
    for low in range(0, 6000, 1000):
        own_postgres.psql(
            "INSERT INTO t SELECT n, repeat('x', 300)"
            f" FROM generate_series({low + 1}, {low + 1000}) n"
        )
    with structlog.testing.capture_logs() as told:
        await run_pipeline(own_postgres, lake, policy, 6001)
    assert len(attempts) > 1 or refused is drain_slot
    events = {drain_slot: "catch_up.refused", slot_advance: "slot.not_moved"}
    [line] = [line for line in told if line["event"] in events.values()]  # once
    assert line["event"] == events[refused]
    assert "too many connections" in line["reason"]
    assert line["remedy"]
    assert policy.drained == (refused is slot_advance)
    assert policy.is_paused is (refused is drain_slot)


@pytest.mark.thorough
@pytest.mark.parametrize("large_bytes", [1, 50_000])
async def test_exactly_once_large_blocks_are_not_read_ahead_of(
    database: Database, lake: Path, *, large_bytes: int
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
    policy = DrainPolicy(above_bytes=100_000, part_bytes=1_000_000, large_block_bytes=large_bytes)

    pipeline = make_pipeline(database.dsn, database.name, lake, policy)
    await run_until_rows(pipeline, lake, 1, database.dsn)
    for low in range(0, 1000, 250):
        database.execute(
            "INSERT INTO t SELECT n, repeat('x', 10000)"
            f" FROM generate_series({low + 1}, {low + 250}) n"
        )
    pipeline = make_pipeline(database.dsn, database.name, lake, policy)
    await run_until_rows(pipeline, lake, 1001, database.dsn)
    found = raw_rows(lake, TableId("public", "t"))
    assert sorted(r["id"] for r in found if r["_cdc_op"] == "c") == list(range(1, 1001))
    assert policy.drained == 1


@pytest.fixture
async def cramped(own_postgres: PostgresServer) -> PostgresServer:
    """A server with an empty table that keeps 80 kB of a part's messages, and no more."""
    own_postgres.settings["temp_file_limit"] = "80kB"
    await asyncio.to_thread(own_postgres.restart)
    own_postgres.psql("CREATE TABLE t (id int PRIMARY KEY, note text)")
    return own_postgres


def cramped_policy(**fields: int) -> DrainPolicy:
    """A policy for `cramped`; `sparse_ratio` 0: as if all parts before had held nothing."""
    return DrainPolicy(above_bytes=200_000, result_memory="64kB", **fields)  # type: ignore[arg-type]


def insert_in_small_transactions(server: PostgresServer, rows: int) -> None:
    for low in range(0, rows, 50):
        server.psql(
            "INSERT INTO t SELECT n, repeat(md5(n::text), 5)"
            f" FROM generate_series({low + 1}, {low + 50}) n"
        )


async def test_joined_parts_hold_no_more_than_others(cramped: PostgresServer, lake: Path) -> None:
    """Nothing tells before that changes follow much WAL that is of no concern."""
    policy = cramped_policy(slots=1, part_bytes=50_000, sparse_ratio=0)
    run = partial(run_pipeline, cramped, lake, policy)
    await run(1)
    insert_in_small_transactions(cramped, 3000)
    await run(3001)
    assert (policy.drained, policy.most_joined, policy.is_paused) == (1, 4, False)


@pytest.mark.thorough
async def test_merged_parts_that_exceed_the_disk_are_not_merged_again(
    cramped: PostgresServer, lake: Path
) -> None:
    """And where it may not keep it at all it is streamed."""
    policy = cramped_policy(slots=1, part_bytes=50_000, sparse_ratio=0)
    run = partial(run_pipeline, cramped, lake, policy)
    await run(1)
    cramped.psql("INSERT INTO t SELECT -n, repeat(md5(n::text), 5) FROM generate_series(1, 1000) n")
    insert_in_small_transactions(cramped, 3000)
    with pytest.raises(TransientError, match="temp_file_limit"):
        await run(4001)
    assert (policy.drained, policy.most_joined, policy.is_paused) == (0, 1, False)
    assert policy.part_bytes == 50_000
    with pytest.raises(TransientError, match="temp_file_limit"):
        await run(4001)
    assert (policy.drained, policy.is_paused) == (0, True)
    await run(4001)


@pytest.mark.thorough
async def test_parts_that_are_too_large_for_the_server_become_smaller(
    cramped: PostgresServer, lake: Path
) -> None:
    policy = cramped_policy(slots=2, part_bytes=1_000_000, least_part_bytes=20_000)
    run = partial(run_pipeline, cramped, lake, policy)
    await run(1)
    insert_in_small_transactions(cramped, 5000)
    for part_bytes in (250_000, 62_500):
        with pytest.raises(TransientError, match="temp_file_limit"):
            await run(5001)
        assert policy.part_bytes == part_bytes
    await run(5001)
    assert (policy.drained, policy.is_paused) == (1, False)


async def test_a_server_that_may_keep_next_to_nothing_streams(
    cramped: PostgresServer, lake: Path
) -> None:
    policy = cramped_policy(slots=1, most_joined=1)
    policy.part_bytes = policy.least_part_bytes
    run = partial(run_pipeline, cramped, lake, policy)
    await run(1)
    cramped.psql("INSERT INTO t SELECT n, repeat('x', 100) FROM generate_series(1, 5000) n")
    await run(5001)
    assert (policy.drained, policy.is_paused) == (0, True)


async def test_exactly_once_large_transactions_drain_in_segments(
    database: Database, lake: Path
) -> None:
    """I2, I3: one with parts that are undone, one that is rolled back, one that is still open."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
    policy = segmenting(database, above_bytes=100_000)
    run = partial(run_until_rows, lake=lake, dsn=database.dsn)
    await run(make_pipeline(database.dsn, database.name, lake, policy), rows=1)
    with psycopg.connect(database.dsn) as large, psycopg.connect(database.dsn) as other:
        insert(large, 1, 2000)
        insert(other, 10_001, 12_000)
        database.execute("INSERT INTO t VALUES (20001, 'beside')")
        large.execute("SAVEPOINT undone")
        insert(large, 2001, 3000)
        large.execute("ROLLBACK TO undone")
        insert(large, 3001, 4000)
        large.execute("UPDATE t SET note = 'beside too' WHERE id = 20001")
        large.commit()
        database.execute("INSERT INTO t VALUES (20002, 'after')")
        other.rollback()
        insert(other, 10_001, 12_000)
        await run(make_pipeline(database.dsn, database.name, lake, policy), rows=3004)
        assert (policy.drained, policy.segmented) == (1, 1)
        other.commit()
    await run(make_pipeline(database.dsn, database.name, lake, policy), rows=5004)
    assert_change_log_is_sound(database, lake)


async def test_a_drain_does_without_segments_where_the_server_fails(
    database: Database, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does at some DDL in subtransactions that are rolled back; here at an unknown object."""
    fails = "SELECT convert_to(pg_describe_object(1, 2, 3), 'UTF8') FROM {changes}"
    monkeypatch.setattr(drain_slot, "COMMITS_AHEAD", sql.SQL(fails))
    database.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
    policy = segmenting(database, above_bytes=100_000)
    run = partial(run_until_rows, lake=lake, dsn=database.dsn)
    await run(make_pipeline(database.dsn, database.name, lake, policy), rows=1)
    with psycopg.connect(database.dsn) as session:
        insert(session, 1, 3000)
    with pytest.raises(TransientError, match="XX000"):
        await run(make_pipeline(database.dsn, database.name, lake, policy), rows=3001)
    assert (policy.drained, policy.streams_in_progress) == (0, False)
    await run(make_pipeline(database.dsn, database.name, lake, policy), rows=3001)
    assert (policy.drained, policy.streams_in_progress, policy.is_paused) == (1, True, False)


@pytest.mark.thorough
async def test_segments_the_server_cannot_spill_are_not_retried(
    cramped: PostgresServer, lake: Path
) -> None:
    """Those of a transaction that is open at the end of a part are for nothing."""
    cramped.psql("ALTER DATABASE postgres SET logical_decoding_work_mem = '64kB'")
    policy = DrainPolicy(
        above_bytes=100_000,
        slots=1,
        part_bytes=10_000_000,
        open_bytes=0,
        result_memory="64kB",
        decoding_memory="64kB",
    )
    run = partial(run_pipeline, cramped, lake, policy)
    await run(1)
    with psycopg.connect(cramped.dsn()) as session:
        insert(session, 1, 2000)
        cramped.psql("INSERT INTO t VALUES (0, 'beside')")
        with pytest.raises(TransientError, match="temp_file_limit"):
            await run(2)
        assert (policy.drained, policy.streams_in_progress, policy.part_bytes) == (
            0,
            False,
            10_000_000,
        )
        await run(2)
        assert (policy.drained, policy.streams_in_progress, policy.is_paused) == (1, True, False)


def insert(session: psycopg.Connection[Any], low: int, high: int) -> None:
    session.execute(
        "INSERT INTO t (id, note) SELECT n, repeat(md5(n::text), 5)"
        f" FROM generate_series({low}, {high}) n".encode()
    )


async def test_a_stream_that_stays_far_behind_drains_the_backlog(
    database: Database,
) -> None:
    """Each change is delivered once across both hand-overs."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
    policy = DrainPolicy(above_bytes=1 << 20, slots=2, part_bytes=1 << 20)
    capture = capture_of(database.dsn, database.name, policy)
    found: list[int] = []
    try:
        discovery = await capture.discover({})
        await capture.prepare(discovery.tables)
        async with contextlib.aclosing(capture.changes(None)) as chunks:
            await anext(chunks)  # it streams, and no one reads on
            for low in range(0, 60_000, 5000):
                database.execute(
                    "INSERT INTO t SELECT n, repeat(md5(n::text), 8)"
                    f" FROM generate_series({low + 1}, {low + 5000}) n"
                )
            assert policy.drained == 0
            for _ in range(LATE_CHECKS):
                await capture.lag()
            async with asyncio.timeout(LIMIT_S):
                async for chunk in chunks:
                    for batch in chunk.batches:
                        found += batch.rows.column("id").to_pylist()
                    if found and found[-1] == 60_000 and policy.drained:
                        break
                database.execute("INSERT INTO t VALUES (60001, 'streamed')")
                async for chunk in chunks:
                    for batch in chunk.batches:
                        found += batch.rows.column("id").to_pylist()
                    if found[-1] == 60_001:
                        break
    finally:
        await capture.close()
    assert found == list(range(1, 60_002))
    assert policy.drained == 1


async def test_a_stream_that_rereads_much_wal_is_not_interrupted(
    own_postgres: PostgresServer,
) -> None:
    """Behind an old transaction that is still open: no draining would be faster, nor end sooner."""
    own_postgres.settings["log_replication_commands"] = "on"
    await asyncio.to_thread(own_postgres.restart)
    own_postgres.psql("CREATE TABLE t (id int PRIMARY KEY)")
    own_postgres.psql("CREATE TABLE other (note text)")
    policy = DrainPolicy(
        above_bytes=1 << 20, part_bytes=1 << 20, reread_bytes=1 << 20, reread_parts=1, pause_s=0.0
    )
    found: list[int] = []
    with psycopg.connect(own_postgres.dsn()) as old:
        await (await prepared(own_postgres, policy)).close()
        old.execute("INSERT INTO other VALUES ('open')")
        for statement in (
            "INSERT INTO other SELECT repeat('x', 300) FROM generate_series(1, 200000)",
            "SELECT pg_replication_slot_advance('only', pg_current_wal_lsn())",
            "INSERT INTO t SELECT generate_series(1, 30000)",
        ):
            own_postgres.psql(statement)
        capture = await prepared(own_postgres, policy)
        try:
            async with contextlib.aclosing(capture.changes(None)) as chunks:
                looking = asyncio.create_task(look_often(capture))
                async with asyncio.timeout(LIMIT_S):
                    async for chunk in chunks:
                        for batch in chunk.batches:
                            found += batch.rows.column("id").to_pylist()
                        if found and found[-1] == 30_000:
                            break
                looking.cancel()
        finally:
            await capture.close()
    assert found == list(range(1, 30_001))
    log = own_postgres.log_path.read_text(encoding="utf-8", errors="replace")
    assert log.count("received replication command: START_REPLICATION") == 1
    assert policy.drained == 0


async def prepared(server: PostgresServer, policy: DrainPolicy) -> WalCapture:
    """Return one with publication and slot."""
    capture = capture_of(server.dsn(), "only", policy)
    try:
        discovery = await capture.discover({})
        await capture.prepare(discovery.tables)
    except BaseException:
        await capture.close()
        raise
    return capture


class SlowlyClosing:
    """A stream that takes a moment to close."""

    def __init__(self, stream: ReplicationStream) -> None:
        self.begin_reporting = stream.begin_reporting
        self.report_durable = stream.report_durable
        self.closing = asyncio.Event()
        self._stream = stream

    async def close(self) -> None:
        self.closing.set()
        await asyncio.sleep(0.3)
        await self._stream.close()


async def test_a_confirmation_while_a_stream_closes_waits_for_the_slot(database: Database) -> None:
    """I1: the stream holds the slot until it is closed; the advance is postponed, not refused."""
    name = database.name
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        f"CREATE PUBLICATION {name} FOR TABLE t",
        f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')",
    )
    start, queried_id = confirmed(database), await query_server_id(database.dsn)
    confirmation = SlotConfirmation(SlotAdvance(database.dsn, name, "shop", step_bytes=1))
    confirmation.begin(start, queried_id)
    opened: list[SlowlyClosing] = []

    async def open_slowly_closing(slot_at: Lsn) -> ReplicationStream:
        stream = await open_stream(
            database.dsn,
            name,
            name,
            start,
            slot_at,
            queried_id=queried_id,
            where="source shop, stream",
            limits=StreamLimits(1 << 20),
        )
        opened.append(SlowlyClosing(stream))
        return cast("ReplicationStream", opened[-1])

    insert_rows(database, 0)
    positions = []
    for low in (1000, 2000):
        positions.append(Lsn.parse(database.value("SELECT pg_current_wal_flush_lsn()::text")))
        insert_rows(database, low)
    confirmation.record_received(positions[-1])

    async def confirm_when_closing() -> None:
        await opened[-1].closing.wait()
        await confirmation.confirm(positions[0])

    try:
        async with asyncio.timeout(LIMIT_S):
            async with confirmation.streaming(open_slowly_closing):
                confirming = asyncio.create_task(confirm_when_closing())
            await confirming
            await confirmation.confirm(positions[1])
            while confirmed(database) < positions[1]:  # noqa: ASYNC110 - the server is asked
                await asyncio.sleep(0.05)
    finally:
        await confirmation.close()


def confirmed(database: Database) -> Lsn:
    return Lsn.parse(
        database.value(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s",
            database.name,
        )
    )


ADVANCE = "SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())"
DROP = "SELECT pg_drop_replication_slot('{slot}')"
MAKE = "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"


REPLY_TIME = """
SELECT reply_time FROM pg_stat_replication JOIN pg_replication_slots ON pid = active_pid
 WHERE slot_name = %s
"""


@pytest.mark.parametrize(
    ("done", "reason"),
    [([ADVANCE], "slot_moved"), ([DROP, MAKE], "slot_moved"), ([DROP], "slot_missing")],
    ids=["moved", "made anew", "dropped"],
)
@pytest.mark.parametrize("when", ["before", "copied", "drained"])
async def test_exactly_once_a_slot_moved_by_another_client_is_refused(
    database: Database, done: list[str], reason: str, when: str
) -> None:
    """I1: the changes that it skipped would be lost silently."""

    def meddle() -> None:
        database.execute("INSERT INTO t VALUES (-1, 'late')")
        database.execute(*(statement.format(slot=database.name) for statement in done))

    if when == "copied":
        failpoints.arm("capture.slot_copy.before=delay:0", lambda *_: meddle())
    database.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
    policy = DrainPolicy(above_bytes=100_000, slots=1)
    capture = capture_of(database.dsn, database.name, policy)
    try:
        discovery = await capture.discover({})
        await capture.prepare(discovery.tables)
        await (await capture.snapshot(discovery.tables)).close()
        for low in range(0, 4000, 1000):
            insert_rows(database, low)
        if when == "before":
            meddle()
        with pytest.raises(TransientError) as raised:
            await drain_all(capture, meddle if when == "drained" else None)
        assert raised.value.reason == reason
    finally:
        failpoints.arm("", lambda *_: None)
        await capture.close()


async def test_i1_the_slot_position_is_read_before_any_status_is_sent(database: Database) -> None:
    """16.2, for example, moves such a slot back: then the gap can't be detected any more."""
    name = database.name
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        f"CREATE PUBLICATION {name} FOR TABLE t",
        f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')",
    )
    told: list[Any] = []

    async def slot_position() -> Lsn:
        await asyncio.sleep(0.2)
        told.append(database.value(REPLY_TIME, name))
        return confirmed(database)

    async def server_position(_: str) -> Lsn:
        return Lsn.parse(database.value("SELECT pg_current_wal_flush_lsn()::text"))

    changes = ChangeStream(
        "shop",
        WalSettings(
            kind="wal",
            dsn=SecretStr(database.dsn),
            tables=["public.t"],
            slot=name,
            publication=name,
        ),
        Relations(cast("Any", pytest.fail), lambda _: True, lambda *_: False),
        slot_position=slot_position,
        server_position=server_position,
        memory_bytes=8 << 20,
        drain_policy=DrainPolicy(above_bytes=1 << 30),
        spool=SpoolPolicy(1 << 30),
        decode_gap=SlotDecodeGap(),
    )
    async with await connect(database.dsn) as connection:
        server = await inspect_server(connection, database.dsn)
    try:
        async with (
            asyncio.timeout(LIMIT_S),
            contextlib.aclosing(changes.changes(confirmed(database), server)) as chunks,
        ):
            await anext(chunks)
    finally:
        await changes.close()
    assert told == [None]


async def test_each_connection_to_the_slot_checks_the_server(database: Database) -> None:
    """As the first one did, which read the slot's position: it may be another server by now."""
    name, queried_id = database.name, await query_server_id(database.dsn)
    database.execute(
        f"CREATE PUBLICATION {name}",
        f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')",
    )
    another, position = f"{queried_id}1", confirmed(database)
    advance = SlotAdvance(database.dsn, name, "shop", step_bytes=1)
    advance.start_at(Lsn(position - 1))
    advance.queried_id = another

    async def move() -> None:
        await advance.advance_to(position)
        await advance.settle()

    limits, where = StreamLimits(1 << 20), "source shop, stream"
    async with await connect(database.dsn) as connection:
        await refuse_other(connection, queried_id)
        for attempt in (
            refuse_other(connection, another),
            DrainSlot.open(database.dsn, name, name, queried_id=another),
            open_stream(
                database.dsn,
                name,
                name,
                position,
                position,
                queried_id=another,
                where=where,
                limits=limits,
            ),
            move(),
        ):
            with pytest.raises(TransientError) as raised:
                await attempt
            assert raised.value.reason == "other_server"
    assert confirmed(database) == position


async def drain_all(capture: WalCapture, meddle: Callable[[], None] | None) -> None:
    async with contextlib.aclosing(capture.changes(None)) as chunks, asyncio.timeout(LIMIT_S):
        await anext(chunks)
        if meddle is not None:
            await asyncio.to_thread(meddle)
        async for _ in chunks:
            pass


def insert_rows(database: Database, low: int, count: int = 1000) -> None:
    rows = f"generate_series({low + 1}, {low + count}) n"
    database.execute(f"INSERT INTO t SELECT n, repeat('x', 300) FROM {rows}")


async def look_often(capture: WalCapture) -> None:
    while True:
        await capture.lag()
        await asyncio.sleep(0.01)
