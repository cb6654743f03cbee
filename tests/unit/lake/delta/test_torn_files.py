"""How a start handles a lake damaged by a power cut or by hand."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from ingestd.lake.delta.log import TableLog
from ingestd.lake.delta.read import read_raw
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync
from ingestd.model.errors import OperatorError, TableError
from ingestd.model.lake_state import RAW_TABLE_MISSING, TableEvent, TableState
from ingestd.model.lsn import Lsn
from tests.unit.lake.rows import inserts, make_table, summary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ingestd.model.lake_state import LakeState

A = make_table("a")
RAW = "shop/public/a"


class KilledError(Exception):
    pass


async def opened(root: Path, dies_before: str = "") -> DeltaLake:
    def die(step: str) -> None:
        if step == dies_before:
            raise KilledError

    lake = DeltaLake(str(root), "shop", before_commit=die)
    await lake.open()
    await lake.adopt("system-1")
    return lake


async def commit(lake: DeltaLake, lsn: int, *ids: int) -> None:
    writer = lake.begin_epoch()
    await writer.append_batch(inserts(A, lsn, *ids))
    await writer.commit(summary(lsn, lsn + 5))


async def is_live(lake: DeltaLake) -> None:
    await lake.record(
        [TableEvent(A, TableState.LIVE, datetime(2026, 1, 1, tzinfo=UTC), Lsn(100), Lsn(90))]
    )


async def found(root: Path) -> LakeState:
    lake = DeltaLake(str(root), "shop")
    try:
        return await lake.open()
    finally:
        await lake.close()


def log(root: Path, folder: str) -> Path:
    return root / folder / "_delta_log"


def newest(root: Path, folder: str) -> Path:
    return max(log(root, folder).glob("*.json"))


def ids(root: Path) -> list[int]:
    return sorted(row["id"] for row in read_raw(str(root), "shop", A.id).to_pylist())


def cuts(content: bytes) -> list[bytes]:
    """What may be left of it: any beginning, between two actions too, or blocks of zeros."""
    ends = {0, 1, len(content) // 2, len(content) - 2}
    ends |= {
        i + more for i, byte in enumerate(content[:-1]) if byte == ord("\n") for more in (0, 1)
    }
    halves = content[: len(content) // 2]
    return [content[:end] for end in sorted(ends)] + [b"\0" * len(content), halves + b"\0" * 99]


@pytest.mark.parametrize("before", [0, 1], ids=["the table's first", "a later one"])
async def test_exactly_once_an_unlisted_torn_commit_is_replayed(
    tmp_path: Path, before: int
) -> None:
    lake = await opened(tmp_path / "lake")
    for number in range(before):
        await commit(lake, 100 + number, 1)
    await lake.close()
    lake = await opened(tmp_path / "lake", dies_before="_epochs")
    with pytest.raises(KilledError):
        await commit(lake, 200, 2, 3)
    await lake.close()
    content = newest(tmp_path / "lake", RAW).read_bytes()
    assert len(cuts(content)) > 8

    for number, cut in enumerate(cuts(content)):
        root = tmp_path / str(number)
        shutil.copytree(tmp_path / "lake", root)
        newest(root, RAW).write_bytes(cut)
        lake = DeltaLake(str(root), "shop")
        committed = await lake.open()
        assert committed.watermarks == ({A.id: 105} if before else {}), cut
        [notice] = committed.notices
        assert notice.event == "lake.file_set_aside"
        assert RAW in notice.what
        await commit(lake, 200, 2, 3)
        await lake.close()
        assert ids(root) == [1, 2, 3][1 - before :], cut
        assert [p.read_bytes() for p in log(root, RAW).glob(".*.torn")] == [cut]
        assert (await found(root)).notices == ()


async def test_what_only_lacks_the_last_line_end_is_whole(tmp_path: Path) -> None:
    lake = await opened(tmp_path)
    await commit(lake, 100, 1)
    await commit(lake, 200, 2)
    await lake.close()
    file = newest(tmp_path, RAW)
    file.write_bytes(file.read_bytes().rstrip(b"\n"))
    assert (await found(tmp_path)).watermarks == {A.id: 205}


@pytest.mark.parametrize("share", [0, 0.5])
async def test_exactly_once_an_epochs_row_cut_short_is_written_again(
    tmp_path: Path, share: float
) -> None:
    lake = await opened(tmp_path)
    await commit(lake, 100, 1)
    await commit(lake, 200, 2)
    await lake.close()
    cut(newest(tmp_path, "shop/_epochs"), share)

    lake = DeltaLake(str(tmp_path), "shop")
    committed = await lake.open()
    # The slot, if it was confirmed beyond, is ahead of this: `continuity` says so.
    assert (committed.epoch, committed.position) == (1, 105)
    assert committed.watermarks == {A.id: 205}
    assert [notice.event for notice in committed.notices] == ["lake.file_set_aside"]
    await commit(lake, 200, 2)
    await lake.close()
    assert ids(tmp_path) == [1, 2]
    assert (await found(tmp_path)).epoch == 2


def cut(file: Path, share: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])


@pytest.mark.parametrize("share", [0, 0.5])
async def test_a_torn_commit_that_was_acknowledged_is_never_skipped(
    tmp_path: Path, share: float
) -> None:
    lake = await opened(tmp_path)
    await commit(lake, 100, 1)
    await commit(lake, 200, 2)
    await lake.close()
    kept = newest(tmp_path, RAW).read_bytes()
    cut(newest(tmp_path, RAW), share)
    for _ in range(2):  # the first open changes nothing
        told = await found(tmp_path)
        assert f"{RAW}: commit 2 is incomplete" in told.damaged[A.id].what
        assert told.watermarks == {}
        assert "ingestd snapshot shop public.a" in (told.damaged[A.id].remedy or "")
    newest(tmp_path, RAW).write_bytes(kept)
    assert (await found(tmp_path)).watermarks == {A.id: 205}


async def test_lossless_an_empty_commit_below_others_stops_its_table(tmp_path: Path) -> None:
    """Readers skip it silently: its rows would be missing."""
    lake = await opened(tmp_path)
    for number in range(4):
        await commit(lake, 100 + 10 * number, number)
    await lake.close()
    log(tmp_path, RAW).joinpath(f"{2:020}.json").write_bytes(b"")
    damaged = (await found(tmp_path)).damaged
    assert "commit 2 is empty" in damaged[A.id].reason


async def test_registry_commits_that_epochs_rely_on_are_never_skipped(tmp_path: Path) -> None:
    lake = await opened(tmp_path)
    await is_live(lake)
    await lake.close()
    shutil.copytree(tmp_path / "shop", tmp_path / "early/shop")
    cut(newest(tmp_path / "early", "shop/_tables"), 0.5)
    assert (await found(tmp_path / "early")).tables == {}

    lake = await opened(tmp_path)
    await commit(lake, 100, 1)
    await lake.close()
    cut(newest(tmp_path, "shop/_tables"), 0)
    with pytest.raises(OperatorError, match="_tables: commit 1 is incomplete"):
        await found(tmp_path)


@pytest.mark.parametrize("share", [0, 0.5])
async def test_a_checkpoint_cut_short_is_done_without(tmp_path: Path, share: float) -> None:
    lake = await opened(tmp_path)
    await commit(lake, 100, 1)
    await commit(lake, 200, 2)
    await lake.close()
    DeltaTable(tmp_path / RAW).create_checkpoint()
    cut(log(tmp_path, RAW) / f"{2:020}.checkpoint.parquet", share)
    committed = await found(tmp_path)
    assert committed.watermarks == {A.id: 205}
    assert len(committed.notices) == 2  # it and the pointer to it
    assert ids(tmp_path) == [1, 2]


async def test_a_missing_raw_table_must_be_resnapshotted(tmp_path: Path) -> None:
    lake = await opened(tmp_path)
    await is_live(lake)
    assert (await found(tmp_path)).missing == frozenset()  # it never had a row
    await commit(lake, 100, 1)
    await lake.close()
    shutil.rmtree(tmp_path / RAW)
    committed = await found(tmp_path)
    assert committed.missing == {A.id}
    known = committed.tables[A.id]
    assert (known.state, known.reason) == (TableState.STOPPED, RAW_TABLE_MISSING)
    assert committed.position == 105  # the others continue there


@pytest.mark.parametrize("name", ["_epochs", "_tables"])
async def test_a_missing_table_of_the_source_itself_is_reported(tmp_path: Path, name: str) -> None:
    lake = await opened(tmp_path)
    await is_live(lake)
    await commit(lake, 100, 1)
    await lake.close()
    (tmp_path / "shop" / name).rename(tmp_path / "away")
    with pytest.raises(OperatorError, match=f"shop/{name}: the table is missing") as caught:
        await found(tmp_path)
    assert "put it back" in (caught.value.remedy or "")
    (tmp_path / "away").rename(tmp_path / "shop" / name)
    assert (await found(tmp_path)).position == 105


async def test_a_raw_table_that_goes_while_it_is_written_stops_alone(tmp_path: Path) -> None:
    lake = await opened(tmp_path)
    await commit(lake, 100, 1)
    (tmp_path / RAW).rename(tmp_path / "away")
    writer = lake.begin_epoch()
    await writer.append_batch(inserts(A, 200, 2))
    told: list[TableError] = []

    async def stop(errors: Sequence[TableError]) -> None:
        told.extend(errors)

    await writer.commit(summary(200, 205), stop)
    [error] = told
    assert error.table == A.id
    assert "that existed is missing" in error.what
    await lake.close()
    assert not (tmp_path / RAW).exists()


@pytest.mark.parametrize("name", ["_epochs", "_tables"])
async def test_a_table_removed_during_writes_is_not_recreated(tmp_path: Path, name: str) -> None:
    lake = await opened(tmp_path)
    await commit(lake, 100, 1)
    (tmp_path / "shop" / name).rename(tmp_path / "away")
    with pytest.raises(OperatorError, match=r"that existed is missing|no longer exists"):
        await (is_live(lake) if name == "_tables" else commit(lake, 200, 2))
    await lake.close()
    assert not (tmp_path / "shop" / name).exists()
    (tmp_path / "away").rename(tmp_path / "shop" / name)
    lake = await opened(tmp_path)
    await commit(lake, 200, 2)
    await lake.close()
    assert ids(tmp_path) == [1, 2]


def _append(root: Path) -> None:
    write_deltalake(root / RAW, read_raw(str(root), "shop", A.id), mode="append")


def _delete(root: Path) -> None:
    DeltaTable(root / RAW).delete("id = 1")


@pytest.mark.parametrize("write", [_append, _delete])
async def test_a_table_written_by_another_between_runs_is_damaged(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    lake = await opened(tmp_path)
    await commit(lake, 100, 1)
    await lake.close()
    DeltaTable(tmp_path / RAW).optimize.compact()
    assert (await found(tmp_path)).notices == ()
    write(tmp_path)
    DeltaTable(tmp_path / RAW).optimize.compact()  # a commit without data does not hide it
    for _ in range(2):
        committed = await found(tmp_path)
        error = committed.damaged[A.id]
        assert "another writer made version 2" in error.reason
        assert error.remedy is not None
        assert error.remedy.endswith("ingestd snapshot shop public.a")


async def test_a_foreign_commit_between_open_and_fence_is_not_hidden(
    tmp_path: Path,
) -> None:
    lake = await opened(tmp_path)
    await commit(lake, 100, 1)
    await lake.close()
    lake = DeltaLake(str(tmp_path), "shop")
    assert (await lake.open()).damaged == {}
    _append(tmp_path)
    assert set(await lake.fence()) == {A.id}
    await lake.close()
    assert set((await found(tmp_path)).damaged) == {A.id}


def test_a_reader_does_not_repair_a_log(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"id": [1]}))
    cut(newest(tmp_path, "t"), 0.5)
    reader = TableLog(LocalStore(tmp_path, Fsync()), "t", "app")
    with pytest.raises(OperatorError):
        reader.load()
    assert len(list(log(tmp_path, "t").iterdir())) == 1
