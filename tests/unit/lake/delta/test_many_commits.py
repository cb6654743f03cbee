"""Commits of others in one log: the epoch waits for their reading, so it has a limit (I8)."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from ingestd.lake.delta.append_log import AppendLog
from ingestd.lake.delta.reading_limit import (
    MOST_BACK,
    MOST_BACK_BYTES,
    MOST_BETWEEN,
    SECONDS_EACH,
    ReadingAllowance,
)
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync
from ingestd.model.errors import FolderError
from ingestd.model.lake_state import TableEvent, TableState
from ingestd.model.lsn import Lsn
from ingestd.process.clock import utc_now
from tests.harness.hostile_folder import add, commit_of, ids_in, newest_version
from tests.unit.lake.stores import StoreWithoutPut
from tests.unit.lake.two_tables import BAD, Attempt, log_of

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

pytestmark = pytest.mark.attack("lake writer")

WITHOUT_DATA = commit_of([{"commitInfo": {"operation": "OPTIMIZE", "timestamp": 1}}])
STORES = pytest.mark.parametrize("kind", [LocalStore, StoreWithoutPut], ids=["put", "handle"])
SIZES = {
    "few": (MOST_BETWEEN // 2, WITHOUT_DATA, False),
    "many": (MOST_BETWEEN + 1, WITHOUT_DATA, True),
    "large": (3, WITHOUT_DATA + " " * (31 << 20), True),
}


class FolderSyncs(Fsync):
    """Counts how often the log of the bad table is made durable."""

    def __init__(self) -> None:
        self.count = 0

    def folder(self, path: Path) -> None:
        super().folder(path)
        self.count += path.name == "_delta_log" and path.parent.name == "bad"


def plant(log: Path, number: int, content: str) -> None:
    """Put so many equal commits after the newest."""
    first = newest_version(log) + 1
    source = log / f"{first:020}.json"
    source.write_text(content)
    for version in range(first + 1, first + number):
        os.link(source, log / f"{version:020}.json")


@STORES
@pytest.mark.parametrize("size", SIZES)
async def test_isolated_commits_of_others_have_a_limit(
    lake: Path, kind: type[LocalStore], size: str
) -> None:
    number, content, stops = SIZES[size]
    syncs = FolderSyncs()
    attempt = Attempt(kind(lake, syncs))
    await attempt.start()
    await attempt.append(100)
    plant(log_of(lake), number, content)
    syncs.count = 0
    await attempt.append(200)
    assert attempt.stopped.keys() == ({"bad"} if stops else set())
    assert ids_in(lake, "good") == {100, 200}
    assert ids_in(lake, "bad") == ({100} if stops else {100, 200})
    assert syncs.count <= 4
    if size == "many":
        assert "less often; then: ingestd snapshot shop public.bad; or" in str(
            attempt.stopped["bad"].remedy
        )


class Clock:
    """A clock that is ahead by `ahead`."""

    ahead = timedelta(0)

    def __call__(self) -> datetime:
        return utc_now() + self.ahead


@STORES
@pytest.mark.parametrize("folder", ["public/bad", "_epochs", "_tables"])
async def test_a_table_that_is_vacuumed_hourly_may_be_quiet(
    lake: Path, kind: type[LocalStore], folder: str
) -> None:
    """For six days, with two commits for each VACUUM."""
    clock = Clock()
    attempt = Attempt(kind(lake, Fsync()), now=clock)
    await attempt.start()
    await attempt.append(100)
    plant(lake / "shop" / folder / "_delta_log", 6 * 24 * 2, WITHOUT_DATA)
    clock.ahead = timedelta(days=6)
    await attempt.append(200)
    await attempt.lake.record([TableEvent(BAD, TableState.LIVE, utc_now(), Lsn(205), Lsn(100))])
    assert not attempt.stopped
    assert ids_in(lake, "good") == ids_in(lake, "bad") == {100, 200}


@STORES
async def test_isolated_a_foreign_append_to_a_quiet_table_is_found(
    lake: Path, kind: type[LocalStore]
) -> None:
    clock = Clock()
    attempt = Attempt(kind(lake, Fsync()), now=clock)
    await attempt.start()
    await attempt.append(100)
    plant(log_of(lake), 200, WITHOUT_DATA)
    [ours, *_] = (log_of(lake).parent).glob("*.parquet")
    plant(log_of(lake), 1, commit_of([add(ours.name, dataChange=True)]))
    plant(log_of(lake), 200, WITHOUT_DATA)
    clock.ahead = timedelta(days=6)
    await attempt.append(200)
    assert attempt.stopped.keys() == {"bad"}
    assert "another writer appended" in str(attempt.stopped["bad"])
    assert ids_in(lake, "good") == {100, 200}


def test_more_commits_may_be_read_of_a_quiet_log() -> None:
    clock = Clock()
    allowance = ReadingAllowance(clock)
    assert allowance.limit().commits == MOST_BETWEEN
    clock.ahead += timedelta(seconds=100 * SECONDS_EACH)
    assert allowance.limit().commits == MOST_BETWEEN + 100
    allowance.note_current()
    assert allowance.limit().commits == MOST_BETWEEN
    clock.ahead -= timedelta(days=9)
    assert allowance.limit().commits == MOST_BETWEEN
    clock.ahead += timedelta(days=900)
    limit = allowance.limit()
    assert (limit.commits, limit.nbytes) == (MOST_BACK, MOST_BACK_BYTES)


class OutrunStore(LocalStore):
    """Another commits to the bad table before each of its commits."""

    is_outrun = False

    def put_if_absent(self, path: str, content: bytes) -> bool:
        if self.is_outrun and "/bad/" in path:
            (self.root / path).write_text(WITHOUT_DATA)
        return super().put_if_absent(path, content)


async def test_isolated_a_writer_who_never_stops(lake: Path) -> None:
    store = OutrunStore(lake, Fsync())
    attempt = Attempt(store)
    await attempt.start()
    await attempt.append(100)
    store.is_outrun = True
    await attempt.append(200)
    assert attempt.stopped.keys() == {"bad"}
    assert "another commit came first" in str(attempt.stopped["bad"])
    assert ids_in(lake, "good") == {100, 200}


async def test_a_search_back_through_a_log_has_a_limit(lake: Path) -> None:
    store = LocalStore(lake, Fsync())
    attempt = Attempt(store)
    await attempt.start()
    await attempt.append(100)
    folder = attempt.lake.layout.raw(BAD.id)
    plant(lake / folder / "_delta_log", MOST_BACK + 1, WITHOUT_DATA)
    log = AppendLog(store, folder, attempt.lake.layout.app_id(BAD.id))
    log.load()
    with pytest.raises(FolderError, match="too many commits"):
        log.foreign_version()
