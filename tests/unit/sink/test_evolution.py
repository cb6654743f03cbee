"""Schemas only grow, and never by a cast."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ingestd.sink.evolution import SchemaConflictError, additions, evolved

LAKE = pa.schema([("id", pa.int32()), ("_cdc_before", pa.struct([("id", pa.int32())]))])


def test_new_columns_and_fields_are_added_in_place() -> None:
    rows = pa.schema([("note", pa.string()), ("_cdc_before", pa.struct([("note", pa.string())]))])
    whole = evolved(LAKE, rows)
    before = pa.struct([("id", pa.int32()), ("note", pa.string())])
    assert whole == pa.schema([("id", pa.int32()), ("_cdc_before", before), ("note", pa.string())])
    assert [f.name for f in additions(LAKE, whole)] == ["_cdc_before", "note"]
    assert additions(whole, whole) == []


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (pa.schema([("id", pa.int64())]), "integer in the lake and its rows are now long"),
        (pa.schema([("ID", pa.int32())]), "only by case"),
        (pa.schema([("t", pa.time64("us"))]), "no Delta type"),
        (pa.schema([("_cdc_before", pa.struct([("id", pa.string())]))]), "_cdc_before.id"),
    ],
)
def test_lossless_what_does_not_fit_is_refused(rows: pa.Schema, message: str) -> None:
    with pytest.raises(SchemaConflictError, match=message):
        evolved(LAKE, rows)
