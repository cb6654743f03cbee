"""Change rows for the sink's tests, written as plain dicts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from ingestd.model.changes import EpochSummary, TableBatch, change_schema
from ingestd.model.lake_state import TableEvent, TableState
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Column, Table, TableId

AT = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)


def make_table(name: str, *more: Column, oid: int = 1) -> Table:
    columns = (
        Column("id", 23, -1, pa.int32(), "integer", identity=True),
        Column("note", 25, -1, pa.string(), "text"),
        *more,
    )
    return Table(TableId("public", name), oid, columns, "d", ("id",), ("id",))


def make_batch(table: Table, rows: Sequence[dict[str, Any]]) -> TableBatch:
    schema = change_schema(table)
    filled = [{"_cdc_op": "c", "_cdc_xid": 7, "_cdc_ts": AT, **row} for row in rows]
    arrays = [pa.array([row.get(f.name) for row in filled], f.type) for f in schema]
    return TableBatch(table, pa.RecordBatch.from_arrays(arrays, schema=schema), 10 * len(rows))


def inserts(table: Table, lsn: int, *ids: int) -> TableBatch:
    return make_batch(
        table,
        [
            {"id": i, "note": f"note {i}", "_cdc_lsn": lsn, "_cdc_seq": seq}
            for seq, i in enumerate(ids, 1)
        ],
    )


def listed_live(table: Table) -> TableEvent:
    """Return what `_tables` says of a table that is read."""
    return TableEvent(table, TableState.LIVE, AT, Lsn(1), Lsn(1))


def summary(first: int, end: int) -> EpochSummary:
    return EpochSummary(Lsn(first), Lsn(end), AT, transactions=1, nbytes=100)
