"""Which lake a source belongs to: what this process knows, and what its sources exchange."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from ingestd.model.changes import EPOCH_FIELD
from ingestd.model.errors import LakeLostError
from ingestd.model.lake_state import LakeState, TableEvent, TableState, registered
from ingestd.model.lsn import LAST, Lsn
from ingestd.pipeline.known_lake import KnownLake, LakeRoot, read_lake
from ingestd.ports import Continuity, LakeLost, Resumed, ServerEnd
from ingestd.testing.fakes.capture import FakeCapture, FakeDatabase
from ingestd.testing.fakes.sink import MemoryLake, MemoryTable
from tests.unit.lake.rows import make_table

TABLE = make_table("t")
HERE = LakeState(3, Lsn(500), server_id="7/1", lake_id="a")


@pytest.mark.parametrize(
    ("committed", "told"),
    [
        (HERE, None),
        (replace(HERE, position=Lsn(600)), None),
        (replace(HERE, lake_id=None), None),  # only the id file was removed
        (replace(HERE, lake_id="b"), "another lake: its id is b, not a"),
        (replace(HERE, position=Lsn(499)), "older copy"),
        (replace(HERE, position=None), "older copy"),
        (LakeState(), "has nothing of this source any more"),
        (LakeState(lake_id="a"), "has nothing of this source any more"),
    ],
)
def test_a_lake_is_held_against_what_this_process_wrote(
    committed: LakeState, told: str | None
) -> None:
    known = KnownLake()
    assert known.difference(committed) is None  # nothing is known at first
    known.mark_found("a")
    known.note_position(Lsn(500))
    found = known.difference(committed)
    assert found is None if told is None else told in (found or "")


def test_what_was_agreed_to_holds_until_the_source_has_begun() -> None:
    known = KnownLake(is_accepted=True)
    known.mark_found("a")
    assert known.is_accepted
    known.note_position(Lsn(1))
    assert not known.is_accepted


async def test_a_lake_is_not_begun_while_it_is_lost_to_another_source() -> None:
    root = LakeRoot()
    for name in ("shop", "crm", "polled"):
        root.expect(name)
    waiting = asyncio.create_task(root.ensure_not_lost("polled"))
    root.fail("crm")  # unknown: its database does not answer
    await asyncio.sleep(0)
    assert not waiting.done()
    root.report("shop", "it has nothing")
    with pytest.raises(LakeLostError, match="lost to source shop"):
        await waiting
    root.report("shop", None)
    await root.ensure_not_lost("polled")
    root.report("shop", "lost again")
    root.drop_source("shop")
    await root.ensure_not_lost("polled")


async def test_sources_that_all_begin_do_not_wait_for_each_other() -> None:
    root = LakeRoot()
    for name in ("shop", "crm"):
        root.expect(name)
    async with asyncio.timeout(1):
        await asyncio.gather(root.ensure_not_lost("shop"), root.ensure_not_lost("crm"))


async def test_one_that_knows_nothing_is_not_waited_for_long() -> None:
    root = LakeRoot(patience_s=0.01)
    root.expect("hangs")
    await root.ensure_not_lost("shop")


@pytest.mark.parametrize("grows", [True, False])
async def test_a_lake_that_grows_meanwhile_is_read_again(*, grows: bool) -> None:
    """A daemon that has lost its claim may commit and confirm between the two questions."""
    lake = MemoryLake()
    lake.disk.position = Lsn(100)

    class Ahead(FakeCapture):
        async def continuity(self, committed: LakeState) -> Continuity:
            if grows:
                lake.disk.position = Lsn(200)
            is_whole = (committed.position or 0) >= Lsn(200)
            return Resumed() if is_whole else LakeLost("the slot is at 200")

    committed, continuity = await read_lake(lake, Ahead(FakeDatabase([])))
    assert (committed.position, isinstance(continuity, Resumed)) == (
        Lsn(200 if grows else 100),
        grows,
    )


@pytest.mark.parametrize(
    ("reached", "position", "refused"),
    [
        (Lsn(150), Lsn(100), False),  # a crash came between a table's commit and the epoch's
        (Lsn(151), Lsn(100), True),
        (LAST, Lsn(100), True),
        (LAST, None, True),
        (Lsn(150), Lsn(200), False),  # the server is behind the whole lake
    ],
)
async def test_a_table_that_the_server_has_not_reached_is_damaged(
    reached: Lsn, position: Lsn | None, *, refused: bool
) -> None:
    lake = lake_with(reached, position)
    committed, _ = await read_lake(lake, Server(150))
    assert committed.damaged.keys() == ({TABLE.id} if refused else set())
    assert committed.watermarks.keys() == (set() if refused else {TABLE.id})
    assert committed.position == position


@pytest.mark.parametrize(
    ("patience_s", "ends", "refused", "asked"),
    [
        (60.0, (150, 150, 300), False, 3),
        (0.0, (150, 300), True, 1),
        (0.01, (150, 150), True, 2),
    ],
)
async def test_a_standby_may_receive_what_a_table_has(
    patience_s: float,
    ends: tuple[int, ...],
    asked: int,
    *,
    refused: bool,
) -> None:
    server = Server(*ends, in_recovery=True)
    lake = lake_with(Lsn(200), Lsn(100))
    committed, _ = await read_lake(lake, server, patience_s)
    assert bool(committed.damaged) is refused
    assert server.asked == asked


class Server(FakeCapture):
    """A server that ends at each of these positions in turn, then at the last one."""

    def __init__(self, *ends: int, in_recovery: bool = False) -> None:
        super().__init__(FakeDatabase([]))
        self._ends = ends
        self._in_recovery = in_recovery
        self.asked = 0

    async def server_end(self, committed: LakeState) -> ServerEnd:
        del committed
        self.asked += 1
        return ServerEnd(Lsn(self._ends[min(self.asked, len(self._ends)) - 1]), self._in_recovery)

    async def continuity(self, committed: LakeState) -> Continuity:
        del committed
        return Resumed()


def lake_with(reached: Lsn, position: Lsn | None) -> MemoryLake:
    """A lake with a live table up to `reached`."""
    lake = MemoryLake()
    lake.disk.position = position
    nothing = pa.table({EPOCH_FIELD.name: pa.array([], pa.int64())})
    lake.disk.tables[TABLE.id] = MemoryTable([nothing], reached)
    event = TableEvent(TABLE, TableState.LIVE, datetime(2026, 1, 1, tzinfo=UTC), Lsn(1))
    lake.disk.registered[TABLE.id] = registered(event, None)
    return lake
