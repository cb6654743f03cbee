"""Current rows kept beside: only changes are read, and what does not fit is read again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

import ingestd
from ingestd.lake.layout import Layout
from ingestd.model.errors import OperatorError
from ingestd.model.schema import Column
from tests.harness.raw_lake import RawLake
from tests.unit.lake.rows import make_table

ORDERS = make_table("orders")


@pytest.fixture
def lake(tmp_path: Path) -> RawLake:
    """Rows 1 to 3 at epoch 1."""
    raw = RawLake(tmp_path / "lake")
    place = {"_cdc_lsn": raw.next_lsn(), "_cdc_op": "r", "_cdc_seq": 0, "note": "a"}
    raw.commit({ORDERS: [{**place, "id": n} for n in (1, 2, 3)]})
    raw.record("live", ORDERS, snapshot_lsn=raw.lsn)
    return raw


def change(lake: RawLake, *rows: dict[str, Any]) -> None:
    lsn = lake.next_lsn()
    lake.commit({ORDERS: [{"_cdc_lsn": lsn, "_cdc_seq": n, **r} for n, r in enumerate(rows, 1)]})


def read(lake: RawLake, **more: Any) -> dict[int, str]:
    cache = str(lake.uri.parent / "cache")
    table = ingestd.open_lake(str(lake.uri), cache=cache).source("shop").table("public.orders")
    return {row["id"]: row["note"] for row in table.current(**more).to_pylist()}


def entries(lake: RawLake) -> list[int]:
    """Return the epochs of the entries."""
    metas = (lake.uri.parent / "cache").rglob("cache.json")
    return [json.loads(path.read_text())["epoch"] for path in metas]


def remove_files(lake: RawLake) -> None:
    """Remove the raw table's files, so that none of their rows can be read."""
    for path in (lake.uri / Layout("shop").raw(ORDERS.id)).glob("*.parquet"):
        path.unlink()


def test_only_the_changes_since_are_read(lake: RawLake) -> None:
    assert read(lake) == {1: "a", 2: "a", 3: "a"}
    remove_files(lake)
    unsent = {"_cdc_op": "u", "_cdc_unchanged": ["note"]}
    change(lake, {"id": 1, "_cdc_op": "d"}, {"id": 4, "note": "b"})
    change(lake, {"id": 7, "_cdc_before": {"id": 2}, **unsent}, {"id": 3, **unsent})
    assert read(lake) == {3: "a", 4: "b", 7: "a"}
    assert read(lake, where=pc.field("id") == 7) == {7: "a"}
    assert read(lake, at=2) == {2: "a", 3: "a", 4: "b"}
    assert read(lake, at=1) == {1: "a", 2: "a", 3: "a"}
    assert entries(lake) == [1]


def test_an_earlier_epoch_is_read_from_the_lake(lake: RawLake) -> None:
    change(lake, {"id": 4, "note": "b"})
    assert len(read(lake)) == 4
    assert len(read(lake, at=1)) == 3
    assert entries(lake) == [2]


def truncate(lake: RawLake) -> dict[int, str]:
    change(lake, {"_cdc_op": "t"}, {"id": 9, "note": "z"})
    return {9: "z"}


def snapshot_of_a_deleted_row(lake: RawLake) -> dict[int, str]:
    """A row that is read before it is deleted, and arrives afterwards."""
    lsn = lake.lsn
    change(lake, {"id": 1, "_cdc_op": "d"})
    assert read(lake) == {2: "a", 3: "a"}
    late = {"_cdc_op": "r", "_cdc_lsn": lsn + 5, "_cdc_seq": 0, "id": 1, "note": "late"}
    change(lake, late)
    return {2: "a", 3: "a"}


def another_column(lake: RawLake) -> dict[int, str]:
    column = Column("extra", 23, -1, make_table("t").columns[0].type, missing="5")
    lake.next_lsn()
    lake.record("live", replace(ORDERS, columns=(*ORDERS.columns, column)), snapshot_lsn=110)
    change(lake, {"id": 4, "note": "b"})
    return {1: "a", 2: "a", 3: "a", 4: "b"}


def another_history(lake: RawLake) -> dict[int, str]:
    """The entry is of an epoch that another lake had under that number."""
    for path in (lake.uri.parent / "cache").rglob("cache.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"end": [1, "x"]}))
    change(lake, {"id": 4, "note": "b"})
    return {1: "a", 2: "a", 3: "a", 4: "b"}


def damage(lake: RawLake) -> dict[int, str]:
    for path in (lake.uri.parent / "cache").rglob("cache.json"):
        path.write_text("{")
    change(lake, {"id": 4, "note": "b"})
    return {1: "a", 2: "a", 3: "a", 4: "b"}


@pytest.mark.parametrize(
    "step", [truncate, snapshot_of_a_deleted_row, another_column, another_history, damage]
)
def test_what_does_not_fit_is_read_again(
    lake: RawLake, step: Callable[[RawLake], dict[int, str]]
) -> None:
    read(lake)
    expected = step(lake)
    assert read(lake) == expected
    assert entries(lake) == [lake.epoch]
    assert len(list((lake.uri.parent / "cache").rglob("*.parquet"))) <= 2


def test_a_folder_that_others_may_enter_is_refused(lake: RawLake) -> None:
    (lake.uri.parent / "cache").mkdir(mode=0o755)
    with pytest.raises(OperatorError, match="not a folder of this user only"):
        read(lake)
