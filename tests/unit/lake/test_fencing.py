"""Which daemon may take a lake back after a takeover (I5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from ingestd.lake.delta_lake import DeltaLake
from ingestd.lake.fencing import WriterIdentity
from ingestd.model.errors import OperatorError
from ingestd.model.lake_state import Notice
from ingestd.model.lsn import Lsn

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = "slot 'old', database shop", "slot 'new', database shop"


async def start(lake: Path, writer: WriterIdentity) -> DeltaLake:
    """Open the lake as one attempt of a daemon does."""
    opened = DeltaLake(str(lake), "shop", writer=writer)
    await opened.open()
    await opened.fence()
    await opened.adopt("server")
    return opened


async def noticed(lake: Path, writer: WriterIdentity) -> list[Notice]:
    opened = DeltaLake(str(lake), "shop", writer=writer)
    return list((await opened.open()).notices)


async def refused(lake: Path, writer: WriterIdentity) -> OperatorError:
    with pytest.raises(OperatorError) as caught:
        await start(lake, writer)
    return caught.value


async def test_one_writer_who_was_taken_over_from_does_not_fight_back(lake: Path) -> None:
    first, second = WriterIdentity(OLD), WriterIdentity(NEW)
    before = await start(lake, first)
    after = await start(lake, second)
    with pytest.raises(OperatorError, match="another ingestd has taken over") as caught:
        await before.advance(Lsn(105))
    error = await refused(lake, first)
    assert (caught.value.what, caught.value.remedy) == (error.what, error.remedy)
    assert f"its claim is {NEW}, that of this one {OLD}" in error.what
    assert "another source name" in str(error.remedy)
    await after.advance(Lsn(105))  # also once it has committed
    await refused(lake, first)
    await start(lake, second)


async def test_one_writer_a_daemon_that_is_started_takes_over(lake: Path) -> None:
    second = WriterIdentity(NEW)
    await start(lake, WriterIdentity(OLD))
    await start(lake, second)
    await start(lake, WriterIdentity(OLD))
    await refused(lake, second)


async def test_a_takeover_names_the_previous_writer_and_its_slot(lake: Path) -> None:
    first, second = WriterIdentity(OLD), WriterIdentity(NEW)
    assert await noticed(lake, first) == []
    await start(lake, first)
    [notice] = await noticed(lake, second)
    assert notice.event == "lake.taken_over"
    assert f"was last written by {OLD}; now {NEW} takes it over" in notice.what
    assert "another source name or lake.uri; else drop its slot" in notice.remedy
    assert notice.remedy.endswith("SELECT pg_catalog.pg_drop_replication_slot('old');")
    await start(lake, second)
    assert await noticed(lake, second) == []


@pytest.mark.parametrize("claim", [OLD, "slot 'old', database shop at 10.0.0.5", ""])
async def test_a_restart_or_mere_read_is_no_takeover(lake: Path, claim: str) -> None:
    await start(lake, WriterIdentity(OLD))
    assert await noticed(lake, WriterIdentity(claim)) == []


async def test_another_database_is_another_by_polling_too(lake: Path) -> None:
    first = WriterIdentity("polling, database shop at h port 5432")
    await start(lake, first)
    assert await noticed(lake, WriterIdentity("polling, database shop at other")) == []
    second = WriterIdentity("polling, database crm at h port 5432")
    assert [n.event for n in await noticed(lake, second)] == ["lake.taken_over"]
    await start(lake, second)
    await refused(lake, first)


async def test_a_look_at_a_lake_whose_newest_commit_is_cut_short(lake: Path) -> None:
    opened = await start(lake, WriterIdentity(OLD))
    await opened.advance(Lsn(105))
    newest = max((lake / "shop/_epochs/_delta_log").glob("*.json"))
    newest.write_bytes(newest.read_bytes()[:-20])
    with pytest.raises(OperatorError, match="truncated"):
        await DeltaLake(
            str(lake), "shop", writer=WriterIdentity(NEW), is_claimed=False
        ).last_claim()


async def test_no_slot_is_left_where_polling_was_before(lake: Path) -> None:
    await start(lake, WriterIdentity("polling, database shop"))
    [notice] = await noticed(lake, WriterIdentity(NEW))
    assert "last written by polling, database shop" in notice.what
    assert "slot" not in notice.remedy


async def test_one_writer_an_unsigned_commit_changes_nothing(lake: Path) -> None:
    """As those of OPTIMIZE, of ALTER and of our own maintenance."""
    first, second = WriterIdentity(OLD), WriterIdentity(NEW)
    await start(lake, first)
    await start(lake, second)
    DeltaTable(str(lake / "shop" / "_epochs")).alter.set_table_properties(
        {"note": "x"}, raise_if_not_exists=False
    )
    await refused(lake, first)
    await start(lake, second)


@pytest.mark.parametrize("other", [OLD, "slot 'old', database shop at 10.0.0.5", ""])
async def test_one_writer_a_reclaimed_lake_is_continued(lake: Path, other: str) -> None:
    """The other one has ended; one without a name for its claim is of an older version."""
    first = WriterIdentity(OLD)
    await start(lake, first)
    await start(lake, WriterIdentity(other))
    await start(lake, first)


async def test_one_writer_its_own_commits_are_no_ones_else(lake: Path) -> None:
    first = WriterIdentity(OLD)
    opened = await start(lake, first)
    await opened.advance(Lsn(105))
    await start(lake, first)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path


def test_polling_roles_differ_but_match_an_older_version() -> None:
    """Of two that poll by other roles neither may see the other's lock."""
    claims = [
        claim_text_as("reader"),
        claim_text_as("o'brien, database x"),
        claim_text_as("postgres"),
        claim_text_as("a at b"),
        claim_text_as("both ' and \""),
    ]
    for one in claims:
        for other in claims:
            told = WriterIdentity(one).other_claim(f"0123 {other}")
            assert told == (None if one == other else other)
        assert WriterIdentity(one).other_claim("0123 polling, database shop at h port 5432") is None
        assert WriterIdentity("polling, database shop").other_claim(f"0123 {one}") is None
        assert WriterIdentity(one).other_claim("0123 polling, database crm at h") == (
            "polling, database crm at h"
        )


def claim_text_as(role: str) -> str:
    return f"polling as role {role!r}, database shop at h port 5432"
