"""Rows that come without values that nothing else has: what their table's error says.

A row that an UPDATE moves into a publication's row filter is sent as an INSERT. It lacks what is
TOASTed and unchanged, unless the old row was sent whole. Source: PostgreSQL,
src/backend/replication/pgoutput/pgoutput.c (pgoutput_row_filter).
"""

from __future__ import annotations

import pyarrow.compute as pc

from ingestd.model.changes import INSERT, TableBatch
from ingestd.model.errors import TableError
from ingestd.model.schema import TableId


def has_incomplete(batch: TableBatch) -> bool:
    """Return whether a row that is new lacks values that were not sent."""
    unchanged = batch.rows.column("_cdc_unchanged")
    if unchanged.null_count == len(unchanged):
        return False
    are_new = pc.equal(batch.rows.column("_cdc_op"), INSERT)
    return bool(pc.any(pc.and_(are_new, unchanged.is_valid())).as_py())


def incomplete_row(table: TableId) -> TableError:
    """Make the error of a table that such a row came of."""
    return TableError(
        table,
        "an UPDATE moved a row into the publication's row filter, and large values of it"
        " (TOASTed) were not sent: without them the row would be wrong",
        remedy="have old rows sent whole (ALTER TABLE ... REPLICA IDENTITY FULL), or publish the"
        " table without the row filter; then `ingestd snapshot` reads it",
    )
