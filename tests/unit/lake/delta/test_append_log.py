"""Compare-and-swap commits, and the order of what becomes durable."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from ingestd.lake.delta.append_log import REOPEN_EVERY, AppendLog, Creation
from ingestd.lake.delta.checkpoint_schedule import CHECKPOINT_EVERY
from ingestd.lake.delta.read import read_raw
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync
from ingestd.model.errors import (
    FolderError,
    OperatorError,
    TableError,
    TransientError,
)
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from tests.harness.waiting import await_until
from tests.unit.lake.rows import inserts, make_table, summary
from tests.unit.lake.stores import StoreWithoutPut

A, B = make_table("a"), make_table("b")
T = pa.string()


async def commit(lake: DeltaLake, lsn: int, *ids: int) -> None:
    writer = lake.begin_epoch()
    await writer.append_batch(inserts(A, lsn, *ids))
    await writer.commit(summary(lsn, lsn + 5))


async def opened(root: Path, **options: object) -> DeltaLake:
    lake = DeltaLake(str(root), "shop", **options)  # type: ignore[arg-type]
    await lake.open()
    await lake.adopt("system-1")
    return lake


async def test_one_writer_optimize_and_properties_do_not_conflict(
    tmp_path: Path,
) -> None:
    lake = await opened(tmp_path)
    await commit(lake, 100, 1)
    await commit(lake, 200, 2)
    other = DeltaTable(tmp_path / "shop/public/a")
    other.optimize.compact()
    other.alter.set_table_properties({"delta.logRetentionDuration": "interval 60 days"})
    await commit(lake, 300, 3)
    assert sorted(r["id"] for r in read_raw(str(tmp_path), "shop", A.id).to_pylist()) == [1, 2, 3]
    (epoch,) = [
        row
        for row in pa.concat_tables(
            [pa.table(DeltaTable(tmp_path / "shop/_epochs").scan().read_all())]
        ).to_pylist()
        if row["epoch"] == 3
    ]
    assert epoch["tables"] == [{"table": "public.a", "version": 5, "rows": 1}]


async def test_one_writer_data_in_between_stops_the_table(tmp_path: Path) -> None:
    lake = await opened(tmp_path)
    await commit(lake, 100, 1)
    foreign = read_raw(str(tmp_path), "shop", A.id)
    write_deltalake(tmp_path / "shop/public/a", foreign, mode="append")
    writer = lake.begin_epoch()
    await writer.append_batch(inserts(A, 200, 2))
    with pytest.raises(TableError, match="another writer appended version 2"):
        await writer.commit(summary(200, 205))


@pytest.mark.parametrize("by_put", [True, False])
async def test_exactly_once_a_commit_that_reports_an_error_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, by_put: bool
) -> None:
    msg = "connection reset after the commit"

    class LyingStore(LocalStore):
        supports_conditional_put = by_put
        lies = False

        def put_if_absent(self, path: str, content: bytes) -> bool:
            is_new = super().put_if_absent(path, content)
            if self.lies:
                raise OSError(msg)
            return is_new

    store = LyingStore(tmp_path, Fsync())
    lake = await opened(tmp_path, store=store)
    await commit(lake, 100, 1)
    whole = DeltaTable.create_write_transaction

    def lies(self: DeltaTable, *args: object, **options: object) -> None:
        whole(self, *args, **options)  # type: ignore[arg-type]
        raise OSError(msg)

    store.lies = True
    monkeypatch.setattr(DeltaTable, "create_write_transaction", lies)
    await commit(lake, 200, 2)
    monkeypatch.undo()
    store.lies = False
    await commit(lake, 300, 3)
    assert sorted(r["id"] for r in read_raw(str(tmp_path), "shop", A.id).to_pylist()) == [1, 2, 3]


@pytest.mark.parametrize("by_put", [True, False])
async def test_a_log_continues_past_reopening_and_checkpoints(
    tmp_path: Path, *, by_put: bool
) -> None:
    kind = LocalStore if by_put else StoreWithoutPut
    lake = await opened(tmp_path, store=kind(tmp_path, Fsync()))
    last = CHECKPOINT_EVERY + 10 if by_put else 2 * REOPEN_EVERY
    for position in range(1, last + 1):
        await lake.advance(Lsn(position))
    await lake.close()
    log = tmp_path / "shop/_epochs/_delta_log"
    assert list(log.glob("*.checkpoint.parquet"))
    assert (await DeltaLake(str(tmp_path), "shop").open()).position == last


async def test_an_unpublished_commit_left_by_a_kill_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = await opened(tmp_path)
    await commit(lake, 100, 1)

    def killed(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "killed")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", killed)
        patch.setattr(os, "unlink", lambda *_, **__: None)
        with pytest.raises(TransientError):
            await commit(lake, 200, 2)
    assert [p for p in (tmp_path / "shop/public/a/_delta_log").iterdir() if p.name[0] == "."]
    lake = await opened(tmp_path)
    await commit(lake, 200, 2)
    assert sorted(r["id"] for r in read_raw(str(tmp_path), "shop", A.id).to_pylist()) == [1, 2]


async def test_properties_set_by_others_are_seen_by_the_next_commit(
    tmp_path: Path,
) -> None:
    lake = await opened(tmp_path)
    await commit(lake, 100, 1)
    other = DeltaTable(tmp_path / "shop/public/a")
    other.alter.set_table_properties({"delta.logRetentionDuration": "interval 60 days"})
    await commit(lake, 200, 2)
    log = lake.raw_tables.raw_table(A.id).log
    assert log.configuration()["delta.logRetentionDuration"] == "interval 60 days"


async def resuming(lake: DeltaLake, lsn: int, resume: str | None, *ids: int) -> None:
    writer = lake.begin_epoch()
    await writer.append_batch(replace(inserts(A, lsn, *ids), resume=resume))
    await writer.commit(summary(lsn, lsn + 5))


def commit_infos(folder: Path) -> list[dict[str, object]]:
    files = sorted((folder / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for f in files for line in f.read_text("utf-8").splitlines()]
    return [a["commitInfo"] for a in actions if "commitInfo" in a]


def resume_of(root: Path) -> str:
    log = AppendLog(LocalStore(root, Fsync()), "shop/public/a", "ingestd/shop/public.a")
    log.load()
    return log.resume()


async def test_a_resume_is_found_behind_commits_that_are_not_an_epochs(tmp_path: Path) -> None:
    lake = await opened(tmp_path)
    await resuming(lake, 100, "first", 1)
    await resuming(lake, 200, "second", 2)
    other = DeltaTable(tmp_path / "shop/public/a")
    other.optimize.compact()
    other.alter.set_table_properties({"delta.logRetentionDuration": "interval 60 days"})
    assert resume_of(tmp_path) == "second"
    await resuming(lake, 300, None, 3)
    assert resume_of(tmp_path) == "second"
    lake = await opened(tmp_path)
    await resuming(lake, 400, "", 4)
    assert resume_of(tmp_path) == ""


@pytest.mark.parametrize("kind", [LocalStore, StoreWithoutPut], ids=["put", "handle"])
async def test_a_fence_repeats_what_is_searched_for(tmp_path: Path, kind: type[LocalStore]) -> None:
    """Each start of a daemon may make one: they lengthen neither a search nor the log."""
    lake = await opened(tmp_path)
    await resuming(lake, 100, "first", 1)
    for number in range(3):
        log = AppendLog(kind(tmp_path, Fsync()), "shop/public/a", "ingestd/shop/public.a")
        log.load()
        before = log.version
        for path in (tmp_path / "shop/public/a/_delta_log").glob("*.json"):
            if number and int(path.stem) < before:  # as maintenance removes them
                path.unlink()
        assert log.resume() == "first"
        log.fence()
        assert (log.version, log.app_version()) == (before + 1, 105)
        log.checkpoint()


async def test_a_resume_whose_commit_is_cleaned_up_is_none(tmp_path: Path) -> None:
    lake = await opened(tmp_path)
    await resuming(lake, 100, "first", 1)
    await resuming(lake, 200, "second", 2)
    other = DeltaTable(tmp_path / "shop/public/a")
    other.optimize.compact()
    other.create_checkpoint()
    log = tmp_path / "shop/public/a/_delta_log"
    for version in range(other.version()):
        (log / f"{version:020}.json").unlink()
    assert resume_of(tmp_path) == ""


async def test_commits_without_a_resume_say_nothing_of_it(tmp_path: Path) -> None:
    lake = await opened(tmp_path)
    await commit(lake, 100, 1)
    await commit(lake, 200, 2)
    assert not any("ingestdResume" in info for info in commit_infos(tmp_path / "shop/public/a"))
    assert len(commit_infos(tmp_path / "shop/public/a")) == 3
    assert resume_of(tmp_path) == ""


class Notes:
    """A durability that records each sync, and which commits existed by then."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seen: list[tuple[str, frozenset[str]]] = []

    def file(self, path: Path) -> None:
        assert path.stat().st_size > 0
        self._note(path)

    def folder(self, path: Path) -> None:
        self._note(path)

    def _note(self, path: Path) -> None:
        commits = frozenset(str(p.relative_to(self.root)) for p in self.root.rglob("*.json"))
        name = path.name
        if name.startswith("."):  # a commit before it is linked to its own name
            path = path.with_name(name[1 : name.index(".json") + 5])
            commits |= {os.path.relpath(path, self.root)}
        self.seen.append((os.path.relpath(path, self.root), commits))


async def test_ack_after_durable_files_are_synced_before_references(
    tmp_path: Path,
) -> None:
    notes = Notes(tmp_path)
    lake = await opened(tmp_path, durability=notes)
    notes.seen.clear()
    writer = lake.begin_epoch()
    await writer.append_batch(inserts(A, 100, 1))
    await writer.append_batch(inserts(B, 100, 1))
    await writer.commit(summary(100, 105))
    epoch_commit = "shop/_epochs/_delta_log/00000000000000000003.json"
    order = [path for path, _ in notes.seen]
    for table in ("a", "b"):
        folder = f"shop/public/{table}"
        made, raw_commit = (f"{folder}/_delta_log/{version:020}.json" for version in (0, 1))
        data = next(p for p in order if p.startswith(f"{folder}/part-"))
        for path in (data, folder, "shop/public", "shop"):
            first = order.index(path)
            assert raw_commit not in notes.seen[first][1], f"{path} synced after its commit"
        for path in (raw_commit, f"{folder}/_delta_log"):
            last = len(order) - 1 - order[::-1].index(path)
            assert raw_commit in notes.seen[last][1]
            assert epoch_commit not in notes.seen[last][1], "the epoch came before its tables"
        # `_delta_log` itself is an entry of the folder.
        assert any(p == folder and made in seen for p, seen in notes.seen)
    data = next(p for p in order if p.startswith("shop/_epochs/part-"))
    assert epoch_commit not in notes.seen[order.index(data)][1]
    assert order[-2:] == [epoch_commit, "shop/_epochs/_delta_log"]


async def test_ack_after_durable_an_unsynced_commit_is_synced_at_open(
    tmp_path: Path,
) -> None:
    def crash(step: str) -> None:
        if step == "_epochs":
            raise OSError(step)  # raw commits exist, the epoch's row does not

    lake = DeltaLake(str(tmp_path), "shop", before_commit=crash)
    await lake.open()
    await lake.adopt("1")
    writer = lake.begin_epoch()
    await writer.append_batch(inserts(A, 100, 1))
    with pytest.raises(OSError, match="_epochs"):
        await writer.commit(summary(100, 105))
    notes = Notes(tmp_path)
    assert (await DeltaLake(str(tmp_path), "shop", durability=notes).open()).floor == 105
    synced = [path for path, _ in notes.seen]
    raw_log = "shop/public/a/_delta_log"
    assert f"{raw_log}/00000000000000000001.json" in synced
    assert raw_log in synced
    assert "shop/_epochs/_delta_log/00000000000000000002.json" in synced
    assert "shop/_tables/_delta_log/00000000000000000000.json" in synced


@pytest.mark.slow
async def test_a_log_killed_between_a_checkpoint_and_its_pointer(
    tmp_path: Path,
) -> None:
    lake = await opened(tmp_path)
    last = next(
        filter(AppendLog(lake.store, lake.layout.raw(A.id), "").checkpoints.is_due, count(10))
    )
    for number in range(last):
        await commit(lake, 100 * (number + 1), number)
    log = tmp_path / "shop/public/a/_delta_log"
    await_until((log / f"{last:020}.checkpoint.parquet").exists, 30, "the checkpoint")
    await lake.close()
    (log / "_last_checkpoint").unlink()
    again = await opened(tmp_path)
    await commit(again, 100_000, last)
    rows = read_raw(str(tmp_path), "shop", A.id).to_pylist()
    assert sorted(r["id"] for r in rows) == list(range(last + 1))


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    log = AppendLog(LocalStore(tmp_path, Fsync()), "shop/x", "ingestd/shop")
    log.load()
    assert (log.exists, log.version, log.schema(), log.app_version()) == (False, -1, None, None)
    assert not (tmp_path / "shop").exists()


@pytest.mark.parametrize("change", ["add_columns", "set_properties", "append"])
def test_one_writer_a_change_of_the_schema_passes_nobodys_rows(tmp_path: Path, change: str) -> None:
    """Opening a handle must not mark a version as checked because it is the newest."""
    log, other = (AppendLog(LocalStore(tmp_path, Fsync()), "x", "ingestd/shop") for _ in range(2))
    log.create(Creation(pa.schema([("a", pa.int64())]), {}), app_version=1)
    log.commit_files([], 2)
    other.load()
    other.commit_files([], 3)
    assert log.handle.version() == 1
    changes: dict[str, Callable[[], int]] = {
        "add_columns": lambda: log.add_columns([pa.field("b", pa.int64())]),
        "set_properties": lambda: log.set_properties({"delta.appendOnly": "true"}),
        "append": lambda: log.commit_files([], 4),
    }
    with pytest.raises(OperatorError, match="another writer"):
        changes[change]()


async def test_a_file_in_the_place_of_the_lake_is_an_operator_error(tmp_path: Path) -> None:
    (tmp_path / "lake").write_text("")
    lake = DeltaLake(str(tmp_path / "lake"), "shop")
    with pytest.raises(OperatorError, match="a file exists"):
        await lake.open()


def test_a_percent_sign_in_a_local_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="percent"):
        DeltaLake(str(tmp_path / "a%20b"), "shop")


async def test_a_lake_below_a_folder_with_a_space_by_file_uri(tmp_path: Path) -> None:
    root = tmp_path / "my lake"
    lake = await opened(root)
    await commit(lake, 100, 1)
    again = DeltaLake(f"file://{tmp_path}/my%20lake", "shop")
    assert (await again.open()).watermarks == {TableId("public", "a"): 105}


@pytest.mark.parametrize(
    "added", [pa.field("ID", pa.string()), pa.field("x", pa.struct([("a", T), ("A", T)]))], ids=str
)
def test_isolated_names_that_differ_by_case_only(tmp_path: Path, added: pa.Field) -> None:
    """deltalake raises a plain Exception for them."""
    log = AppendLog(LocalStore(tmp_path, Fsync()), "shop/x", "ingestd/shop")
    log.create(Creation(pa.schema([("id", T)]), {}))
    with pytest.raises(FolderError, match="Duplicate field name"):
        log.add_columns([added])
    assert log.version == 0
