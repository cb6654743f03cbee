"""Conversion of an in-memory source's changes and rows to change rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from ingestd.model.changes import SNAPSHOT, SNAPSHOT_SEQ, TRUNCATE, TableBatch, change_schema
from ingestd.model.lsn import Lsn
from ingestd.model.schema import Table, TableId
from ingestd.testing.fakes.database import (
    RECORD_BYTES,
    REWRITE,
    UNIX_EPOCH,
    FakeChange,
    FakeTransaction,
)

Numbered = tuple[int, FakeChange]
"""A change and its `_cdc_seq`."""


def numbered(transaction: FakeTransaction, tables: Iterable[TableId]) -> list[Numbered]:
    """Return the changes of these tables that a stream sends."""
    taken = set(tables)
    sent = (c for c in transaction.changes if c.table in taken and c.op != REWRITE)
    return list(enumerate(sent, start=1))


def stream_batches(
    transaction: FakeTransaction, changes: Sequence[Numbered], tables: Mapping[TableId, Table]
) -> list[TableBatch]:
    """Return these changes of a transaction as the stream delivers them, one batch a table."""
    found: dict[TableId, list[dict[str, Any]]] = {}
    for seq, change in changes:
        row = {
            **_sent(change, tables[change.table]),
            "_cdc_op": change.op,
            "_cdc_lsn": int(transaction.commit_lsn),
            "_cdc_seq": seq,
            "_cdc_xid": transaction.xid,
            "_cdc_ts": UNIX_EPOCH + timedelta(microseconds=transaction.at_us),
        }
        found.setdefault(change.table, []).append(row)
    return [_batch(tables[name], rows) for name, rows in found.items()]


def _sent(change: FakeChange, table: Table) -> dict[str, object]:
    if change.op == TRUNCATE:
        return {}
    row = {name: value for name, value in change.row.items() if name not in change.unchanged}
    return {
        **row,
        "_cdc_before": None if change.before is None else {n: change.before[n] for n in table.key},
        "_cdc_unchanged": list(change.unchanged) or None,
    }


def read_batch(
    table: Table, rows: Iterable[Mapping[str, object]], position: Lsn, at: datetime
) -> TableBatch:
    """Return rows of a table as a snapshot at `position` delivers them."""
    system = {
        "_cdc_op": SNAPSHOT,
        "_cdc_lsn": int(position),
        "_cdc_seq": SNAPSHOT_SEQ,
        "_cdc_ts": at,
    }
    return _batch(table, [{**row, **system} for row in rows])


def _batch(table: Table, rows: Sequence[Mapping[str, Any]]) -> TableBatch:
    schema = change_schema(table)
    arrays = [pa.array([row.get(f.name) for row in rows], f.type) for f in schema]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    return TableBatch(table, batch, RECORD_BYTES * len(rows))
