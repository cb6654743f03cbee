from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from ingestd.model.changes import change_schema
from ingestd.model.errors import TransientError
from ingestd.model.predicates import ColumnPredicate, IsNull, NotNull, OneOf, kept

if TYPE_CHECKING:
    from ingestd.model.predicates import Predicate
    from ingestd.ports import PageSource, Split
    from tests.contract.conftest import TableWorld

MANY = range(1, 300_001)


async def whole(world: TableWorld, snapshot: str) -> Split:
    [split] = await world.splits().splits(world.table, snapshot, 1 << 40)
    return split


async def batches(source: PageSource) -> list[pa.RecordBatch]:
    try:
        return [batch async for batch in source.batches()]
    finally:
        await source.close()


def ids(batch: pa.RecordBatch) -> list[int]:
    found: list[int] = batch.column("id").to_pylist()
    return found


async def read(source: PageSource) -> list[dict[str, Any]]:
    try:
        return [row async for batch in source.batches() for row in batch.to_pylist()]
    finally:
        await source.close()


async def test_it_gives_the_lakes_types_and_cdc_raw(world: TableWorld) -> None:
    world.insert(range(1, 11))
    schema = change_schema(world.table)
    async with world.snapshot() as snapshot:
        found = await batches(world.page_source(await whole(world, snapshot)))
    expected = pa.schema([schema.field(n) for n in ("id", "name", "_cdc_raw")])
    assert [b.schema for b in found] == [expected] * len(found)
    rows = [row for b in found for row in b.to_pylist()]
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


@pytest.mark.thorough
@pytest.mark.parametrize(
    "predicates",
    [
        [ColumnPredicate("id", ">", 100)],
        [ColumnPredicate("id", "=", 3)],
        [ColumnPredicate("name", "=", "row 4")],
        [ColumnPredicate("name", "<>", "row 4")],
        [ColumnPredicate("name", ">=", "row 4")],
        [OneOf("id", (2, 7, 1000))],
        [OneOf("id", ())],
        [IsNull("name")],
        [NotNull("name"), ColumnPredicate("id", "<=", 8)],
        [],
    ],
    ids=str,
)
async def test_applied_and_remaining_predicates_leave_the_wanted_rows(
    world: TableWorld, predicates: list[Predicate]
) -> None:
    world.insert(range(1, 11))
    async with world.snapshot() as snapshot:
        everything = await batches(world.page_source(await whole(world, snapshot)))
        source = world.page_source(await whole(world, snapshot), None, predicates)
        remaining = source.remaining
        assert set(remaining) <= set(predicates)
        left = [kept(batch, remaining) for batch in await batches(source)]
        assert source.remaining == remaining
    expected = [id_ for b in everything for id_ in ids(kept(b, predicates))]
    assert sorted(id_ for batch in left for id_ in ids(batch)) == sorted(expected)


async def test_a_predicate_may_be_about_a_column_that_is_not_asked_for(world: TableWorld) -> None:
    world.insert(range(1, 11))
    predicate = ColumnPredicate("id", ">", 8)
    async with world.snapshot() as snapshot:
        source = world.page_source(await whole(world, snapshot), ["name"], [predicate])
        names = [row["name"] for row in await read(source)]
    assert {"row 9", "row 10"} <= set(names)
    assert len(names) == (10 if predicate in source.remaining else 2)


async def test_a_predicate_about_an_unknown_column_is_refused(world: TableWorld) -> None:
    async with world.snapshot() as snapshot:
        split = await whole(world, snapshot)
        with pytest.raises(KeyError):
            world.page_source(split, None, [IsNull("nothing")])


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


@pytest.mark.thorough
async def test_it_can_be_closed_before_during_and_after_twice(world: TableWorld) -> None:
    world.insert(MANY)
    async with world.snapshot() as snapshot:
        split = await whole(world, snapshot)
        unused = world.page_source(split)
        await unused.close()
        begun = world.page_source(split)
        async with aclosing(begun.batches()) as running:  # type: ignore[type-var]
            assert (await anext(aiter(running))).num_rows > 0
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
