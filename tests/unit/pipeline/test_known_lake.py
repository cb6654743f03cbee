"""Which lake a source belongs to: what this process knows, and what its sources exchange."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ingestd.model.errors import LakeLostError
from ingestd.model.lake_state import LakeState
from ingestd.model.lsn import Lsn
from ingestd.pipeline import known_lake
from ingestd.pipeline.known_lake import KnownLake, LakeRoot, read_lake
from ingestd.ports import Continuity, LakeLost, Resumed
from ingestd.testing.fakes.capture import FakeCapture, FakeDatabase
from ingestd.testing.fakes.sink import MemoryLake

HERE = LakeState(3, Lsn(500), origin="7/1", lake="a")


@pytest.mark.parametrize(
    ("committed", "told"),
    [
        (HERE, None),
        (replace(HERE, position=Lsn(600)), None),
        (replace(HERE, lake=None), None),  # only the marker was removed
        (replace(HERE, lake="b"), "another lake: its id is b, not a"),
        (replace(HERE, position=Lsn(499)), "older copy"),
        (replace(HERE, position=None), "older copy"),
        (LakeState(), "has nothing of this source any more"),
        (LakeState(lake="a"), "has nothing of this source any more"),
    ],
)
def test_a_lake_is_held_against_what_this_process_wrote(
    committed: LakeState, told: str | None
) -> None:
    known = KnownLake()
    assert known.difference(committed) is None  # nothing is known at first
    known.is_found("a")
    known.has_begun(Lsn(500))
    found = known.difference(committed)
    assert found is None if told is None else told in (found or "")


def test_what_was_agreed_to_holds_until_the_source_has_begun() -> None:
    known = KnownLake(is_accepted=True)
    known.is_found("a")
    assert known.is_accepted
    known.has_begun(Lsn(1))
    assert not known.is_accepted


async def test_a_lake_is_not_begun_while_it_is_lost_to_another_source() -> None:
    root = LakeRoot()
    for name in ("shop", "crm", "polled"):
        root.expect(name)
    waiting = asyncio.create_task(root.may_begin("polled"))
    root.fail("crm")  # unknown: its database does not answer
    await asyncio.sleep(0)
    assert not waiting.done()
    root.say("shop", "it has nothing")
    with pytest.raises(LakeLostError, match="lost to source shop"):
        await waiting
    root.say("shop", None)
    await root.may_begin("polled")
    root.say("shop", "lost again")
    root.drop_source("shop")
    await root.may_begin("polled")


async def test_sources_that_all_begin_do_not_wait_for_each_other() -> None:
    root = LakeRoot()
    for name in ("shop", "crm"):
        root.expect(name)
    async with asyncio.timeout(known_lake.PATIENCE_S / 2):
        await asyncio.gather(root.may_begin("shop"), root.may_begin("crm"))


async def test_one_that_knows_nothing_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_lake, "PATIENCE_S", 0.01)
    root = LakeRoot()
    root.expect("hangs")
    await root.may_begin("shop")


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

    committed, verdict = await read_lake(lake, Ahead(FakeDatabase([])))
    assert (committed.position, isinstance(verdict, Resumed)) == (
        Lsn(200 if grows else 100),
        grows,
    )
