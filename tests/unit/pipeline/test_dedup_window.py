"""The rows owed of a table that is read in chunks."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ingestd.model.changes import change_schema
from ingestd.model.pg_snapshot import PgSnapshot
from ingestd.model.schema import Column, Table, TableId
from ingestd.pipeline.dedup_window import DedupWindow

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


def renamed(*pairs: tuple[int, int]) -> pa.RecordBatch:
    rows = [
        {"id": new, "_cdc_op": "u", "_cdc_unchanged": ["big"], "_cdc_before": {"id": old}}
        for old, new in pairs
    ]
    return pa.RecordBatch.from_pylist(rows, change_schema(TABLE))


def test_rows_are_owed_once_where_many_are() -> None:
    touched = DedupWindow(TABLE, PgSnapshot(1, 1), np.empty(0, np.int64), most_unsent=10)
    for _ in range(100):
        touched.add_unsent_rows(TABLE, lacking(1, 2, 3))
    assert touched.rows_to_read <= 3 + 10
    taken: list[tuple[str | bytes | None, ...]] = []
    while touched.rows_to_read:
        some = touched.pop_unsent_keys(2)
        assert 0 < len(some) <= 2
        taken += some
    assert set(taken) == {("1",), ("2",), ("3",)}


def test_a_closed_window_owes_new_keys_only_of_owed_rows() -> None:
    """Or a source that changes keys faster than they are read would never let it end."""
    touched = DedupWindow(TABLE, PgSnapshot(1, 1), np.empty(0, np.int64))
    touched.add_unsent_rows(TABLE, lacking(1, 2))
    touched.close()
    touched.add_unsent_rows(TABLE, lacking(1, 7))
    touched.add_unsent_rows(TABLE, renamed((8, 9), (1, 11), (11, 12), (3, 3)))
    assert touched.rows_to_read == 4
    asked = touched.pop_unsent_keys(10)
    assert asked == {("1",), ("2",), ("11",), ("12",)}
    touched.add_unsent_rows(TABLE, renamed((2, 22), (22, 23), (9, 10)))  # while they are read
    assert touched.rows_to_read == 2
    touched.requeue_keys({("12",)})
    touched.add_unsent_rows(TABLE, renamed((1, 100), (12, 13)))
    assert touched.pop_unsent_keys(10) == {("22",), ("23",), ("12",), ("13",)}
    touched.requeue_keys(set())
    assert touched.rows_to_read == 0
