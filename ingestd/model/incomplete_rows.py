"""Rows that lack values which exist nowhere else, and their table's error.

A row that an UPDATE moves into a publication's row filter is sent as an INSERT. It lacks TOASTed
values that did not change, unless the complete old row was sent. Source: PostgreSQL,
src/backend/replication/pgoutput/pgoutput.c (pgoutput_row_filter).
"""

from __future__ import annotations

import pyarrow.compute as pc

from ingestd.model.changes import INSERT, TableBatch
from ingestd.model.errors import TableError
from ingestd.model.schema import TableId


def has_incomplete(batch: TableBatch) -> bool:
    """Return whether a new row lacks values that were not sent."""
    unchanged = batch.rows.column("_cdc_unchanged")
    if unchanged.null_count == len(unchanged):
        return False
    are_new = pc.equal(batch.rows.column("_cdc_op"), INSERT)
    return bool(pc.any(pc.and_(are_new, unchanged.is_valid())).as_py())


def incomplete_row(table: TableId) -> TableError:
    """Return the error of a table with such a row."""
    return TableError(
        table,
        "an UPDATE moved a row into the publication's row filter, and the server did not send its"
        " large (TOASTed) values: without them the row would be wrong",
        remedy="make the server send complete old rows (ALTER TABLE ... REPLICA IDENTITY FULL), or"
        " publish the table without the row filter; then re-read it with `ingestd snapshot`",
    )
