"""Rows that stop their table: too large, or without values that exist nowhere else.

The size of a row is that of its text form: a bytea has two characters per byte. It is limited by
its source's share of `limits.memory`, because a row is decoded as a whole. A larger one is received
in parts (`decode/pgoutput/shortening.py`); the contents of its columns that are not captured are
then unknown.

A row that an UPDATE moves into a publication's row filter is sent as an INSERT. It lacks TOASTed
values that did not change, unless the complete old row was sent. Source: PostgreSQL,
src/backend/replication/pgoutput/pgoutput.c (pgoutput_row_filter).

This module has the rules and the errors. Rows that are too large are found by `PgoutputDecoder`
(stream), `TablePages` (snapshot) and `scan_table` (poll), incomplete ones by `EpochAppender`.
"""

from __future__ import annotations

import pyarrow.compute as pc

from ingestd.model.changes import INSERT, TableBatch
from ingestd.model.errors import TableError
from ingestd.model.memory_shares import CONNECTOR
from ingestd.model.schema import TableId

UNLIMITED_BYTES = 1 << 31
"""No server sends more in one message."""
LEAST_BYTES = 1 << 20
_BESIDE_BYTES = 1 << 16
"""Overhead of a change besides its values: 5 bytes per column, for old and new values."""
_KEPT_PART = 4
"""Divisor of the row limit: how much is kept of the values of a larger change."""
_RESTART = "restart: the table is then re-read"
WITHOUT_ITS_VALUE = (
    "correct or delete the row at the source, or exclude the column (`exclude_columns`), and "
    f"{_RESTART}"
)
"""The remedy for a row that the server can't output."""
_KEY_PART = 16
"""A key that a sweep reads may take one nth of the limit: the sweep's queries contain the key as
text, in several forms."""


def row_limit_bytes(memory_bytes: int) -> int:
    """Return the bytes of text of the largest row: the share of its source.

    `memory_bytes`: the connector's, a quarter (`CONNECTOR`) of that share.
    """
    return min(UNLIMITED_BYTES, max(LEAST_BYTES, int(memory_bytes / CONNECTOR)))


def change_limit_bytes(row_limit_bytes: int) -> int:
    """Return the largest message with a change that may be buffered as a whole."""
    return row_limit_bytes + _BESIDE_BYTES


def kept_bytes(row_limit_bytes: int) -> int:
    """Return the bytes kept of the values of a change above the limit."""
    return row_limit_bytes // _KEPT_PART


def key_limit_bytes(row_limit_bytes: int) -> int:
    """Return the largest key that a sweep may read."""
    return row_limit_bytes // _KEY_PART


def key_too_large(table: TableId, key_bytes: int, limit_bytes: int) -> TableError:
    """Return the error of a table in which a sweep found a key of `key_bytes`."""
    return TableError(
        table,
        f"a key of {_megabytes(key_bytes)} MB, sent as text, is more than a sweep may hold"
        f" ({_megabytes(limit_bytes)} MB, a {_KEY_PART}th of the source's share of limits.memory)",
        remedy=f"raise `limits.memory`, or remove `detect_deletes` for the table, and {_RESTART}",
    )


def row_too_large(table: TableId, row_bytes: int, limit_bytes: int, where: str = "") -> TableError:
    """Return the error of a table with a row of `row_bytes`; `where` it was found."""
    return TableError(
        table,
        f"a row of {_megabytes(row_bytes)} MB, sent as text,{where and f' {where},'} is more than"
        f" the source may hold ({_megabytes(limit_bytes)} MB, its share of limits.memory)",
        remedy="exclude its large column (`exclude_columns`) or raise `limits.memory`, and"
        f" {_RESTART}",
    )


def refuse_too_large(table: TableId, row_bytes: int, limit_bytes: int, where: str = "") -> None:
    """Raise TableError if a row is larger than accepted; `where` it was found."""
    if row_bytes > limit_bytes:
        raise row_too_large(table, row_bytes, limit_bytes, where)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f}"


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
