from __future__ import annotations

import json
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pytest

from spark_jobs.accelerator.driver_commit import statistics
from spark_jobs.accelerator.driver_merge import _files_that_may_have

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("other", pa.int32()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("_cdc_lsn", pa.int64()),
        ("_cdc_seq", pa.int64()),
    ]
)


def stats(*rows: dict[str, Any]) -> dict[str, Any]:
    return statistics(pa.Table.from_pylist(list(rows), SCHEMA), ["id", "_cdc_lsn", "_cdc_seq"])


def test_statistics_are_written_as_delta_does() -> None:
    first = {"id": 5, "day": date(2024, 2, 29), "at": datetime(2024, 1, 1, tzinfo=UTC)}
    second = {"id": -1, "local": datetime(2024, 1, 1, 1, 2, 3, 4), "_cdc_lsn": 7}  # noqa: DTZ001
    found = stats(first, second)
    assert found["numRecords"] == 2
    assert found["minValues"] == {
        "id": -1,
        "_cdc_lsn": 7,
        "day": "2024-02-29",
        "at": "2024-01-01T00:00:00.000000Z",
        "local": "2024-01-01T01:02:03.000004",
    }
    assert found["maxValues"]["id"] == 5
    assert found["nullCount"] == {
        "id": 0,
        "_cdc_lsn": 1,
        "_cdc_seq": 2,
        "day": 1,
        "at": 1,
        "local": 1,
    }


@pytest.mark.parametrize("year", [1, 999])
def test_no_bounds_that_a_reader_may_not_understand(year: int) -> None:
    found = stats({"id": 1, "day": date(year, 1, 1), "at": datetime(year, 1, 1, tzinfo=UTC)})
    assert found["minValues"] == {"id": 1}


@pytest.mark.parametrize(
    ("keys", "files"),
    [([4], []), ([5], ["a"]), ([10], ["a"]), ([11, 19], []), ([7, 25], ["a", "b"]), ([30], ["b"])],
)
def test_files_are_selected_by_key(keys: list[int], files: list[str]) -> None:
    def add(path: str, low: int, high: int) -> dict[str, Any]:
        bounds = (("minValues", low), ("maxValues", high))
        return {"path": path, "stats": json.dumps({name: {"id": at} for name, at in bounds})}

    adds = {"a": add("a", 5, 10), "b": add("b", 20, 30)}
    found = _files_that_may_have(adds, pa.table({"id": keys}), "id")
    assert [one["path"] for one in found] == files
    assert len(_files_that_may_have({"c": {"path": "c"}}, pa.table({"id": keys}), "id")) == 1
