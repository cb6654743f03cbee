"""Rows that are too large to be taken: what their table's error says.

A row counts as the server sends it, as text: a bytea has two characters for each byte. Its size is
bounded by its source's share of `limits.memory`, because it is decoded as a whole. A larger one is
received piece by piece (`decode/pgoutput/shortening.py`): of what is not captured in it nobody
knows then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ingestd.model.errors import TableError
from ingestd.model.memory_shares import CONNECTOR

if TYPE_CHECKING:
    from ingestd.model.schema import TableId

UNLIMITED_BYTES = 1 << 31
"""No server sends more in one message."""
LEAST_BYTES = 1 << 20
_BESIDE_BYTES = 1 << 16
"""What a change has beside its values: 5 bytes a column, for old and new values."""
_KEPT_PART = 4
"""Of a change that is larger, one in so many of the limit is kept of its values."""
_RESTART = "restart: the table is read anew then"
WITHOUT_ITS_COLUMN = f"leave its large column out (`exclude_columns`), and {_RESTART}"
"""What helps where only that does."""
_KEY_PART = 16
"""A key that a sweep reads may have one in so many of it: a sweep's queries have a key's text, and
it is there in several forms."""


def row_limit_bytes(memory_bytes: int) -> int:
    """Return the largest row that a connector of `memory_bytes` takes: its source's share."""
    return min(UNLIMITED_BYTES, max(LEAST_BYTES, int(memory_bytes / CONNECTOR)))


def change_limit_bytes(row_limit_bytes: int) -> int:
    """Return how large a message with a change may be, to be held as a whole."""
    return row_limit_bytes + _BESIDE_BYTES


def kept_bytes(row_limit_bytes: int) -> int:
    """Return how much is kept of the values of a change that is larger."""
    return row_limit_bytes // _KEPT_PART


def key_limit_bytes(row_limit_bytes: int) -> int:
    """Return how large a key may be that a sweep reads."""
    return row_limit_bytes // _KEY_PART


def key_too_large(table: TableId, key_bytes: int, limit_bytes: int) -> TableError:
    """Make the error of a table that a sweep met a key of `key_bytes` in."""
    return TableError(
        table,
        f"a key of {_megabytes(key_bytes)} MB, sent as text, is more than a sweep may hold"
        f" ({_megabytes(limit_bytes)} MB, a {_KEY_PART}th of the source's share of limits.memory)",
        remedy=f"raise `limits.memory`, or leave `detect_deletes` of the table out, and {_RESTART}",
    )


def row_too_large(table: TableId, row_bytes: int, limit_bytes: int, where: str = "") -> TableError:
    """Make the error of a table that a row of `row_bytes` was met in; `where` it was met."""
    return TableError(
        table,
        f"a row of {_megabytes(row_bytes)} MB, sent as text,{where and f' {where},'} is more than"
        f" the source may hold ({_megabytes(limit_bytes)} MB, its share of limits.memory)",
        remedy="leave its large column out (`exclude_columns`) or raise `limits.memory`, and"
        f" {_RESTART}",
    )


def refuse_too_large(table: TableId, row_bytes: int, limit_bytes: int, where: str = "") -> None:
    """Raise TableError if a row is larger than may be taken; `where` it was met."""
    if row_bytes > limit_bytes:
        raise row_too_large(table, row_bytes, limit_bytes, where)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.0f}"
