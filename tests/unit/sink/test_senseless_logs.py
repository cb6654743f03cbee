"""Commits whose actions make no sense concern the table that has them, no other one (I8)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ingestd.lake.delta_lake import DeltaLake
from tests.unit.sink.rows import inserts, make_table, summary

if TYPE_CHECKING:
    from pathlib import Path

T, OTHER = make_table("orders"), make_table("other")
ACTIONS = ("commitInfo", "add", "remove", "txn", "metaData", "protocol", "cdc", "unknown")
VALUES: tuple[object, ...] = (
    None,
    3,
    "x",
    [1],
    {},
    {"x": 1},
    {"path": 3},
    {"appId": 1, "version": "x"},
)


@pytest.mark.parametrize("action", ACTIONS)
async def test_isolated_a_commit_without_sense_stops_its_table_at_most(
    tmp_path: Path, action: str
) -> None:
    for number, value in enumerate(VALUES):
        root = tmp_path / str(number)
        lake = DeltaLake(str(root), "shop")
        await lake.open()
        await lake.adopt("7000000000000000001")
        await commit(lake, 100, 1)
        await lake.close()
        [newest] = sorted((root / "shop/public/orders/_delta_log").glob("*0.json"))
        write(newest.with_name(f"{1:020}.json"), {action: value})

        lake = DeltaLake(str(root), "shop")
        found = await lake.open()
        assert found.damaged.keys() <= {T.id}, value
        await commit(lake, 200, 2, with_orders=not found.damaged)
        await lake.close()


async def commit(lake: DeltaLake, position: int, number: int, *, with_orders: bool = True) -> None:
    writer = lake.begin()
    if with_orders:
        await writer.append(inserts(T, position, number))
    await writer.append(inserts(OTHER, position, number))
    await writer.commit(summary(position, position + 10))


def write(path: Path, action: dict[str, Any]) -> None:
    path.write_text(json.dumps(action) + "\n")
