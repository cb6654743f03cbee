"""What is owed of a table whose rows are read in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ingestd.changes import change_schema
from ingestd.run import touched as module
from ingestd.run.touched import Touched
from ingestd.schema import Column, Table, TableId
from ingestd.visibility import Visibility

if TYPE_CHECKING:
    import pytest

TABLE = Table(
    TableId("public", "t"),
    1,
    (Column("id", 23, -1, pa.int32(), identity=True), Column("big", 25, -1, pa.string())),
    key=("id",),
    before=("id",),
)


def lacking(*ids: int) -> pa.RecordBatch:
    rows = [{"id": i, "_cdc_op": "u", "_cdc_unchanged": ["big"]} for i in ids]
    return pa.RecordBatch.from_pylist(rows, change_schema(TABLE))


def test_rows_are_owed_once_where_many_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_UNSENT", 10)
    touched = Touched(TABLE, Visibility(1, 1), np.empty(0, np.int64))
    for _ in range(100):
        touched.owe(TABLE, lacking(1, 2, 3))
    assert touched.owes <= 3 + 10
    taken: list[tuple[str | bytes | None, ...]] = []
    while touched.owes:
        some = touched.take_unsent(2)
        assert 0 < len(some) <= 2
        taken += some
    assert set(taken) == {("1",), ("2",), ("3",)}
