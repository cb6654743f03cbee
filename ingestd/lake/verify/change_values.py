"""Changes as plain values, for the fold row by row (`ingestd.lake.fold.plain`)."""

from __future__ import annotations

import pyarrow as pa

from ingestd.digests.row_digests import RawTexts, given_by, values_of
from ingestd.lake.verify.change_digests import BEFORE, UNCHANGED
from ingestd.lake.verify.visible_changes import PLACE
from ingestd.model.changes import OF_BEFORE, field_of
from ingestd.ports.verify import Digested, ValueRows


def values_of_changes(batch: pa.RecordBatch, digested: Digested) -> ValueRows:
    """Return changes as `ingestd.lake.fold.plain` expects them, with the source's column names."""
    count = batch.num_rows
    raw = RawTexts(batch.column("_cdc_raw"))
    given = given_by(batch)
    before = given(BEFORE)
    lsn = batch.column("_cdc_lsn").to_pylist()
    rows: ValueRows = [dict.fromkeys(("_cdc_raw", BEFORE, UNCHANGED)) for _ in range(count)]
    for name in PLACE[:3]:
        for row, value in zip(rows, batch.column(name).to_pylist(), strict=True):
            row[name] = value
    owner = {n: c.name for c in digested.columns for n in c.stored}
    unchanged = given(UNCHANGED)
    for row, names in zip(
        rows, [None] * count if unchanged is None else unchanged.to_pylist(), strict=True
    ):
        row[UNCHANGED] = [owner[n] for n in names or () if n in owner] or None
    has_before = [False] * count if before is None else before.is_valid().to_pylist()
    for row, is_there in zip(rows, has_before, strict=True):
        row[BEFORE] = {} if is_there else None

    def given_before(name: str) -> pa.Array | None:
        if before is None or before.type.get_field_index(name) < 0:
            return None
        return field_of(before, name)

    for column in digested.columns:
        own = values_of(column, given, raw, count)
        old = values_of(column, given_before, raw, count, OF_BEFORE)
        is_old = any(given_before(n) is not None for n in column.stored)
        for number, row in enumerate(rows):
            is_older = lsn[number] < column.since_lsn
            row[column.name] = column.missing if is_older else own[number]
            if is_old and row[BEFORE] is not None:
                row[BEFORE][column.name] = column.missing if is_older else old[number]
    return rows
