"""Commits of others in one log: the epoch waits for their reading, so it has a limit (I8)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ingestd.lake.delta.append_log import MOST_BETWEEN, AppendLog
from ingestd.lake.delta.log import MOST_BACK
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync
from ingestd.model.errors import FolderError
from tests.harness.hostile_folder import commit_of, ids_in, newest_version
from tests.unit.lake.stores import StoreWithoutPut
from tests.unit.lake.two_tables import BAD, Attempt, log_of

if TYPE_CHECKING:
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
