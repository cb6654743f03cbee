"""What commits have added since, whatever was done to the table meanwhile."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from ingestd.lake.delta.commit import commit_path
from ingestd.lake.delta.log import TableLog
from ingestd.lake.delta.tail import CommitTail, EpochEnd
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.store.store import open_store
from tests.unit.lake.rows import inserts, make_table, summary

if TYPE_CHECKING:
    from pathlib import Path


def commit(root: Path, version: int, log: str) -> None:
    """Write a commit of a log that adds a file; `log` distinguishes it from others."""
    name = f"{log}{version}.parquet"
    place = {"path": name, "partitionValues": {}, "size": 1, "modificationTime": 1}
    add = {"add": {**place, "dataChange": True}}
    path = root / commit_path("t", version)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"commitInfo": {"log": log}}) + "\n" + json.dumps(add) + "\n")
    (root / "t" / name).touch()


@pytest.mark.parametrize("known", [0, 2])
@pytest.mark.parametrize("commits", [1, 2, 3, 4, 9])
def test_a_log_that_took_the_place_of_another_is_not_followed(
    tmp_path: Path, known: int, commits: int
) -> None:
    """It may have as many commits, or more: a table was moved away, and read again."""
    for version in range(known + 1):
        commit(tmp_path, version, "a")
    tail = CommitTail(open_store(str(tmp_path), None), "t", known)
    assert tail.files() == []
    commit(tmp_path, known + 1, "a")
    assert tail.files() == [(f"a{known + 1}.parquet", {})]
    tail.requeue([])
    shutil.rmtree(tmp_path / "t")
    for version in range(commits):
        commit(tmp_path, version, "b")
    assert tail.files() is None


async def test_the_last_epoch_is_known_from_a_checkpoint_alone(
    tmp_path: Path,
) -> None:
    lake = DeltaLake(str(tmp_path), "shop")
    await lake.open()
    await lake.adopt("7000000000000000001")

    async def append(lsn: int) -> None:
        writer = lake.begin_epoch()
        await writer.append_batch(inserts(make_table("orders"), lsn, lsn))
        await writer.commit(summary(lsn, lsn + 5))

    end = EpochEnd(TableLog(open_store(str(tmp_path), None), "shop/_epochs", ""))
    assert end.last() == 0
    for lsn in (100, 200):
        await append(lsn)
        assert end.last() == lsn // 100
    epochs = DeltaTable(tmp_path / "shop/_epochs")
    epochs.create_checkpoint()
    (tmp_path / commit_path("shop/_epochs", epochs.version())).unlink()
    assert [end.last(), end.last()] == [2, 2]
    for lsn in (300, 400):
        await append(lsn)
        assert end.last() == lsn // 100
    await lake.close()
