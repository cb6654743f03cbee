"""The last rows of a Delta table, held against sorting all of them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, WriterProperties, write_deltalake

from ingestd.lake.delta.newest_rows import newest_rows
from ingestd.lake.store.store import open_store

if TYPE_CHECKING:
    from pathlib import Path

ORDER = ("lsn", "seq")


def rows_of(first: int, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows with a nested column before the position, in no order."""
    rows = [
        {"nested": {"a": n, "b": [n]}, "lsn": first + n // 3, "seq": n % 3, "n": first * 1000 + n}
        for n in range(count)
    ]
    random.Random(seed).shuffle(rows)
    return rows


def append(lake: Path, rows: list[dict[str, Any]], group: int = 7) -> None:
    write_deltalake(
        str(lake / "t"),
        pa.Table.from_pylist(rows),
        mode="append",
        writer_properties=WriterProperties(max_row_group_size=group),
    )


def newest(lake: Path, limit: int) -> list[dict[str, Any]] | None:
    return newest_rows(open_store(str(lake), None), "t", ORDER, limit)


@pytest.mark.parametrize("limit", [1, 5, 40, 1000])
def test_it_gives_what_sorting_gives(tmp_path: Path, limit: int, seed: int) -> None:
    every = []
    for number, first in enumerate((50, 10, 30, 55)):  # the files overlap, and are in no order
        rows = rows_of(first, 60, seed + number)
        append(tmp_path, rows)
        every += rows
    every.sort(key=lambda row: (row["lsn"], row["seq"]), reverse=True)
    found = newest(tmp_path, limit)
    assert found is not None
    assert len(found) == min(limit, len(every))
    positions = [(row["lsn"], row["seq"]) for row in found]
    assert positions == [(row["lsn"], row["seq"]) for row in every[:limit]]
    assert len({row["n"] for row in found}) == len(found)
    assert all(row in every for row in found)


def test_files_that_can_have_none_of_them_are_not_opened(tmp_path: Path) -> None:
    append(tmp_path, rows_of(0, 30, 0))
    [old] = DeltaTable(str(tmp_path / "t")).file_uris()
    append(tmp_path, rows_of(100, 30, 0))
    (tmp_path / "t" / old.rpartition("/")[2]).unlink()
    found = newest(tmp_path, 30)
    assert found is not None
    assert {row["n"] // 1000 for row in found} == {100}


def test_no_table_is_none_and_an_empty_one_has_no_rows(tmp_path: Path) -> None:
    assert newest(tmp_path, 3) is None
    append(tmp_path, rows_of(0, 3, 0))
    DeltaTable(str(tmp_path / "t")).delete()
    assert newest(tmp_path, 3) == []
