from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from ingestd.changes import change_schema
from ingestd.errors import TransientError

if TYPE_CHECKING:
    from ingestd.ports import PageSource, Split
    from tests.contract.conftest import TableWorld

MANY = range(1, 200_001)


async def whole(world: TableWorld, snapshot: str) -> Split:
    [split] = await world.splits().splits(world.table, snapshot, 1 << 40)
    return split


async def read(source: PageSource) -> list[dict[str, Any]]:
    try:
        return [row async for batch in source.batches() for row in batch.to_pylist()]
    finally:
        await source.close()


async def test_it_gives_the_lakes_types_and_cdc_raw(world: TableWorld) -> None:
    world.insert(range(1, 11))
    schema = change_schema(world.table)
    async with world.snapshot() as snapshot:
        source = world.page_source(await whole(world, snapshot))
        batches = [batch async for batch in source.batches()]
        await source.close()
    expected = pa.schema([schema.field(n) for n in ("id", "name", "_cdc_raw")])
    assert [b.schema for b in batches] == [expected] * len(batches)
    rows = [row for b in batches for row in b.to_pylist()]
    assert sorted(rows, key=lambda r: r["id"]) == [
        {"id": i, "name": None if i == 7 else f"row {i}", "_cdc_raw": None} for i in range(1, 11)
    ]


@pytest.mark.parametrize("columns", [["name"], ["name", "id"], []])
async def test_projection_gives_these_columns_in_this_order(
    world: TableWorld, columns: list[str]
) -> None:
    world.insert(range(1, 4))
    async with world.snapshot() as snapshot:
        rows = await read(world.page_source(await whole(world, snapshot), columns))
    assert [list(row) for row in rows] == [[*columns, "_cdc_raw"]] * 3


async def test_an_unknown_column_is_refused(world: TableWorld) -> None:
    async with world.snapshot() as snapshot:
        split = await whole(world, snapshot)
        with pytest.raises(KeyError):
            world.page_source(split, ["nothing"])


async def test_what_it_cannot_apply_remains_and_nothing_is_missing(world: TableWorld) -> None:
    world.insert(range(1, 11))
    predicate = "id > 100"
    async with world.snapshot() as snapshot:
        source = world.page_source(await whole(world, snapshot), ["id"], [predicate])
        rows = await read(source)
    if predicate in source.remaining:
        assert sorted(row["id"] for row in rows) == list(range(1, 11))
    else:
        assert rows == []


async def test_a_table_larger_than_a_batch_comes_in_several(world: TableWorld) -> None:
    world.insert(MANY)
    async with world.snapshot() as snapshot:
        source = world.page_source(await whole(world, snapshot))
        sizes, ids = [], []
        async for batch in source.batches():
            sizes.append(batch.num_rows)
            ids += batch.column("id").to_pylist()
        await source.close()
    assert len(sizes) > 1
    assert sorted(ids) == list(MANY)


async def test_it_can_be_closed_before_during_and_after_twice(world: TableWorld) -> None:
    world.insert(MANY)
    async with world.snapshot() as snapshot:
        split = await whole(world, snapshot)
        unused = world.page_source(split)
        await unused.close()
        begun = world.page_source(split)
        async with aclosing(begun.batches()) as batches:  # type: ignore[type-var]
            assert (await anext(aiter(batches))).num_rows > 0
            await begun.close()
            await begun.close()
        ended = world.page_source(split, ["id"])
        assert len(await read(ended)) == len(MANY)
        await ended.close()


async def test_a_snapshot_that_ended_is_transient(world: TableWorld) -> None:
    world.insert(range(1, 4))
    async with world.snapshot() as snapshot:
        split = await whole(world, snapshot)
    with pytest.raises(TransientError) as caught:
        await read(world.page_source(split))
    assert caught.value.reason == "snapshot_gone"
