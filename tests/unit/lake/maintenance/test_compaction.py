"""Compacting files and cleaning logs, alongside a daemon and killed at every step."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema

from ingestd.lake.delta.append_log import AppendLog
from ingestd.lake.delta.checkpoint_schedule import CHECKPOINT_EVERY
from ingestd.lake.delta.read import list_files, read_raw
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.maintenance.cleanup import LogCleaner
from ingestd.lake.maintenance.compaction import (
    MaintenancePolicy,
    MaintenanceResult,
    TableMaintenance,
)
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync
from ingestd.model.lsn import Lsn
from tests.harness.waiting import await_until
from tests.unit.lake.rows import inserts, listed_live, make_table, summary
from tests.unit.lake.stores import StoreWithoutPut, lake_by

A = make_table("a")
FOLDER = "shop/public/a"
DAY_S = 86400.0
POLICY = MaintenancePolicy(target_bytes=1 << 20, retention_s=7 * DAY_S)
STEPS = ["write", "commit", "committed", "clean"]


class KilledError(Exception):
    pass


class Way:
    """How to commit: as in local file systems, or as in object stores."""

    kind: type[LocalStore] = LocalStore


@pytest.fixture(
    params=[LocalStore, StoreWithoutPut], ids=["by put", "by handle"], autouse=True, scope="module"
)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    Way.kind = request.param
    yield
    Way.kind = LocalStore


def store_of(root: Path) -> LocalStore:
    return Way.kind(root, Fsync())


async def opened(root: Path, **options: Any) -> DeltaLake:
    lake = lake_by(Way.kind, root, **options)
    await lake.open()
    await lake.adopt("system-1")
    await lake.record([listed_live(A)])
    return lake


async def commit(lake: DeltaLake, number: int, resume: str | None = None) -> None:
    writer = lake.begin_epoch()
    batch = inserts(A, 100 * number, 2 * number, 2 * number + 1)
    await writer.append_batch(replace(batch, resume=resume))
    await writer.commit(summary(100 * number, 100 * number + 5))


async def filled(root: Path, epochs: int = 20, **options: Any) -> DeltaLake:
    lake = await opened(root, **options)
    for number in range(1, epochs + 1):
        await commit(lake, number)
    return lake


async def fill_and_close(root: Path) -> None:
    lake = await filled(root)
    await lake.close()


@pytest.fixture(scope="module")
def closed(way: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a lake that was filled and closed, for tests to copy."""
    del way  # each way has its own
    root = tmp_path_factory.mktemp("filled")
    asyncio.run(fill_and_close(root))
    return root


@pytest.fixture
def copied(closed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(closed, tmp_path, dirs_exist_ok=True)


def maintain(
    root: Path,
    folder: str = FOLDER,
    policy: MaintenancePolicy = POLICY,
    *,
    days: float = 0,
    began_s: float = 0.0,
    killed_at: str = "",
) -> MaintenanceResult:
    """Maintain a table some days from now. A killed process removes none of its files."""
    store = store_of(root)

    def step(name: str) -> None:
        if name == killed_at:
            store.remove = lambda _: None  # type: ignore[method-assign]
            raise KilledError(name)

    now_s = time.time() + days * DAY_S
    made = TableMaintenance(store, folder, policy, now_s=now_s, began_s=began_s, step=step)
    return made.run()


def ids(root: Path) -> list[int]:
    return sorted(row["id"] for row in read_raw(str(root), "shop", A.id).to_pylist())


def expected(epochs: int) -> list[int]:
    return list(range(2, 2 * epochs + 2))


def data_files(root: Path, folder: str = FOLDER) -> set[str]:
    return {p.name for p in (root / folder).glob("part-*")}


def live(root: Path, folder: str = FOLDER) -> set[str]:
    return {Path(uri).name for uri in DeltaTable(root / folder).file_uris()}


def commits(root: Path, folder: str = FOLDER) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    for path in sorted((root / folder / "_delta_log").glob("*.json")):
        yield int(path.stem), [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_compacted_files_have_the_same_rows_order_and_bounds(copied: Path) -> None:
    before = list_files(DeltaTable(copied / FOLDER))
    done = maintain(copied)
    assert (done.joined_files, done.written_files, done.small_files) == (20, 1, 1)
    [(path, statistics, _)] = list_files(DeltaTable(copied / FOLDER))
    rows = pq.read_table(copied / FOLDER / path)
    assert rows["id"].to_pylist() == expected(20)
    assert rows["_cdc_lsn"].to_pylist() == [100 * n for n in range(1, 21) for _ in range(2)]
    assert statistics["numRecords"] == 40
    names = set(before[0][1]["minValues"])
    assert {"_cdc_lsn", "_cdc_seq", "_cdc_epoch", "_cdc_ts", "id"} <= names
    for name in names:
        assert statistics["minValues"][name] == min(s["minValues"][name] for _, s, _ in before)
        assert statistics["maxValues"][name] == max(s["maxValues"][name] for _, s, _ in before)


def test_streaming_readers_pass_by_what_was_joined(copied: Path) -> None:
    version = DeltaTable(copied / FOLDER).version()
    maintain(copied)
    [actions] = [found for number, found in commits(copied) if number > version]
    moved = [a[k] for a in actions for k in ("add", "remove") if k in a]
    assert len(moved) == 21
    assert not any(a["dataChange"] for a in moved)
    assert not any("txn" in a for a in actions)


@pytest.mark.slow
async def test_one_writer_a_daemon_continues_on_compacted_tables(
    tmp_path: Path,
) -> None:
    lake = await filled(tmp_path)
    for folder in (FOLDER, "shop/_epochs", "shop/_tables"):
        maintain(tmp_path, folder, days=8)
    for number in range(21, 41):
        await commit(lake, number)
        if number % 5 == 0:
            maintain(tmp_path)
            maintain(tmp_path, "shop/_epochs")
    await lake.close()
    assert ids(tmp_path) == expected(40)
    committed = await lake_by(Way.kind, tmp_path).open()
    assert (committed.epoch, committed.position) == (40, Lsn(4005))
    assert committed.watermarks == {A.id: Lsn(4005)}


def test_appends_that_come_between_are_no_conflict(copied: Path) -> None:
    other = AppendLog(store_of(copied), FOLDER, lake_by(Way.kind, copied).layout.app_id(A.id))
    other.load()

    def step(name: str) -> None:
        if name == "commit":
            other.commit_files([], 9000)
            other.commit_files([], 9001)

    store = store_of(copied)
    made = TableMaintenance(store, FOLDER, POLICY, now_s=time.time(), began_s=0, step=step)
    done = made.run()
    assert (done.joined_files, done.gave_way) == (20, 0)
    assert ids(copied) == expected(20)
    other.load()
    assert other.app_version() == 9001


def test_files_that_another_joined_meanwhile_are_left_to_it(copied: Path) -> None:

    def step(name: str) -> None:
        if name == "commit":
            maintain(copied)

    store = store_of(copied)
    made = TableMaintenance(store, FOLDER, POLICY, now_s=time.time(), began_s=0, step=step)
    done = made.run()
    assert (done.joined_files, done.gave_way) == (0, 1)
    assert ids(copied) == expected(20)
    assert len(live(copied)) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("killed_at", STEPS)
async def test_a_kill_at_any_step_loses_nothing_and_its_files_go_later(
    tmp_path: Path, killed_at: str
) -> None:
    lake = await filled(tmp_path)
    with pytest.raises(KilledError):
        maintain(tmp_path, days=8, began_s=1e12, killed_at=killed_at)
    assert ids(tmp_path) == expected(20)
    await commit(lake, 21)
    await lake.close()
    done = maintain(tmp_path, days=16, began_s=1e12)
    assert ids(tmp_path) == expected(21)
    left = maintain(tmp_path, days=32, began_s=1e12)
    assert ids(tmp_path) == expected(21)
    if killed_at == "commit":
        assert done.cleaned.data_files + left.cleaned.data_files >= 1
    assert (await lake_by(Way.kind, tmp_path).open()).watermarks == {A.id: Lsn(2105)}


async def test_versions_can_be_read_for_as_long_as_the_retention(tmp_path: Path) -> None:
    lake = await filled(tmp_path)
    maintain(tmp_path)
    await commit(lake, 21)
    maintain(tmp_path, days=6)
    for version in range(1, DeltaTable(tmp_path / FOLDER).version() + 1):
        handle = DeltaTable(tmp_path / FOLDER, version=version)
        assert sum(pq.read_table(uri).num_rows for uri in handle.file_uris()) > 0
    done = maintain(tmp_path, days=8)
    assert done.cleaned.data_files == 0  # the commit that took them out is the last checkpoint's
    await commit(lake, 22)
    log = AppendLog(store_of(tmp_path), FOLDER, "")
    log.load()
    log.checkpoint()
    assert maintain(tmp_path, days=8).cleaned.data_files == 20
    assert data_files(tmp_path) == live(tmp_path)
    assert ids(tmp_path) == expected(22)


@pytest.mark.slow
async def test_exactly_once_watermarks_and_resumes_outlive_the_log(tmp_path: Path) -> None:
    lake = await opened(tmp_path)
    for number in range(1, 31):
        await commit(lake, number, f"resume {number}")
        if number == 25:
            DeltaTable(tmp_path / FOLDER).create_checkpoint()
    maintain(tmp_path)
    log = AppendLog(store_of(tmp_path), FOLDER, lake.layout.app_id(A.id))
    for days in (8, 16, 24):
        other = DeltaTable(tmp_path / FOLDER)
        other.alter.set_table_properties({"delta.logRetentionDuration": f"interval {days} days"})
        other.create_checkpoint()
        own = lake.raw_tables.raw_table(A.id).log
        own.set_properties({"test": str(days)})  # a commit of ours that says nothing of polling
        own.checkpoint()
        maintain(tmp_path, days=days)
        log.load()
        assert (log.app_version(), log.resume()) == (3005, "resume 30")
    assert min(number for number, _ in commits(tmp_path)) > 1
    await commit(lake, 31)
    lake = await opened(tmp_path)
    assert lake.raw_tables.raw_table(A.id).resume == "resume 30"
    assert ids(tmp_path) == expected(31)


async def test_files_written_by_a_long_run_are_no_orphans(
    tmp_path: Path,
) -> None:
    lake = await filled(tmp_path, 3, buffer_bytes=1)
    began_s = time.time() - 1
    writer = lake.begin_epoch()
    await writer.append_batch(inserts(A, 900, 1000))  # written at once: nothing may wait
    assert data_files(tmp_path) - live(tmp_path)
    assert maintain(tmp_path, days=30, began_s=began_s).cleaned.data_files == 0
    await writer.commit(summary(900, 905))
    assert 1000 in ids(tmp_path)


def test_a_table_that_another_keeps_a_record_of_is_left_alone(copied: Path) -> None:
    (copied / FOLDER / "_backfill").mkdir()
    assert maintain(copied, days=30, began_s=1e12) == MaintenanceResult()
    assert len(live(copied)) == 20


def test_rows_from_before_a_column_was_added_lack_it_still(copied: Path) -> None:
    added = Schema.from_arrow(pa.schema([("x", pa.int64())])).fields
    DeltaTable(copied / FOLDER).alter.add_columns(added)
    maintain(copied)
    [uri] = DeltaTable(copied / FOLDER).file_uris()
    assert pq.read_table(uri)["x"].null_count == 40


def test_what_is_off_joins_nothing(copied: Path) -> None:
    maintain(copied, policy=replace(POLICY, target_bytes=None))
    assert len(live(copied)) == 20


async def test_removed_files_are_kept_for_a_retention_beyond_deltas(
    tmp_path: Path,
) -> None:
    lake = await filled(tmp_path)
    policy = replace(POLICY, retention_s=30 * DAY_S)
    maintain(tmp_path, policy=policy)
    maintain(tmp_path, policy=policy)
    configuration = DeltaTable(tmp_path / FOLDER).metadata().configuration
    assert configuration["delta.deletedFileRetentionDuration"] == "interval 2592000 seconds"
    await commit(lake, 21)
    assert ids(tmp_path) == expected(21)


@pytest.mark.slow
async def test_a_long_log_is_cleaned_up_to_its_last_old_checkpoint(tmp_path: Path) -> None:
    lake = await opened(tmp_path)
    epochs = AppendLog(store_of(tmp_path), "shop/_epochs", "")
    last = next(filter(epochs.checkpoints.is_due, count(CHECKPOINT_EVERY)))
    log = tmp_path / "shop/_epochs/_delta_log"
    found = partial(log.glob, "*.checkpoint.parquet")  # of the version that is newest by then

    def has_checkpoint(version: int) -> bool:
        return any(int(path.name[:20]) >= version for path in found())

    for position in range(1, last + 12):
        await lake.advance(Lsn(position))
        if Way.kind is LocalStore and epochs.checkpoints.is_due(position):
            # One that is due meanwhile would be left out.
            await_until(partial(has_checkpoint, position), 60, "the checkpoint")
    await_until(partial(has_checkpoint, last), 60, "the checkpoint")
    await lake.close()
    done = maintain(tmp_path, "shop/_epochs", days=8)
    assert done.cleaned.log_files >= last - 39
    committed = await lake_by(Way.kind, tmp_path).open()
    assert committed.position == last + 11
    assert committed.server_id == "system-1"


def clean(root: Path, files: frozenset[str], *, days: float) -> None:
    """Clean a log some days from now; deltalake need not be able to open it."""
    before_s = time.time() + days * DAY_S - (POLICY.retention_s or 0)
    store = store_of(root)
    LogCleaner(store, FOLDER, written_before_s=before_s, began_s=0).clean(files)


async def test_log_files_of_other_engines_go_with_their_commits(
    tmp_path: Path,
) -> None:
    """Checkpoints in parts and with sidecars, checksums, joined commits: below the cut alone."""
    lake = await filled(tmp_path)
    log = AppendLog(store_of(tmp_path), FOLDER, "")
    log.load()
    log.checkpoint()
    cut = log.version
    await commit(lake, 21)
    files = frozenset(live(tmp_path))
    folder = tmp_path / FOLDER / "_delta_log"
    (folder / "_sidecars").mkdir()
    named = {3: "a.parquet", cut + 1: "b.parquet"}
    for version, sidecar in named.items():
        line = json.dumps({"sidecar": {"path": sidecar, "sizeInBytes": 1, "modificationTime": 1}})
        (folder / f"{version:020}.checkpoint.{uuid4()}.json").write_text(f"{line}\n")
        (folder / "_sidecars" / sidecar).touch()
    structs = pa.array([{"path": "c.parquet"}, None], pa.struct([("path", pa.string())]))
    pq.write_table(
        pa.table({"sidecar": structs}), folder / f"{cut + 1:020}.checkpoint.{uuid4()}.parquet"
    )
    for sidecar in ("c.parquet", "unnamed.parquet"):
        (folder / "_sidecars" / sidecar).touch()
    for version in (4, cut + 1):
        for rest in ("checkpoint.0000000001.0000000002.parquet", "crc"):
            (folder / f"{version:020}.{rest}").touch()
    (folder / f"{2:020}.{4:020}.compacted.json").touch()
    clean(tmp_path, files, days=6)
    assert len(list((folder / "_sidecars").iterdir())) == 4
    clean(tmp_path, files, days=8)
    left = {p.name for p in folder.iterdir() if p.name[:1].isdigit()}
    assert {int(name[:20]) for name in left} == {cut, cut + 1}
    assert sum(".checkpoint." in name for name in left) == 4
    assert {p.name for p in (folder / "_sidecars").iterdir()} == {"b.parquet", "c.parquet"}


def test_a_log_with_checkpoints_of_other_engines_alone_is_kept(copied: Path) -> None:
    files = frozenset(live(copied))
    folder = copied / FOLDER / "_delta_log"
    for checkpoint in folder.glob("*.checkpoint.parquet"):
        checkpoint.unlink()
    for version in (5, 9):
        (folder / f"{version:020}.checkpoint.{uuid4()}.json").touch()
    before = {p.name for p in folder.iterdir()}
    clean(copied, files, days=8)
    assert {p.name for p in folder.iterdir()} == before
