from __future__ import annotations

import pyarrow as pa

from ingestd.changes import change_schema
from ingestd.run.epoch import Tally
from tests.unit.run.fixtures import A


def rows(*raw: list[tuple[str, str]] | None) -> pa.RecordBatch:
    schema = change_schema(A)
    values = {"_cdc_op": ["c"] * len(raw), "_cdc_raw": list(raw)}
    arrays = [pa.array(values.get(f.name, [None] * len(raw)), f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def test_lossless_values_kept_as_text_are_counted() -> None:
    tally = Tally()
    batch = rows(None, [("id", "infinity")], [("id", "NaN"), ("_cdc_before.id", "x")], None)
    tally.count(batch)
    assert (tally.ops["c"], tally.raw_values) == (4, 3)
    assert tally.raw_columns == {"id": 2, "_cdc_before.id": 1}
    assert tally.raw_types == {"id": pa.int64(), "_cdc_before.id": pa.int64()}
    tally.count(batch.slice(2, 2))
    assert (tally.ops["c"], tally.raw_values) == (6, 5)
    assert tally.raw_columns == {"id": 3, "_cdc_before.id": 2}
    tally.count(batch.slice(3))
    assert tally.raw_values == 5
