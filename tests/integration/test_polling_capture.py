"""A polling capture over a lake in memory: where it resumes, and what counts as a change."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from ingestd.model.changes import marker_batch
from ingestd.model.lake_state import LakeState, RegisteredTable, TableState
from ingestd.model.lsn import ZERO, Lsn
from ingestd.model.schema import TableId
from ingestd.ports import Resumed, SnapshotPage
from ingestd.postgres.polling.capture import PollingCapture
from ingestd.postgres.polling.keys.delete_sweep import SweepPolicy
from ingestd.postgres.polling.keys.lake_keys import KeyPartition
from ingestd.postgres.polling.progress import PollProgress
from ingestd.postgres.settings import PollingSettings

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from ingestd.model.changes import TableBatch
    from ingestd.model.schema import Table
    from tests.harness.databases import Database

LIMIT_S = 20.0
T = TableId("public", "t")


@dataclass
class MemoryLake:
    """The delivered changes of table t, and where its capture resumes."""

    batches: list[pa.RecordBatch] = field(default_factory=list)
    resume: str = ""
    position: Lsn = ZERO

    def append(self, batch: TableBatch) -> None:
        self.batches.append(batch.rows)
        self.resume = batch.resume or self.resume

    async def changes(
        self, table: TableId, columns: Sequence[str]
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        assert table == T
        for number, rows in enumerate(list(self.batches), start=1):
            whole = rows.append_column("_cdc_epoch", pa.repeat(pa.scalar(number), rows.num_rows))
            yield whole.select(columns)

    def committed(self, table: Table, server_id: str) -> LakeState:
        known = RegisteredTable(
            T, table.oid, 1, TableState.LIVE, None, self.position, resume=self.resume
        )
        return LakeState(len(self.batches), self.position, {}, {T: known}, server_id)


@dataclass
class NotifyingLake(MemoryLake):
    """Calls `reading` with the columns before each read of its changes."""

    reading: Callable[[Sequence[str]], Awaitable[None]] | None = None

    async def changes(
        self, table: TableId, columns: Sequence[str]
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        if self.reading is not None:
            await self.reading(columns)
        async for rows in super().changes(table, columns):
            yield rows


class Source:
    """A capture of table t, and what it gives."""

    def __init__(self, database: Database, lake: MemoryLake, **changes: Any) -> None:
        memory_bytes = changes.pop("memory_bytes", 1 << 24)
        sweeps = changes.pop("sweeps", SweepPolicy())
        settings = PollingSettings.model_validate(
            {
                "kind": "polling",
                "dsn": database.dsn,
                "tables": ["public.t"],
                "interval": "20ms",
                **changes,
            }
        )
        self.lake = lake
        self.capture = PollingCapture(
            "shop", settings, memory_bytes=memory_bytes, log=lake, sweeps=sweeps
        )
        self.table: Table | None = None
        self.server_id = ""
        self._live: AsyncGenerator[Any, None] | None = None

    async def start(self) -> Source:
        """Resume where the lake is, or read the table first."""
        await self.capture.claim()
        found = await self.capture.discover({})
        [self.table] = found.tables
        self.server_id = found.server_id
        lake = self.lake.committed(self.table, self.server_id) if self.lake.resume else LakeState()
        verdict = await self.capture.continuity(lake)
        assert isinstance(verdict, Resumed) == bool(self.lake.resume)
        await self.capture.prepare([self.table])
        self._live = self.capture.changes(self.lake.position or None)
        await anext(self._live)
        if not self.lake.resume:
            await self.read()
        return self

    async def read(self) -> None:
        """Read the table, make it durable."""
        assert self.table is not None
        snapshot = await self.capture.snapshot([self.table])
        self.lake.append(marker_batch(self.table, snapshot.point, snapshot.at))
        async for item in snapshot.items():
            if isinstance(item, SnapshotPage):
                self.lake.append(item.batch)
        await snapshot.close()
        await self.durable(snapshot.point)

    async def durable(self, above: Lsn) -> None:
        """Take chunks until one lies above, and confirm it."""
        assert self._live is not None
        async with asyncio.timeout(LIMIT_S):
            async for chunk in self._live:
                for batch in chunk.batches:
                    self.lake.append(batch)
                if not chunk.ends_in_transaction and chunk.position > above:
                    self.lake.position = chunk.position
                    await self.capture.confirm(chunk.position)
                    return

    async def changes(self, count: int, *, keep: bool = True) -> list[tuple[str, int]]:
        """Take so many changes or more, in complete polls: (op, id), in order."""
        assert self._live is not None
        batches: list[TableBatch] = []
        async with asyncio.timeout(LIMIT_S):
            async for chunk in self._live:
                batches += chunk.batches
                if not chunk.ends_in_transaction and sum(b.rows.num_rows for b in batches) >= count:
                    break
        if keep:
            for batch in batches:
                self.lake.append(batch)
            self.lake.position = chunk.position
            await self.capture.confirm(chunk.position)
        return [
            (row["_cdc_op"], row[batch.table.key[0]])
            for batch in batches
            for row in batch.rows.to_pylist()
        ]

    async def look(self) -> None:
        """Rediscover the table; it is not read."""
        [self.table] = (await self.capture.discover({})).tables
        await self.capture.prepare([self.table])

    async def quiet(self, database: Database) -> None:
        """Assert that nothing more comes, although a poll covers all earlier commits."""
        database.execute("INSERT INTO t VALUES (-1) ON CONFLICT (id) DO UPDATE SET at = now()")
        assert [key for _, key in await self.changes(1)] == [-1]

    async def close(self) -> None:
        if self._live is not None:
            await self._live.aclose()
        await self.capture.close()


def part_of(lake: MemoryLake) -> KeyPartition:
    """What the lake says the sweep is at."""
    progress = PollProgress.parse(lake.resume)
    assert progress is not None
    return progress.key_partition


@pytest.fixture
def source(database: Database) -> Database:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text, at timestamptz DEFAULT now())",
        "CREATE INDEX ON t (at)",
        "INSERT INTO t SELECT i FROM generate_series(1, 20) i",
    )
    return database


@pytest.fixture(params=["cursor", "xmin alone"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"table": {"public.t": {"cursor": "at"}}} if request.param == "cursor" else {}


async def test_a_later_capture_resumes_where_the_lake_is(
    source: Database, options: dict[str, Any]
) -> None:
    """Delivered changes that were not made durable come again; durable ones do not."""
    lake = MemoryLake()
    first = await Source(source, lake, **options).start()
    source.execute("INSERT INTO t VALUES (100)", "UPDATE t SET at = 'epoch' WHERE id = 5")
    assert sorted(await first.changes(2)) == [("c", 100), ("u", 5)]
    source.execute("INSERT INTO t VALUES (101)")
    assert await first.changes(1, keep=False) == [("c", 101)]
    await first.close()
    source.execute("UPDATE t SET at = NULL WHERE id = 6", "UPDATE t SET at = now() WHERE id = 101")
    for _ in range(2):
        later = await Source(source, lake, **options).start()
        assert sorted(await later.changes(2, keep=False)) == [("c", 101), ("u", 6)]
        await later.close()
    last = await Source(source, lake, **options).start()
    assert sorted(await last.changes(2)) == [("c", 101), ("u", 6)]
    await last.quiet(source)
    await last.close()


async def test_a_row_is_a_c_when_the_lake_lacks_its_key(
    source: Database, options: dict[str, Any]
) -> None:
    swept = {"public.t": {**options.get("table", {}).get("public.t", {}), "detect_deletes": "50ms"}}
    capture = await Source(source, MemoryLake(), table=swept).start()
    source.execute("UPDATE t SET note = 'x', at = now() WHERE id = 1")
    assert await capture.changes(1) == [("u", 1)]
    source.execute("DELETE FROM t WHERE id = 2")
    assert await capture.changes(1) == [("d", 2)]
    source.execute("INSERT INTO t VALUES (2)")
    assert await capture.changes(1) == [("c", 2)]
    source.execute("UPDATE t SET id = 50, at = now() WHERE id = 3")
    assert sorted(await capture.changes(2)) == [("c", 50), ("d", 3)]
    with source.connect() as connection, connection.transaction():
        connection.execute("DELETE FROM t WHERE id = 4")
        connection.execute("INSERT INTO t VALUES (4)")
    assert await capture.changes(1) == [("u", 4)]
    await capture.quiet(source)
    await capture.close()


async def test_every_row_is_a_u_where_keys_take_too_much_memory(
    source: Database, options: dict[str, Any]
) -> None:
    swept = {"public.t": {**options.get("table", {}).get("public.t", {}), "detect_deletes": "50ms"}}
    capture = await Source(source, MemoryLake(), table=swept, memory_bytes=64).start()
    source.execute("INSERT INTO t VALUES (100)", "UPDATE t SET at = now() WHERE id = 5")
    assert {key for op, key in await capture.changes(2) if op == "u"} == {5, 100}
    source.execute("DELETE FROM t WHERE id IN (7, 100)")
    gone = await capture.changes(1)
    if len(gone) == 1:  # that sweep had read the lake's keys before 100 was among them
        gone += await capture.changes(1)
    assert sorted(gone) == [("d", 7), ("d", 100)]
    await capture.close()


@pytest.mark.thorough
async def test_a_sweep_of_many_passes_continues_after_a_restart(
    source: Database, options: dict[str, Any]
) -> None:
    swept = {"public.t": {**options.get("table", {}).get("public.t", {}), "detect_deletes": "50ms"}}
    more: dict[str, Any] = {"memory_bytes": 1024, "sweeps": SweepPolicy(least_key_bytes=1)}
    lake = NotifyingLake()
    source.execute("INSERT INTO t SELECT i FROM generate_series(21, 200) i")
    capture = await Source(source, lake, table=swept, **more).start()
    source.execute("DELETE FROM t")
    gone = await capture.changes(1)
    while (at := part_of(lake)).number == 0:
        gone += await capture.changes(1)
    await capture.close()
    again = Source(source, lake, table=swept, **more)
    parts: list[KeyPartition] = []

    async def note(_: Sequence[str]) -> None:
        parts.append(again.capture.polls.states[T].key_partition)

    lake.reading = note
    await again.start()
    while len(gone) < 200:
        gone += await again.changes(1)
    assert sorted(gone) == [("d", key) for key in range(1, 201)]
    assert parts[0] == at
    assert len(parts) > 1
    assert all(part.number / part.count >= at.number / at.count for part in parts)
    await again.close()


async def test_what_a_poll_could_not_look_at_is_swept_again_soon(
    source: Database, options: dict[str, Any]
) -> None:
    """Not an hour later."""
    swept = {"public.t": {**options.get("table", {}).get("public.t", {}), "detect_deletes": "1h"}}
    lake = NotifyingLake()
    await (await Source(source, lake, table=swept).start()).close()
    progress = PollProgress.parse(lake.resume)
    assert progress is not None
    lake.resume = replace(progress, swept_at=progress.swept_at - 7200).to_text()
    source.execute("DELETE FROM t WHERE id = 7")
    capture = Source(
        source, lake, table=swept, lock_timeout="50ms", sweeps=SweepPolicy(restart_s=0.1)
    )
    sweeps = 0
    with source.connect(autocommit=False) as holder:

        async def lock_once(columns: Sequence[str]) -> None:
            """Lock the table once a sweep has read it: the poll can't look at what it found."""
            nonlocal sweeps
            if "_cdc_op" not in columns:
                sweeps += 1
                if sweeps == 1:
                    await asyncio.to_thread(holder.execute, "LOCK TABLE t IN ACCESS EXCLUSIVE MODE")

        async def release() -> None:
            while not (sweeps and capture.capture.polls.states[T].unlooked):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            holder.rollback()

        lake.reading = lock_once
        await capture.start()
        releasing = asyncio.create_task(release())
        assert await capture.changes(1) == [("d", 7)]
        await releasing
    assert sweeps == 2
    await capture.close()


async def test_a_renamed_key_is_known_until_the_table_is_resnapshotted(
    source: Database, options: dict[str, Any]
) -> None:
    capture = await Source(source, MemoryLake(), **options).start()
    source.execute("UPDATE t SET at = now() WHERE id = 1")
    assert await capture.changes(1) == [("u", 1)]
    source.execute("ALTER TABLE t RENAME id TO number")
    await capture.look()
    source.execute("UPDATE t SET at = now() WHERE number = 2", "INSERT INTO t VALUES (100)")
    assert sorted(await capture.changes(2)) == [("c", 100), ("u", 2)]
    await capture.close()


async def test_the_lag_of_a_table_just_dropped_is_reported(
    source: Database, options: dict[str, Any]
) -> None:
    """The discovery is what finds the drop."""
    capture = await Source(source, MemoryLake(), **options).start()
    source.execute("DROP TABLE t")
    lag = await capture.capture.lag()
    assert lag.seconds is not None
    assert lag.seconds > 0
    await capture.close()


async def test_a_sweep_result_may_be_cleared_while_a_poll_reads_it(
    source: Database, options: dict[str, Any]
) -> None:
    swept = {"public.t": {**options.get("table", {}).get("public.t", {}), "detect_deletes": "50ms"}}
    lake = NotifyingLake()
    # Polls are so rare that one which finds deleted rows does nothing else.
    capture = await Source(source, lake, table=swept, interval="3s").start()
    with source.connect(autocommit=False) as holder:

        async def lock(columns: Sequence[str]) -> None:
            if "_cdc_op" not in columns and not clearing.done():
                await asyncio.to_thread(holder.execute, "LOCK TABLE t IN ACCESS EXCLUSIVE MODE")

        async def clear() -> None:
            waiting = (
                "SELECT count(*) > 0 FROM pg_locks WHERE relation = 't'::regclass AND NOT granted"
            )
            state = capture.capture.polls.states[T]
            while not (state.missing and await asyncio.to_thread(source.value, waiting)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await capture.capture.prepare([])
            holder.rollback()

        clearing = asyncio.create_task(clear())
        lake.reading = lock
        source.execute("DELETE FROM t WHERE id = 7")
        assert await capture.changes(1) == [("d", 7)]
        await clearing
    await capture.close()


@pytest.mark.thorough
async def test_what_a_snapshot_sees_is_known_when_polling_continues(
    source: Database, options: dict[str, Any]
) -> None:
    capture = await Source(source, MemoryLake(), **options).start()
    source.execute("INSERT INTO t VALUES (100)")
    await capture.read()
    source.execute("INSERT INTO t VALUES (101)")
    found = await capture.changes(1)
    while ("c", 101) not in found:
        found += await capture.changes(1)
    assert set(found) <= {("u", 100), ("c", 101)}
    await capture.quiet(source)
    await capture.close()


async def test_a_row_that_counts_as_deleted_is_given_as_such(source: Database) -> None:
    source.execute("ALTER TABLE t ADD gone boolean", "UPDATE t SET gone = true WHERE id <= 3")
    table = {"public.t": {"cursor": "at", "deleted": "gone"}}
    lake = MemoryLake()
    capture = await Source(source, lake, table=table).start()
    read = [i for rows in lake.batches for i in rows.column("id").to_pylist() if i is not None]
    assert sorted(read) == list(range(4, 21))
    source.execute("UPDATE t SET gone = true, at = now() WHERE id = 4")
    assert await capture.changes(1) == [("d", 4)]
    source.execute("UPDATE t SET gone = true, at = now() WHERE id IN (3, 4)")  # were, and stay
    source.execute("UPDATE t SET gone = false, at = now() WHERE id IN (1, 5)")
    assert sorted(await capture.changes(2)) == [("c", 1), ("u", 5)]
    source.execute("INSERT INTO t VALUES (200, '', now(), true)")
    source.execute("UPDATE t SET gone = NULL, at = now() WHERE id = 4")
    assert await capture.changes(1) == [("c", 4)]
    await capture.quiet(source)
    await capture.close()
