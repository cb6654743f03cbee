"""Where the server's WAL is.

Source: PostgreSQL, src/backend/access/transam/xlog.c (XLogBytePosToRecPtr, XLogBytePosToEndRecPtr).
"""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection

from ingestd.positions import Lsn

_INSERT = """
SELECT pg_catalog.pg_current_wal_insert_lsn()::text,
       pg_catalog.current_setting('wal_block_size')::pg_catalog.int4
"""
_PAGE_HEADER_BYTES = 24
_LONG_PAGE_HEADER_BYTES = 40
"""Of the first page of a segment, whose size is a power of two from 1 MB on."""
_SEGMENT_ALIGNMENT = 1 << 20


async def insert_position(connection: AsyncConnection[Any]) -> Lsn:
    """Give the end of the last record written: everything visible now is below it.

    Not the flush position, which an asynchronous commit that is visible already may be above.
    """
    cursor = await connection.execute(_INSERT)
    row = await cursor.fetchone()
    assert row is not None
    return end_of_record(Lsn.parse(row[0]), row[1])


def end_of_record(next_record: Lsn, page_bytes: int) -> Lsn:
    """Give where a record ended, of where the next one begins: that may be behind a page header.

    The stream's positions are ends of records; on an idle server it would never reach a beginning.
    """
    at = next_record % page_bytes
    is_long = (next_record - at) % _SEGMENT_ALIGNMENT == 0
    header = _LONG_PAGE_HEADER_BYTES if is_long else _PAGE_HEADER_BYTES
    return Lsn(next_record - at) if at == header else next_record
