"""Bounds of files: right, or left out."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ingestd.lake.delta.file_statistics import file_statistics, has_statistics


def stats(tmp_path: Path, table: pa.Table, *, row_group_size: int = 2) -> Any:
    path = tmp_path / "x.parquet"
    pq.write_table(table, path, row_group_size=row_group_size)
    chosen = [f.name for f in table.schema if has_statistics(f.type)]
    return json.loads(file_statistics(pq.read_metadata(path), chosen))


def test_bounds_over_all_row_groups(tmp_path: Path) -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)
    table = pa.table(
        {
            "n": pa.array([3, None, 1, 2, None, None], pa.int64()),
            "s": ["b", "a", "é", "z", None, "a"],
            "d": pa.array([date(2020, 1, 1)] * 6, pa.date32()),
            "at": pa.array([at] * 6, pa.timestamp("us", tz="UTC")),
        }
    )
    found = stats(tmp_path, table)
    assert found["numRecords"] == 6
    assert found["minValues"] == {
        "n": 1,
        "s": "a",
        "d": "2020-01-01",
        "at": "2026-01-02T03:04:05.678Z",
    }
    assert found["maxValues"] == {
        "n": 3,
        "s": "é",
        "d": "2020-01-01",
        "at": "2026-01-02T03:04:05.679Z",
    }
    assert found["nullCount"] == {"n": 3, "s": 1, "d": 0, "at": 0}


def test_no_bounds_for_decimals_floats_long_texts_and_structs(tmp_path: Path) -> None:
    table = pa.table(
        {
            "dec": pa.array([Decimal("1.5")], pa.decimal128(20, 2)),
            "f": [1.5],
            "long": ["x" * 33],
            "a": pa.array([{"b": 1}], pa.struct([("b", pa.int64())])),
        }
    )
    found = stats(tmp_path, table)
    assert found["minValues"] == {}
    assert found["maxValues"] == {}


def test_a_column_named_like_a_path_is_not_taken_for_nested(tmp_path: Path) -> None:
    nested = pa.array([{"b": 7}], pa.struct([("b", pa.int64())]))
    found = stats(tmp_path, pa.table({"a": nested, "a.b": pa.array([1], pa.int64())}))
    assert found["minValues"] in ({}, {"a.b": 1})


def test_without_rows_with_values_there_are_no_bounds(tmp_path: Path) -> None:
    found = stats(tmp_path, pa.table({"n": pa.array([None, None], pa.int64())}))
    assert found["minValues"] == {}
    assert found["nullCount"] == {"n": 2}
