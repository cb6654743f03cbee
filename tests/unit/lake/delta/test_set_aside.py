"""What sets aside a torn commit after a power cut, which commits, and that the bytes are kept."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from ingestd.lake.delta.append_log import AppendLog, Creation
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.layout import Layout
from ingestd.lake.maintenance.cleanup import LogCleaner
from ingestd.lake.reference.table import DeltaReferenceTable
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync
from ingestd.model.errors import OperatorError, TransientError
from tests.unit.lake.rows import inserts, make_table, summary

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

FOLDER = "t"
APP = "ingestd/test"
DAY_S = 86_400.0
A = make_table("a")


def log_of(root: Path) -> AppendLog:
    return AppendLog(LocalStore(root, Fsync()), FOLDER, APP)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A lake with a table of versions 0 to 3."""
    log = log_of(tmp_path)
    log.load()
    log.create(Creation(pa.schema([("id", pa.int64())]), {}))
    for number in (1, 2, 3):
        log.commit_files([], number)
    return tmp_path


def commit_file(root: Path, version: int, folder: str = FOLDER) -> Path:
    return root / folder / "_delta_log" / f"{version:020}.json"


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def nothing_rests_on_it(_version: int) -> None:
    pass


def test_a_commit_that_another_put_in_its_place_meanwhile_stays(written: Path) -> None:
    whole = commit_file(written, 3).read_bytes()
    halve(commit_file(written, 3))

    def put_back(_version: int) -> None:
        commit_file(written, 3).write_bytes(whole)

    log = log_of(written)
    with pytest.raises(TransientError, match="changed while it was checked"):
        log.load(put_back)
    assert commit_file(written, 3).read_bytes() == whole
    log.load(nothing_rests_on_it)
    assert (log.version, log.app_version(), log.set_aside) == (3, 3, [])


def test_a_commit_and_a_checkpoint_are_set_aside_at_one_start(written: Path) -> None:
    DeltaTable(written / FOLDER).create_checkpoint()
    checkpoint = commit_file(written, 3).with_suffix(".checkpoint.parquet")
    halve(checkpoint)
    halve(commit_file(written, 3))
    log = log_of(written)
    log.load(nothing_rests_on_it)
    assert (log.version, log.app_version()) == (2, 2)
    assert set(log.set_aside) == {commit_file(written, 3).name, checkpoint.name, "_last_checkpoint"}


def test_the_creation_of_a_table_cut_between_actions_is_repeated(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.load()
    creation = Creation(pa.schema([("id", pa.int64())]), {})
    log.create(creation)
    first = commit_file(tmp_path, 0)
    content = first.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for end in [0, *ends[:-1]]:
        first.write_bytes(content[:end])
        log = log_of(tmp_path)
        log.load(nothing_rests_on_it)
        assert not log.exists, end
        assert log.create(creation) == 0


def test_maintenance_keeps_what_was_set_aside(written: Path) -> None:
    halve(commit_file(written, 3))
    log_of(written).load(nothing_rests_on_it)
    [aside] = commit_file(written, 3).parent.glob(".*.torn")
    left = aside.with_name(".put.of.a.run.that.is.over")
    left.touch()
    now = time.time()
    for file in (aside, left):
        os.utime(file, (now - 30 * DAY_S,) * 2)
    cleaner = LogCleaner(
        LocalStore(written, Fsync()), FOLDER, written_before_s=now - DAY_S, began_s=now
    )
    cleaner.clean(frozenset())
    assert aside.exists()
    assert not left.exists()


@pytest.mark.parametrize("folder", ["shop/_epochs", "shop/public/a"])
async def test_who_holds_no_claim_sets_nothing_aside(tmp_path: Path, folder: str) -> None:
    lake = DeltaLake(str(tmp_path), "shop")
    await lake.open()
    await lake.adopt("system-1")
    for lsn in (100, 200):
        writer = lake.begin_epoch()
        await writer.append_batch(inserts(A, lsn, lsn))
        await writer.commit(summary(lsn, lsn + 5))
    await lake.close()
    torn = max((tmp_path / folder / "_delta_log").glob("*.json"))
    whole = torn.read_bytes()
    halve(torn)
    cut = torn.read_bytes()
    looking = DeltaLake(str(tmp_path), "shop", is_claimed=False)
    if folder == "shop/_epochs":
        with pytest.raises(OperatorError, match=r"is truncated: [^<\n]*\n") as caught:
            await looking.open()
        assert "ingestd run" in (caught.value.remedy or "")
    else:
        told = (await looking.open()).damaged[A.id]
        assert "is truncated" in told.reason
        assert "ingestd snapshot shop public.a" in (told.remedy or "")
    assert torn.read_bytes() == cut
    torn.write_bytes(whole)
    assert (await looking.open()).watermarks == {A.id: 205}
    await looking.close()


async def test_a_cut_version_of_a_reference_table_is_made_again(tmp_path: Path) -> None:
    rows = pa.RecordBatch.from_pydict({"id": pa.array([1, 2], pa.int64())})

    async def batches() -> AsyncGenerator[pa.RecordBatch, None]:
        yield rows

    table = DeltaReferenceTable(str(tmp_path), "shop", A.id)
    assert await table.open() is None
    await table.replace(batches(), position=7)
    rows = rows.slice(1)
    await table.replace(batches(), position=8)
    await table.close()
    halve(commit_file(tmp_path, 1, Layout("shop").reference(A.id)))
    looking = DeltaReferenceTable(str(tmp_path), "shop", A.id, is_claimed=False)
    with pytest.raises(OperatorError, match=r"is truncated: [^<\n]*\n"):
        await looking.open()
    await looking.close()
    table = DeltaReferenceTable(str(tmp_path), "shop", A.id)
    state = await table.open()
    assert state is not None
    assert (state.rows, state.position) == (2, 7)
    state = await table.replace(batches(), position=8)
    assert (state.rows, state.position) == (1, 8)
    await table.close()
