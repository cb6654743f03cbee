"""Two daemons on one lake, their commits in every order (I5).

Daemon A has opened the lake and is about to commit an epoch; without knowing it, it has lost its
claim. Daemon B opens, fences, and commits an epoch of its own from the same source: a shorter one,
the same, or a longer one. Every order of A's and B's commits is tried, on a real lake. Then a third
daemon delivers the rest, and the lake must be as if one alone had written it.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.lake.delta.read import read_raw
from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.epoch_writer import DeltaEpochWriter
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Durability
from ingestd.model.errors import IngestdError, TransientError
from tests.harness.compare import epochs
from tests.harness.epoch_versions import assert_epoch_versions
from tests.unit.lake.rows import inserts, make_table, summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

A, B = make_table("a", oid=1), make_table("b", oid=2)
TRANSACTIONS = {100: (A,), 200: (B,), 300: (A, B)}
"""Commit LSN, and the tables that have one row of it, whose id is the LSN."""
ENDS = 5
"""Bytes from commit_lsn to end_lsn."""
LIMIT_S = 60.0


class NoSync(Durability):
    """What is written here need not survive a power cut."""

    def file(self, path: Path) -> None: ...

    def folder(self, path: Path) -> None: ...


class GatedStore(LocalStore):
    """Waits before each commit of the tables that count until it is let through."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, NoSync())
        self.is_gated = False
        self._lock = threading.Condition()
        self._waiting: list[str] = []
        self._let: list[str] = []
        self._done: list[str] = []

    def put_if_absent(self, path: str, content: bytes) -> bool:
        table = path.split("/_delta_log/", maxsplit=1)[0].rsplit("/", maxsplit=1)[-1]
        if not self.is_gated or table == "_tables":
            return super().put_if_absent(path, content)
        with self._lock:
            self._waiting.append(table)
            self._lock.notify_all()
            self._lock.wait_for(lambda: table in self._let, LIMIT_S)
            self._let.remove(table)
        try:
            return super().put_if_absent(path, content)
        finally:
            with self._lock:
                self._done.append(table)
                self._lock.notify_all()

    def is_at(self, table: str) -> bool:
        with self._lock:
            return table in self._waiting

    def let_through(self, table: str) -> None:
        """Let a waiting commit happen; return when it has."""
        with self._lock:
            self._waiting.remove(table)
            self._let.append(table)
            self._lock.notify_all()
            assert self._lock.wait_for(lambda: table in self._done, LIMIT_S), table
            self._done.remove(table)


@dataclass
class Writer:
    """A daemon's sink. `fault`: what it ended with; `to_come`: its epoch's tables, once filled.

    `fenced`: tables that it was let fence; it tries again where another's commit came between.
    """

    lake: DeltaLake
    store: GatedStore
    fault: IngestdError | None = None
    work: asyncio.Task[None] | None = None
    to_come: list[str] | None = None
    fenced: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, root: Path) -> Writer:
        store = GatedStore(root)
        return cls(DeltaLake(str(root), "shop", store=store), store)

    async def open(self) -> None:
        self.found = await self.lake.open()

    async def fence_and_commit(self, upto: int) -> None:
        await self.lake.fence()
        await self.commit(upto)

    async def commit(self, upto: int) -> None:
        """Commit an epoch of all transactions up to that one, as they come after a start."""
        writer = self.lake.begin_epoch()
        position, floor = self.found.position or 0, self.found.floor or 0
        upto = max(upto, floor - ENDS)  # not below what the lake has already (I4)
        sent = [lsn for lsn in TRANSACTIONS if position <= lsn <= upto]
        for lsn in sent:
            for table in TRANSACTIONS[lsn]:
                await writer.append_batch(inserts(table, lsn, lsn))
        if writer.rows or self.found.unlisted:
            assert isinstance(writer, DeltaEpochWriter)
            tables = sorted(table.name for table in writer.tables)
            self.to_come = [*tables, "_epochs"]
            await writer.commit(summary(min(sent, default=upto), upto + ENDS))

    def begin(self, work: Any) -> None:
        async def watched() -> None:
            try:
                await work
            except IngestdError as error:
                self.fault = error

        self.store.is_gated = True
        self.work = asyncio.create_task(watched())

    async def do(self, table: str) -> None:
        """Let it commit to the table next, if it commits at all."""
        async with asyncio.timeout(LIMIT_S):
            while not self.store.is_at(table):
                if self.work is None or self.work.done():
                    return
                if self.to_come is not None and table not in self.to_come:
                    return  # the lake has all its rows
                for again in filter(self.store.is_at, self.fenced if self.to_come is None else ()):
                    await asyncio.to_thread(self.store.let_through, again)
                if table == "_epochs" and self.to_come is not None and len(self.to_come) > 1:
                    await self.do(self.to_come[0])  # what the order has no place for
                else:
                    await asyncio.sleep(0.0005)
        to_come = self.to_come  # none while it fences
        await asyncio.to_thread(self.store.let_through, table)
        (self.fenced.append if to_come is None else to_come.remove)(table)


def orders(first: Sequence[str], second: Sequence[str]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Return every merge of the two."""
    steps = len(first) + len(second)
    for places in itertools.combinations(range(steps), len(first)):
        one, two = iter(first), iter(second)
        yield tuple(("A", next(one)) if n in places else ("B", next(two)) for n in range(steps))


async def in_order(root: Path, order: Sequence[tuple[str, str]], upto: int) -> dict[str, Writer]:
    """Have A, which opened first, and B commit in this order."""
    writers = {"A": Writer.of(root)}
    await writers["A"].open()
    await writers["A"].lake.fence()
    writers["A"].begin(writers["A"].commit(200))
    for name, step in order:
        if step == "open":
            writers["B"] = Writer.of(root)
            await writers["B"].open()
            writers["B"].begin(writers["B"].fence_and_commit(upto))
        else:
            await writers[name].do(step)
    for writer in writers.values():
        assert writer.work is not None
        await writer.do("_epochs")  # if that came otherwise than in the order
        await writer.work
        await writer.lake.close()
    return writers


async def recovered(root: Path) -> None:
    """Let one alone deliver the rest, and check the content of the lake."""
    last = Writer.of(root)
    await last.open()
    await last.lake.fence()
    await last.commit(300)
    await last.lake.close()
    ends = {row["epoch"]: row["end_lsn"] for row in epochs(root)}
    assert list(ends) == list(range(1, len(ends) + 1))
    assert list(ends.values()) == sorted(ends.values())
    for table in (A, B):
        rows = read_raw(str(root), "shop", table.id).to_pylist()
        written = [1, *(lsn for lsn, tables in TRANSACTIONS.items() if table in tables)]
        assert sorted(row["id"] for row in rows) == written
        for row in rows:
            lsn, epoch = row["_cdc_lsn"], row["_cdc_epoch"]
            assert ends.get(epoch - 1, 0) <= lsn < ends[epoch], f"{lsn} is in epoch {epoch}"
    assert_epoch_versions(root)


async def prepare(root: Path) -> None:
    """Make a lake whose first epoch has both tables."""
    lake = DeltaLake(str(root), "shop", durability=NoSync())
    await lake.open()
    await lake.fence()
    await lake.adopt("server")
    writer = lake.begin_epoch()
    for table in (A, B):
        await writer.append_batch(inserts(table, 10, 1))
    await writer.commit(summary(10, 15))
    await lake.close()


OF_A = ("a", "b", "_epochs")
FENCED = ("open", "_epochs", "a", "b")
SHORTER, SAME, LONGER = 100, 200, 300
OF_B = {
    SHORTER: (*FENCED, "a", "_epochs"),
    SAME: (*FENCED, "a", "b", "_epochs"),
    LONGER: (*FENCED, "a", "b", "_epochs"),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "upto",
    [
        SHORTER,
        pytest.param(SAME, marks=pytest.mark.long),
        pytest.param(LONGER, marks=pytest.mark.long),
    ],
)
async def test_one_writer_every_order_of_two_daemons_commits(tmp_path: Path, upto: int) -> None:
    base = tmp_path / "base"
    await prepare(base)
    won: set[tuple[bool, bool]] = set()
    for number, order in enumerate(orders(OF_A, OF_B[upto])):
        root = tmp_path / str(number)
        shutil.copytree(base, root)
        try:
            writers = await in_order(root, order, upto)
            lost = {name for name, writer in writers.items() if writer.fault is not None}
            for name in lost:
                fault = writers[name].fault
                assert isinstance(fault, TransientError), fault
                assert fault.reason == "claimed"
                assert fault.remedy
            if order[0] == ("B", "open"):  # A committed after B had read the lake
                assert lost
            await recovered(root)
        except BaseException as error:
            error.add_note(" ".join(f"{name}:{step}" for name, step in order))
            raise
        won.add(("A" not in lost, "B" not in lost))
        shutil.rmtree(root)
    assert won >= {(True, True), (True, False), (False, True)}


# --- tables that are not there yet -----------------------------------------------------------


def lake_at(root: Path, before_commit: Callable[[str], None] = lambda _: None) -> DeltaLake:
    return DeltaLake(str(root), "shop", durability=NoSync(), before_commit=before_commit)


async def taken_over(root: Path) -> DeltaLake:
    lake = lake_at(root)
    await lake.open()
    await lake.fence()
    return lake


async def commit_new(lake: DeltaLake) -> None:
    writer = lake.begin_epoch()
    await writer.append_batch(inserts(A, 100, 100))
    await writer.commit(summary(100, 105))


def rows_of(root: Path) -> list[int]:
    return [row["id"] for row in read_raw(str(root), "shop", A.id).to_pylist()]


async def test_one_writer_a_table_created_after_the_fence_stays_empty(
    tmp_path: Path,
) -> None:
    first = await taken_over(tmp_path)
    await first.adopt("server")
    second = await taken_over(tmp_path)
    with pytest.raises(TransientError, match="taken over"):
        await commit_new(first)
    assert rows_of(tmp_path) == []
    with pytest.raises(TransientError) as caught:  # it does not know of the table yet
        await commit_new(second)
    assert caught.value.reason == "claimed"
    await commit_new(await taken_over(tmp_path))
    assert rows_of(tmp_path) == [100]
    assert [row["epoch"] for row in epochs(tmp_path)] == [1]


async def test_one_writer_a_table_made_before_the_fence_is_fenced(tmp_path: Path) -> None:
    is_there, goes_on = threading.Event(), threading.Event()

    def wait(step: str) -> None:
        if step == "public.a":
            is_there.set()
            assert goes_on.wait(LIMIT_S)

    first = lake_at(tmp_path, wait)
    await first.open()
    await first.adopt("server")
    second = lake_at(tmp_path)
    await second.open()
    committing = asyncio.create_task(commit_new(first))
    assert await asyncio.to_thread(is_there.wait, LIMIT_S)
    with pytest.raises(TransientError) as caught:
        await second.fence()
    assert caught.value.reason == "claimed"
    await second.open()
    await second.fence()
    goes_on.set()
    with pytest.raises(TransientError, match="taken over"):
        await committing
    await commit_new(second)
    assert rows_of(tmp_path) == [100]
    assert [row["epoch"] for row in epochs(tmp_path)] == [1]
