from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest

from ingestd.model.errors import TransientError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ingestd.ports import Split
    from tests.contract.conftest import TableWorld

ROWS = range(1, 5001)


async def read_ids(world: TableWorld, splits: Sequence[Split]) -> list[int]:
    found: list[int] = []
    for split in splits:
        source = world.page_source(split, ["id"])
        try:
            async for batch in source.batches():
                found += batch.column("id").to_pylist()
        finally:
            await source.close()
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("target_bytes", [1, 10_000, 1 << 40])
async def test_exactly_once_every_row_whatever_the_number_of_splits(
    world: TableWorld, target_bytes: int
) -> None:
    world.insert(ROWS)
    async with world.snapshot() as snapshot:
        splits = await world.splits().splits(world.table, snapshot, target_bytes)
        assert sorted(await read_ids(world, splits)) == list(ROWS)


async def test_a_smaller_target_gives_more_splits(world: TableWorld) -> None:
    world.insert(ROWS)
    async with world.snapshot() as snapshot:
        manager = world.splits()
        counts = [
            len(await manager.splits(world.table, snapshot, target))
            for target in (1 << 40, 100_000, 10_000)
        ]
    assert counts[0] == 1
    assert counts == sorted(counts)
    assert counts[2] >= 10


async def test_an_empty_table_has_one_split_without_rows(world: TableWorld) -> None:
    async with world.snapshot() as snapshot:
        splits = await world.splits().splits(world.table, snapshot, 1000)
        assert len(splits) == 1
        assert await read_ids(world, splits) == []


async def test_all_splits_see_the_snapshot_and_nothing_later(world: TableWorld) -> None:
    world.insert(ROWS)
    async with world.snapshot() as snapshot:
        world.insert(range(100_001, 100_101))
        splits = await world.splits().splits(world.table, snapshot, 20_000)
        world.clear()
        world.insert(range(200_001, 209_001))
        assert sorted(await read_ids(world, splits)) == list(ROWS)


async def test_a_split_names_its_table_and_can_be_pickled(
    world: TableWorld,
) -> None:
    world.insert(ROWS)
    async with world.snapshot() as snapshot:
        splits = await world.splits().splits(world.table, snapshot, 50_000)
        assert all(s.table == world.table and s.snapshot == snapshot for s in splits)
        assert all(s.estimated_bytes > 0 for s in splits)
        travelled = [pickle.loads(pickle.dumps(s)) for s in splits]
        assert travelled == list(splits)
        assert sorted(await read_ids(world, travelled)) == list(ROWS)


async def test_a_snapshot_that_ended_is_transient(world: TableWorld) -> None:
    world.insert(ROWS)
    async with world.snapshot() as snapshot:
        pass
    with pytest.raises(TransientError) as caught:
        await world.splits().splits(world.table, snapshot, 1000)
    assert caught.value.reason == "snapshot_gone"


async def test_a_target_of_nothing_is_refused(world: TableWorld) -> None:
    async with world.snapshot() as snapshot:
        with pytest.raises(ValueError, match="target_bytes"):
            await world.splits().splits(world.table, snapshot, 0)
