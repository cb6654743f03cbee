"""When checkpoints are written, and what becomes of their faults."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pyarrow as pa
import pytest

from ingestd.lake.delta.append_log import AppendLog, Creation
from ingestd.lake.delta.checkpoint_schedule import CHECKPOINT_EVERY
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync
from ingestd.model.errors import IngestdError


async def test_a_fault_of_a_checkpoint_is_raised_by_the_next_commit(tmp_path: Path) -> None:
    later: list[Callable[[], None]] = []
    log = AppendLog(LocalStore(tmp_path, Fsync()), "shop/x", "ingestd/shop", later.append)
    log.load()
    log.create(Creation(pa.schema([("id", pa.int64())]), {}))
    while not later:
        log.commit_files([], log.version + 1)
    assert log.checkpoints.is_due(log.version)
    [checkpoint] = later
    moved = (tmp_path / "shop/x").rename(tmp_path / "gone")
    checkpoint()
    moved.rename(tmp_path / "shop/x")
    with pytest.raises(IngestdError):
        log.commit_files([], log.version + 1)
    log.commit_files([], log.version + 1)


@pytest.mark.parametrize("end", ["set_result", "cancel"])
async def test_checkpoints_that_take_long_do_not_pile_up(tmp_path: Path, end: str) -> None:
    """The next one due is made once the previous one has finished or was abandoned at a close."""
    asked: list[Future[None]] = []

    def later(_: Callable[[], None]) -> Future[None]:
        asked.append(Future())
        return asked[-1]

    log = AppendLog(LocalStore(tmp_path, Fsync()), "shop/x", "ingestd/shop", later)
    log.load()
    log.create(Creation(pa.schema([("id", pa.int64())]), {}))
    for version in range(1, 3 * CHECKPOINT_EVERY):
        log.commit_files([], version)
    [waiting] = asked
    getattr(waiting, end)(*([None] if end == "set_result" else []))
    for version in range(3 * CHECKPOINT_EVERY, 4 * CHECKPOINT_EVERY):
        log.commit_files([], version)
    assert len(asked) == 2


def test_tables_changed_together_have_checkpoints_spread_out(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, Fsync())
    logs = [AppendLog(store, f"shop/public/t{n}", f"ingestd/shop/t{n}") for n in range(500)]
    due = [
        sum(log.checkpoints.is_due(version) for log in logs)
        for version in range(2 * CHECKPOINT_EVERY)
    ]
    assert sum(due) == 2 * len(logs)
    assert max(due) <= 4 * len(logs) / CHECKPOINT_EVERY
