"""What every PauseMark must do (ports.PauseMark), in memory, on a disk and in an object store."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from ingestd.lake.pause_mark import NAME, LakePauseMark
from ingestd.model.errors import OperatorError
from ingestd.testing.fakes.pause import FakePauseMark
from tests.contract.test_page_sink import NotedFsync
from tests.harness.object_store import ObjectStoreServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ingestd.ports import PauseMark

FIRST = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)
LATER = FIRST + timedelta(hours=1)


@pytest.fixture(params=["fake", "disk", "object store"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], PauseMark]]:
    """Return the mark of one source, as each process opens it."""
    if request.param == "fake":
        mark = FakePauseMark()
        yield lambda: mark
    elif request.param == "disk":
        yield lambda: LakePauseMark(str(tmp_path / "lake"), "shop")
    else:
        with ObjectStoreServer() as server:
            yield lambda: LakePauseMark(server.uri, "shop", storage_options=server.options)


async def test_a_source_is_paused_since_it_was_first_asked_for(
    make: Callable[[], PauseMark],
) -> None:
    assert await make().since() is None
    assert await make().put(FIRST) == FIRST
    assert await make().put(LATER) == FIRST
    assert await make().since() == FIRST


async def test_a_mark_that_was_taken_away_can_be_put_again(make: Callable[[], PauseMark]) -> None:
    mark = make()
    assert not await mark.clear()
    await mark.put(FIRST)
    assert await make().clear()
    assert await mark.since() is None
    assert not await mark.clear()
    assert await mark.put(LATER) == LATER


async def test_each_source_has_its_own(tmp_path: Path) -> None:
    await LakePauseMark(str(tmp_path), "shop").put(FIRST)
    assert await LakePauseMark(str(tmp_path), "legacy").since() is None


async def test_a_mark_is_durable_and_so_is_its_end(tmp_path: Path) -> None:
    fsync = NotedFsync()
    mark = LakePauseMark(str(tmp_path), "shop", durability=fsync)
    await mark.put(FIRST)
    assert tmp_path / "shop" in fsync.done
    fsync.done.clear()
    await mark.clear()
    assert tmp_path / "shop" in fsync.done


@pytest.mark.parametrize("content", ["", "{}", "[" * 9, '{"since": "2026-11-22"}', "by hand"])
async def test_a_file_that_a_person_made_pauses_since_it_was_written(
    tmp_path: Path, content: str
) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / NAME).write_text(content)
    since = await LakePauseMark(str(tmp_path), "shop").since()
    assert since is not None
    written = (tmp_path / "shop" / NAME).stat().st_mtime
    assert abs(since.timestamp() - written) < 0.001


async def test_an_unreadable_lake_is_reported_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "shop").write_text("a file where a folder should be")
    with pytest.raises(OperatorError, match="shop is not a folder") as told:
        await LakePauseMark(str(tmp_path), "shop").put(FIRST)
    assert told.value.remedy
