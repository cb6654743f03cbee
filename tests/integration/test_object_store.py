"""A lake in an S3 store: exactly once as on a disk, for a small, constant number of requests."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from deltalake import Schema as DeltaSchema

from ingestd.lake.delta.checkpoint_schedule import CHECKPOINT_INTERVAL, turn_of
from ingestd.lake.delta.log_files import MOST_COMMIT_BYTES, ensure_readable_log, open_table
from ingestd.lake.delta.read import read_files, read_raw
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.fencing import WriterIdentity
from ingestd.lake.lake_id import (
    note_source,
    read_lake_id,
    removed,
    require_lake_id,
    write_lake_id,
)
from ingestd.lake.layout import Layout
from ingestd.lake.maintenance.compaction import MaintenancePolicy, TableMaintenance
from ingestd.lake.store.errors import storage_fault
from ingestd.lake.store.local_store import ID_FILE
from ingestd.lake.store.paths import OddFileError
from ingestd.lake.store.store import Store, open_store
from ingestd.model.errors import IngestdError, LakeLostError, OperatorError, TransientError
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from ingestd.testing.oracle.comparison import await_caught_up
from tests.harness.compare import assert_change_log_is_sound, assert_lake_equals_source
from tests.harness.compare import epochs as epochs_of
from tests.harness.config import wal_config
from tests.harness.object_store import ObjectStoreServer
from tests.harness.waiting import await_until
from tests.harness.workload import Workload
from tests.unit.lake.rows import inserts, make_table, summary

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from ingestd.model.changes import CommittedEpoch
    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

KILLS = 3
LIMIT_S = 30.0
TABLE = make_table("orders")
IDS = (1, 2, 3)
VISITS = TableId("public", "visits")
MANY = 150_000
"""Rows whose file is sent in parts."""
REQUESTS_OF_A_COMMIT = {"obstore": 2, "deltalake": 12}
REQUESTS_OF_A_READ = {"obstore": 1, "deltalake": 2}


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectStoreServer]:
    with ObjectStoreServer() as server:
        yield server


@pytest.fixture
def store(running: ObjectStoreServer, way: str) -> ObjectStoreServer:
    running.begin_anew(by_deltalake=way == "deltalake")
    return running


@asynccontextmanager
async def opened(
    uri: str, options: dict[str, str] | None = None, store: Store | None = None
) -> AsyncIterator[DeltaLake]:
    lake = DeltaLake(uri, "shop", storage_options=options, store=store)
    await lake.open()
    await lake.adopt("7000000000000000001")
    try:
        yield lake
    finally:
        await lake.close()


async def commit(lake: DeltaLake, epoch: int) -> None:
    writer = lake.begin_epoch()
    await writer.append_batch(inserts(TABLE, epoch * 100, *IDS))
    await writer.commit(summary(epoch * 100, epoch * 100 + 50))


@pytest.mark.thorough
async def test_an_epoch_costs_the_same_few_requests_at_any_length(
    store: ObjectStoreServer, way: str, tmp_path: Path
) -> None:
    # Checkpoints in a store are due after versions 15, 35, ... 95 and 16, 36, ... 96.
    turns = [turn_of(f"shop/{name}") % CHECKPOINT_INTERVAL for name in ("_epochs", "public/orders")]
    assert turns == [5, 4]

    async def requests_of(lake: DeltaLake, epoch: int) -> Counter[str]:
        store.requests()
        await commit(lake, epoch)
        return store.requests()

    async with opened(store.uri, store.options) as lake:
        found = {epoch: await requests_of(lake, epoch) for epoch in range(1, 6)}
    async with opened(str(tmp_path / "lake")) as lake:
        for epoch in range(1, 93):
            await commit(lake, epoch)
    store.begin_anew(by_deltalake=way == "deltalake")
    store.upload(tmp_path / "lake")
    async with opened(store.uri, store.options) as lake:
        # past the checkpoints of both tables, which cost more and are written alongside the commits
        for epoch in range(93, 102):
            await commit(lake, epoch)
    async with opened(store.uri, store.options) as lake:
        found |= {epoch: await requests_of(lake, epoch) for epoch in range(102, 106)}

    assert found[105] == found[5]
    # of the raw table and of `_epochs`, and what shows that this is the lake it was
    assert found[5].total() == 2 * REQUESTS_OF_A_COMMIT[way] + REQUESTS_OF_A_READ[way]


@pytest.mark.thorough
def test_a_marker_in_a_store_is_written_once_and_checked(
    store: ObjectStoreServer,
) -> None:
    files = open_store(store.uri, store.options)
    assert read_lake_id(files) is None
    with pytest.raises(LakeLostError, match="is missing"):
        require_lake_id(files)
    lake = write_lake_id(files)
    assert [write_lake_id(files), read_lake_id(files)] == [lake, lake]
    assert removed(files, "shop", lake) is None
    note_source(files, "shop")
    note_source(files, "shop")
    assert "_ingestd.shop.json says" in (removed(files, "shop", lake) or "")
    with pytest.raises(LakeLostError, match="it is another lake"):
        require_lake_id(files, str(uuid4()))
    for content, told in {
        b"": "it is empty",
        b"\0" * 40: "it is not JSON",
        b'{"format": 2, "lake": "x"}': "a newer version",
        b" " * (1 << 17): "131072 bytes",
    }.items():
        with files.create(ID_FILE) as file:
            file.write(content)
        for use in (read_lake_id, write_lake_id, require_lake_id):
            with pytest.raises(OperatorError, match=told):
                use(files)
        with files.open(ID_FILE) as opened_file:
            assert opened_file.read() == content


@pytest.mark.thorough
async def test_no_epoch_follows_one_that_is_not_there_any_more(store: ObjectStoreServer) -> None:
    """I13: a bucket that was put back as it was at another time has the same id."""
    async with opened(store.uri, store.options) as lake:
        await lake.write_lake_id()
        await commit(lake, 1)
        await commit(lake, 2)
        files = open_store(store.uri, store.options)
        newest = max(n for n in files.files(f"{lake.layout.epochs}/_delta_log") if "json" in n)
        files.remove(f"{lake.layout.epochs}/_delta_log/{newest}")
        with pytest.raises(LakeLostError, match="a copy took its place"):
            await lake.ensure_exists()
        with pytest.raises(LakeLostError, match="a copy took its place"):
            await lake.advance(Lsn(10_000))
        with pytest.raises(LakeLostError, match="a copy took its place"):
            await commit(lake, 3)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "path", ["public/orders/_delta_log/", "_epochs/_delta_log/", "public/orders/part-"]
)
async def test_exactly_once_with_lost_answers_and_a_busy_store(
    store: ObjectStoreServer, tmp_path: Path, path: str
) -> None:
    async with opened(store.uri, store.options) as lake:
        await commit(lake, 1)
        store.lose_answer("PUT", path)
        await commit(lake, 2)
        store.refuse("PUT", path, times=2)
        await commit(lake, 3)
        await commit(lake, 4)

    assert store.faults_left() == []
    local = str(store.download(tmp_path / "lake"))
    rows = read_raw(local, "shop", TABLE.id).select(["_cdc_epoch", "id"]).to_pylist()
    expected = [(epoch, i) for epoch in range(1, 5) for i in IDS]
    assert sorted((row["_cdc_epoch"], row["id"]) for row in rows) == expected
    assert [row["epoch"] for row in epochs_of(local)] == [1, 2, 3, 4]


@pytest.mark.thorough
@pytest.mark.parametrize("is_conflict", [False, True])
@pytest.mark.parametrize("comes", ["before the fence", "after it"])
@pytest.mark.parametrize("path", ["public/orders/_delta_log/", "_epochs/_delta_log/"])
async def test_exactly_once_a_store_commits_after_the_sender_gave_up(
    store: ObjectStoreServer, tmp_path: Path, path: str, comes: str, *, is_conflict: bool
) -> None:
    """I2, I3: it counts or is refused; never in addition to the one that replaced it."""
    options = {**store.options, "max_retries": "0"}
    lake = DeltaLake(store.uri, "shop", storage_options=options, writer=WriterIdentity("slot 'a'"))
    await lake.open()
    await lake.fence()
    await lake.adopt("7000000000000000001")
    await commit(lake, 1)
    store.hold(path, is_conflict=is_conflict)
    with pytest.raises(IngestdError):  # deltalake can't tell a 409 from an existing commit
        await commit(lake, 2)
    assert store.faults_left() == []

    found = await lake.open()
    if comes == "before the fence":
        assert store.do_late() == [200]
        with pytest.raises(TransientError, match="appeared after all"):
            await lake.fence()
        found = await lake.open()
    await lake.fence()
    if comes == "after it":
        assert store.do_late() == [412]
    # The transactions after `found`: those of epoch 2 again, and one more.
    is_there = (found.position or 0) >= 250
    writer = lake.begin_epoch()
    if not is_there:
        await writer.append_batch(inserts(TABLE, 200, *IDS))
    await writer.append_batch(inserts(TABLE, 300, *IDS))
    await writer.commit(summary(200 if not is_there else 300, 350))
    await lake.close()

    local = str(store.download(tmp_path / "lake"))
    rows = read_raw(local, "shop", TABLE.id).select(["_cdc_lsn", "id"]).to_pylist()
    expected = [(lsn, i) for lsn in (100, 200, 300) for i in IDS]
    assert sorted((row["_cdc_lsn"], row["id"]) for row in rows) == expected
    assert sum(t["rows"] for e in epochs_of(local) for t in e["tables"]) == len(expected)


@pytest.mark.parametrize("pieces", [[100], [1 << 20, 1], [3_000_001] * 5, [6 << 20, 7, 11 << 20]])
def test_written_bytes_do_not_depend_on_the_callers_buffers(
    store: ObjectStoreServer, pieces: list[int]
) -> None:
    rng = random.Random(20261125)
    written = [rng.randbytes(size) for size in pieces]
    files = open_store(store.uri, store.options)

    with files.create("a/b/part.parquet") as file:
        for piece in written:
            buffer = bytearray(piece)
            file.write(buffer)
            buffer[:] = bytes(len(buffer))  # as Parquet writers do with theirs

    with files.open("a/b/part.parquet") as file:
        assert bytes(file.read()) == b"".join(written)


def test_a_file_is_complete_where_the_last_answer_is_lost(
    running: ObjectStoreServer,
) -> None:
    """S3 does not know a completed upload any more when the request is repeated."""
    running.begin_anew()
    content = random.Random(1).randbytes(12 << 20)
    files = open_store(running.uri, running.options)
    file = files.create("a/b/part.parquet")
    file.write(content)
    running.lose_answer("POST", "part.parquet")
    file.close()
    assert running.faults_left() == []
    with files.open("a/b/part.parquet") as found:
        assert bytes(found.read()) == content


def test_a_file_whose_upload_was_dropped_is_retried(running: ObjectStoreServer) -> None:
    running.begin_anew()
    files = open_store(running.uri, running.options)
    file = files.create("a/b/part.parquet")
    file.write(bytes(12 << 20))
    running.forget_upload("part.parquet")
    with pytest.raises(OSError, match="NoSuchUpload") as lost:
        file.close()
    assert isinstance(storage_fault(lost.value, files.uri("a")), TransientError)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_files_sent_in_parts_hold_their_rows(
    database: Database, make_daemon: MakeDaemon, store: ObjectStoreServer
) -> None:
    """I7, by a snapshot and by one transaction."""
    slot = f"ingestd_shop_{database.name}"
    name = f'slot = "{slot}"\npublication = "{slot}"'
    database.execute(
        "CREATE TABLE big (id int PRIMARY KEY, note text)",
        "INSERT INTO big SELECT i, sha512(i::text::bytea)::text"
        f" FROM generate_series(1, {MANY}) AS i",
    )
    daemon = make_daemon(
        wal_config(lake=store.uri, dsn=database.dsn, source_extra=name, extra=store.config)
    )
    daemon.start_ready(60)
    before = database.rows("SELECT id, note FROM big")
    database.execute("UPDATE big SET note = sha512(note::bytea)::text")
    with database.connect() as connection:
        await_caught_up(connection, slot)
    assert daemon.sigterm() == 0

    rows = read_raw(store.uri, "shop", TableId("public", "big"), storage_options=store.options)
    after = database.rows("SELECT id, note FROM big")
    for op, expected in (("r", before), ("u", after)):
        of_op = rows.filter(pc.equal(rows["_cdc_op"], op))
        found = zip(of_op["id"].to_pylist(), of_op["note"].to_pylist(), strict=True)
        assert sorted(found) == sorted(expected)
    assert store.requests()["POST"] >= 2 * 2  # of either file, its begin and its end


class MeetingStore:
    """A store in which, once it `waits`, the calls of `count` raw tables wait for each other."""

    def __init__(self, store: Store, count: int) -> None:
        self.waits = False
        self.met: list[str] = []
        self._store = store
        self._all_are_there = threading.Barrier(count, timeout=LIMIT_S)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in {"create", "put_if_absent"}:
            return found

        def together(path: str, *arguments: object) -> object:
            if self.waits and "/public/" in path:
                self._all_are_there.wait()
                self.met.append(name)
            return found(path, *arguments)

        return together


async def test_many_tables_wait_for_the_store_at_the_same_time(
    running: ObjectStoreServer,
) -> None:
    """So with 24 tables, and slow answers, an epoch takes no longer than with one."""
    running.begin_anew()
    tables = [make_table(f"t{number}") for number in range(24)]
    store = MeetingStore(open_store(running.uri, running.options), len(tables))

    async def commit_all(lake: DeltaLake, lsn: int) -> CommittedEpoch:
        writer = lake.begin_epoch()
        for table in tables:
            await writer.append_batch(inserts(table, lsn, *IDS))
        return await writer.commit(summary(lsn, lsn + 50))

    async with opened(running.uri, running.options, cast("Store", store)) as lake:
        await commit_all(lake, 100)  # it makes the tables
        store.waits = True
        assert len((await commit_all(lake, 200)).tables) == len(tables)
    assert sorted(store.met) == ["create"] * len(tables) + ["put_if_absent"] * len(tables)


@pytest.mark.thorough
async def test_files_are_joined_in_a_store_while_the_daemon_appends(
    store: ObjectStoreServer, tmp_path: Path
) -> None:
    epochs = 12
    async with opened(store.uri, store.options) as lake:
        for epoch in range(1, epochs):
            await commit(lake, epoch)
        loop = asyncio.get_running_loop()

        def beside(step: str) -> None:
            if step == "commit":  # which so finds another commit in its place, and tries again
                asyncio.run_coroutine_threadsafe(commit(lake, epochs), loop).result(60)
                store.lose_answer("PUT", "public/orders/_delta_log/")

        maintenance = TableMaintenance(
            open_store(store.uri, store.options),
            "shop/public/orders",
            MaintenancePolicy(target_bytes=128_000_000, retention_s=7 * 86400),
            now_s=time.time(),
            began_s=0,
            step=beside,
        )
        done = await asyncio.to_thread(maintenance.run)
        await commit(lake, epochs + 1)

    assert (done.joined_files, done.written_files, done.gave_way) == (epochs - 1, 1, 0)
    assert store.faults_left() == []
    local = str(store.download(tmp_path / "lake"))
    rows = read_raw(local, "shop", TABLE.id).select(["_cdc_epoch", "id"]).to_pylist()
    expected = [(epoch, i) for epoch in range(1, epochs + 2) for i in IDS]
    assert sorted((row["_cdc_epoch"], row["id"]) for row in rows) == expected


@pytest.mark.thorough
@pytest.mark.parametrize(
    "way", ["obstore", pytest.param("deltalake", marks=pytest.mark.thorough)], indirect=True
)
@pytest.mark.timeout(600)
def test_exactly_once_in_a_store_through_sigkills(
    workload_database: Database, make_daemon: MakeDaemon, store: ObjectStoreServer, tmp_path: Path
) -> None:
    """I1, I2, I3, I4, I6, where a put is durable and a commit is a conditional one."""
    rng = random.Random(20261122)
    slot = f"ingestd_shop_{workload_database.name}"
    daemon = make_daemon(
        wal_config(
            lake=store.uri,
            dsn=workload_database.dsn,
            max_delay="100ms",
            source_extra=f'slot = "{slot}"\npublication = "{slot}"',
            extra='[sources.shop.table."public.visits"]\nreference = "snapshot_plus_cdc"\n'
            + store.config,
        )
    )
    workload = Workload(
        workload_database.dsn, seed=1, transactions=1_000_000, limit_s=200, pause_s=0.02
    )
    with workload:
        for number in range(KILLS):
            before = len(daemon.events("epoch.committed"))
            daemon.start()
            _await_epoch_after(before, daemon)
            if number == 1:
                store.lose_answer("PUT", "_delta_log/")
            _run_for(rng.uniform(0.0, 1.0))
            daemon.sigkill()
        daemon.start_ready(60)
        workload.stop()
        with workload_database.connect() as connection:
            await_caught_up(connection, slot)
        visits = workload_database.rows("SELECT id, seen::text FROM visits ORDER BY id")
        await_until(lambda: visits_in(store) == visits, 60, daemon.tail)
        local = store.download(tmp_path / "local")
        assert_lake_equals_source(workload_database, local, slot=slot)
    assert_change_log_is_sound(workload_database, local)
    assert store.faults_left() == []
    assert workload.committed > 100
    assert daemon.sigterm() == 0


def visits_in(store: ObjectStoreServer) -> list[tuple[int, str | None]]:
    """The reference table's rows, where they are."""
    files = open_store(store.uri, store.options)
    folder = Layout("shop").reference(VISITS)
    handle = DeltaTable(files.uri(folder), storage_options=store.options)
    rows = read_files(handle, files, folder, columns=["id", "seen"]).to_pylist()
    return sorted((row["id"], row["seen"]) for row in rows)


def _await_epoch_after(before: int, daemon: Daemon) -> None:
    await_until(lambda: len(daemon.events("epoch.committed")) > before, 60, daemon.tail)


def _run_for(seconds: float) -> None:
    """Let the daemon run until a random instant."""
    end = time.monotonic() + seconds
    await_until(lambda: time.monotonic() >= end, seconds + 5, poll_s=0.01)


HUGE = b'{"commitInfo":{"x":"' + b"a" * MOST_COMMIT_BYTES + b'"}}\n'
LINE = b'{"commitInfo":{}}\n'
POINTERS: dict[str, bytes | None] = {
    "none": None,
    "no checkpoint there": b'{"version":1000}',
    "not JSON": b"{",
    "not a version": b'{"version":"7","version":1000,"size":1}',
    "too many values": b"[" + b"[]," * 300_000 + b"1]",
}


@pytest.mark.attack("lake writer")
@pytest.mark.parametrize("pointer", POINTERS)
def test_a_commit_in_a_store_is_refused_by_its_size(store: ObjectStoreServer, pointer: str) -> None:
    files = open_store(store.uri, store.options)
    log = "shop/public/t/_delta_log"
    schema = DeltaSchema.from_arrow(pa.schema([("a", pa.int64())]))
    DeltaTable.create(files.uri("shop/public/t"), schema, storage_options=files.storage_options)
    put(files, f"{log}/{1:020}.json", LINE)
    if (content := POINTERS[pointer]) is not None:
        put(files, f"{log}/_last_checkpoint", content)
    ensure_readable_log(files, "shop/public/t")
    put(files, f"{log}/{2:020}.json", HUGE)
    with pytest.raises(OddFileError, match="more than 33554432"):
        open_table(files, "shop/public/t")
    with pytest.raises(OddFileError, match="more than 33554432"):
        ensure_readable_log(files, "shop/public/t", above=1)
    ensure_readable_log(files, "shop/public/t", above=2)


@pytest.mark.thorough
def test_a_log_in_a_store_is_checked_from_its_checkpoint(store: ObjectStoreServer) -> None:
    files = open_store(store.uri, store.options)
    schema = DeltaSchema.from_arrow(pa.schema([("a", pa.int64())]))
    DeltaTable.create(files.uri("t"), schema, storage_options=files.storage_options)
    put(files, f"t/_delta_log/{1:020}.json", LINE)
    open_table(files, "t").create_checkpoint()
    put(files, f"t/_delta_log/{0:020}.json", HUGE)  # deltalake no longer reads it
    store.requests()
    ensure_readable_log(files, "t")
    assert store.requests().total() <= 7
    put(files, f"t/_delta_log/{2:020}.json", HUGE)
    with pytest.raises(OddFileError):
        ensure_readable_log(files, "t")


def put(files: Store, path: str, content: bytes) -> None:
    with files.create(path) as file:
        file.write(content)
