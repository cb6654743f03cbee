"""Who may take a lake back that another daemon has taken over (I5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from ingestd.errors import OperatorError, TransientError
from ingestd.positions import Lsn
from ingestd.sink.lake import DeltaLake
from ingestd.sink.writer import Writer

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = "slot 'old', database shop", "slot 'new', database shop"


async def start(lake: Path, writer: Writer) -> DeltaLake:
    """Open the lake as one attempt of a daemon does."""
    opened = DeltaLake(str(lake), "shop", writer=writer)
    await opened.open()
    await opened.fence()
    await opened.adopt("server")
    return opened


async def refused(lake: Path, writer: Writer) -> OperatorError:
    with pytest.raises(OperatorError) as caught:
        await start(lake, writer)
    return caught.value


async def test_one_writer_who_was_taken_over_from_does_not_fight_back(lake: Path) -> None:
    first, second = Writer(OLD), Writer(NEW)
    before = await start(lake, first)
    after = await start(lake, second)
    with pytest.raises(TransientError, match="another ingestd has taken over"):
        await before.advance(Lsn(105))
    error = await refused(lake, first)
    assert f"it works by {NEW}, this one by {OLD}" in error.what
    assert "another source name" in str(error.remedy)
    await after.advance(Lsn(105))  # also once it has committed
    await refused(lake, first)
    await start(lake, second)


async def test_one_writer_a_daemon_that_is_started_takes_over(lake: Path) -> None:
    second = Writer(NEW)
    await start(lake, Writer(OLD))
    await start(lake, second)
    await start(lake, Writer(OLD))
    await refused(lake, second)


async def test_one_writer_a_commit_that_nobody_signed_changes_nothing(lake: Path) -> None:
    """As those of OPTIMIZE, of ALTER and of our own maintenance."""
    first, second = Writer(OLD), Writer(NEW)
    await start(lake, first)
    await start(lake, second)
    DeltaTable(str(lake / "shop" / "_epochs")).alter.set_table_properties(
        {"note": "x"}, raise_if_not_exists=False
    )
    await refused(lake, first)
    await start(lake, second)


@pytest.mark.parametrize("other", [OLD, "slot 'old', database shop at 10.0.0.5", ""])
async def test_one_writer_who_has_the_claim_again_goes_on(lake: Path, other: str) -> None:
    """The other is gone; one without a name for its claim is of an older version."""
    first = Writer(OLD)
    await start(lake, first)
    await start(lake, Writer(other))
    await start(lake, first)


async def test_one_writer_its_own_commits_are_no_ones_else(lake: Path) -> None:
    first = Writer(OLD)
    opened = await start(lake, first)
    await opened.advance(Lsn(105))
    await start(lake, first)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path
