from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest

from ingestd.model.changes import NO_COMMITS, ChangeSet, TableBatch, change_schema
from ingestd.model.lake_state import UnlistedRows
from ingestd.model.lsn import Lsn
from ingestd.pipeline.dedup_window import RecentXids
from ingestd.pipeline.filling_epoch import FillingEpoch, RowTally
from tests.unit.pipeline.fixtures import A

NOTHING: Any = {"commit_times": NO_COMMITS, "nbytes": 0}


def rows(*raw: list[tuple[str, str]] | None) -> pa.RecordBatch:
    schema = change_schema(A)
    values = {"_cdc_op": ["c"] * len(raw), "_cdc_raw": list(raw)}
    arrays = [pa.array(values.get(f.name, [None] * len(raw)), f.type) for f in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def test_lossless_values_kept_as_text_are_counted() -> None:
    tally = RowTally()
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


@pytest.mark.parametrize(("replayed", "first"), [(None, 200), (150, 150), (250, 200)])
def test_an_epoch_begins_at_its_first_unlisted_or_new_row(replayed: int | None, first: int) -> None:
    """Rows left by a killed attempt come again from a source that replays, not from others."""
    epoch = FillingEpoch(Mock(rows=1), start=Lsn(100))
    epoch.add_unlisted(UnlistedRows(Lsn(200), Lsn(220), datetime(2026, 1, 2, tzinfo=UTC)))
    given = None if replayed is None else Lsn(replayed)
    for first_lsn in (given, None, Lsn(400)):
        change_set = ChangeSet(
            (), Lsn(500), ends_in_transaction=False, first_lsn=first_lsn, **NOTHING
        )
        epoch.add_change_set(change_set, 0.0)
    assert epoch.summary().first_lsn == first


def test_changes_without_a_transaction_id_are_not_remembered() -> None:
    batch = rows(None, None, None)
    at = batch.schema.get_field_index("_cdc_xid")
    field = batch.schema.field(at)
    delivered = RecentXids()
    for xids in ([None, 7, 7], [None, None, None]):
        some = batch.set_column(at, field, pa.array(xids, field.type))
        delivered.record_changes(TableBatch(A, some, 1))
    assert delivered.of_table(A.id).tolist() == [7]
