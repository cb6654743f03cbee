"""What the owner of one table's folder does between two steps of a commit stops that table (I8)."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from ingestd.lake.fencing import MOST_CONFLICTS, WriterIdentity
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.pending_calls import StorageCalls
from ingestd.lake.store.plain_files import Fsync
from ingestd.model.errors import TransientError
from ingestd.model.schema import Column
from tests.harness.hostile_folder import commit_of, ids_in, newest_version
from tests.unit.lake import rows
from tests.unit.lake.stores import StoreWithoutPut
from tests.unit.lake.two_tables import BAD, Attempt, log_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ingestd.lake.store.pending_calls import HasCalls
    from ingestd.model.schema import Table

pytestmark = pytest.mark.attack("lake writer")

WITHOUT_DATA = commit_of([{"commitInfo": {"operation": "OPTIMIZE", "timestamp": 1}}])
WIDER = rows.make_table("bad", Column("more", 25, -1, pa.string(), "text"))
STORES = {"put": LocalStore, "handle": StoreWithoutPut}


class Unsynced(Fsync):
    """Does not wait for the disk."""

    def file(self, path: Path) -> None:
        path.stat()

    def folder(self, path: Path) -> None:
        path.stat()


def add_commit(log: Path) -> Callable[[], None]:
    """Make the next commit; return how to remove it."""
    if not log.exists():
        return lambda: None
    path = log / f"{newest_version(log) + 1:020}.json"
    path.write_text(WITHOUT_DATA)
    return lambda: path.unlink(missing_ok=True)


def hide_commit(log: Path) -> Callable[[], None]:
    """Take the newest commit away; return how to put it back."""
    if not log.exists() or newest_version(log) < 0:
        return lambda: None
    path, away = log / f"{newest_version(log):020}.json", log.parent / "away"
    path.rename(away)

    def put_back() -> None:
        if not path.exists():
            away.rename(path)

    return put_back


ACTS = {"is added": add_commit, "is away": hide_commit}


class Owner(StorageCalls):
    """Acts during the calls on the bad table's folder for which `acts_in` holds."""

    def __init__(self, act: Callable[[Path], Callable[[], None]], lake: Path) -> None:
        super().__init__()
        self._act, self._log = act, log_of(lake)
        self._undo: dict[object, Callable[[], None]] = {}
        self.acts_in: Callable[[int], bool] = lambda _: False
        self.calls = 0

    def start_call(self, store: HasCalls, path: str) -> object:
        call = super().start_call(store, path)
        if "public/bad" in path:
            if self.acts_in(self.calls):
                self._undo[call] = self._act(self._log)
            self.calls += 1
        return call

    def end_call(self, call: object) -> None:
        super().end_call(call)
        self._undo.pop(call, lambda: None)()


OPERATIONS: dict[str, tuple[bool, bool, Table]] = {
    "first rows": (False, False, BAD),
    "rows": (True, False, BAD),
    "a new column": (True, False, WIDER),
    "a start": (True, True, BAD),
}
"""Whether the table exists, whether the daemon is restarted, and what is written."""


async def run(kind: type[LocalStore], lake: Path, operation: str, owner: Owner) -> set[str]:
    """Return the tables that the operation stopped.

    A start reads the lake a second time if a log claims a takeover, as a real one may have been.
    """
    exists, restarts, table = OPERATIONS[operation]
    store, writer = kind(lake, Unsynced()), WriterIdentity()
    attempt = Attempt(store)
    await attempt.start()
    await attempt.append(100, bad=BAD if exists else None)
    store.calls = owner
    if restarts:
        attempt = Attempt(store, writer)
        try:
            await attempt.start()
        except TransientError as error:
            assert error.reason == "claimed"  # noqa: PT017 - any other must not be raised
            attempt = Attempt(store, writer)
            await attempt.start()
    await attempt.append(200, bad=table)
    owner.acts_in = lambda _: False
    await attempt.append(300, bad=table)
    return {*attempt.stopped}


_THOROUGH = pytest.mark.thorough


@pytest.mark.slow
@pytest.mark.parametrize("act", ["is added", pytest.param("is away", marks=_THOROUGH)])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", ["put", pytest.param("handle", marks=_THOROUGH)])
async def test_isolated_a_commit_comes_or_goes_during_each_call(
    tmp_path: Path, kind: str, operation: str, act: str
) -> None:
    """Each call to the storage in turn; no row is lost in the other table, or written twice."""
    owner = Owner(ACTS[act], tmp_path / "none")
    assert not await run(STORES[kind], tmp_path / "none", operation, owner)
    assert owner.calls
    for number in range(owner.calls):
        lake = tmp_path / str(number)
        racing = Owner(ACTS[act], lake)
        racing.acts_in = number.__eq__
        assert await run(STORES[kind], lake, operation, racing) <= {"bad"}, number
        assert ids_in(lake, "good") == {100, 200, 300}, number
        if log_of(lake).exists():
            found = DeltaTable(log_of(lake).parent).to_pyarrow_table()["id"].to_pylist()
            assert len(found) == len(set(found)), number
        shutil.rmtree(lake)


async def test_isolated_a_torn_commit_that_changes_as_it_is_read(lake: Path) -> None:
    before = Attempt(LocalStore(lake, Unsynced()))
    await before.start()
    await before.append(100)
    torn = log_of(lake) / f"{newest_version(log_of(lake)) + 1:020}.json"
    sizes = itertools.count()

    def change(_: Path) -> Callable[[], None]:
        torn.write_text("{" + " " * next(sizes))
        return lambda: None

    attempt = Attempt(LocalStore(lake, Unsynced()))
    owner = Owner(change, lake)
    owner.acts_in = lambda _: True
    attempt.lake.store.calls = owner
    await attempt.start()
    assert attempt.stopped.keys() == {"bad"}
    assert "changed while it was checked" in str(attempt.stopped["bad"])
    await attempt.append(200)
    assert ids_in(lake, "good") == {100, 200}


class ConflictingStore(LocalStore):
    """Like a store in which each put of the bad table's commits conflicts with another's (409)."""

    syncs = False
    is_attacked = False

    def put_if_absent(self, path: str, content: bytes) -> bool:
        is_refused = self.is_attacked and "public/bad/" in path
        return not is_refused and super().put_if_absent(path, content)


async def test_isolated_a_table_whose_puts_conflict_without_end(lake: Path) -> None:
    """The lake is re-read, but not without end; files stay, as a commit to come may name them."""
    store, writer = ConflictingStore(lake, Unsynced()), WriterIdentity()
    attempt = Attempt(store, writer)
    await attempt.start()
    await attempt.append(100)
    store.is_attacked = True
    files: set[Path] = set()
    failed = 0
    while not attempt.stopped:
        try:
            await attempt.append(200)
        except TransientError:
            failed += 1
            attempt = Attempt(store, writer)
            with contextlib.suppress(TransientError):
                await attempt.start()
        assert files <= (files := {*log_of(lake).parent.glob("*.parquet")})
    assert 1 <= failed <= MOST_CONFLICTS
    assert attempt.stopped.keys() == {"bad"}
    found = DeltaTable(log_of(lake, "good").parent).to_pyarrow_table()["id"].to_pylist()
    assert sorted(found) == [100, 200]
