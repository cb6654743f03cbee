"""Where the server's WAL is.

Source: PostgreSQL, src/backend/access/transam/xlog.c (XLogBytePosToRecPtr, XLogBytePosToEndRecPtr).
"""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection, sql

from ingestd.positions import Lsn

# What a standby shows may be of a record whose replay has not been counted yet, but not of one that
# it has not received. (Both are null before the first record.)
_REPLAYED = "pg_catalog.pg_last_wal_replay_lsn()"
_RECEIVED = f"greatest(pg_catalog.pg_last_wal_receive_lsn(), {_REPLAYED})"


def _on_standby(standby: str, primary: str) -> sql.SQL:
    """Choose between two expressions by what the server is now."""
    case = f"CASE WHEN pg_catalog.pg_is_in_recovery() THEN {standby} ELSE {primary} END"
    return sql.SQL(case)


CURRENT = _on_standby(_RECEIVED, "pg_catalog.pg_current_wal_lsn()")
"""How far the server's WAL goes."""
FLUSHED = _on_standby(_REPLAYED, "pg_catalog.pg_current_wal_flush_lsn()")
"""How far a walsender can send."""

_CURRENT = sql.SQL("SELECT {}::text").format(CURRENT)
_FLUSHED = sql.SQL("SELECT {}::text").format(FLUSHED)
_INSERT = sql.SQL(
    "SELECT {}::text, pg_catalog.current_setting('wal_block_size')::pg_catalog.int4"
).format(_on_standby(_RECEIVED, "pg_catalog.pg_current_wal_insert_lsn()"))
_PAGE_HEADER_BYTES = 24
_LONG_PAGE_HEADER_BYTES = 40
"""Of the first page of a segment, whose size is a power of two from 1 MB on."""
_SEGMENT_ALIGNMENT = 1 << 20


async def current_position(connection: AsyncConnection[Any]) -> Lsn:
    """Give how far the server's WAL goes; of a standby, what it has received."""
    row = await (await connection.execute(_CURRENT)).fetchone()
    assert row is not None
    return Lsn.parse(row[0])


async def flush_position(connection: AsyncConnection[Any]) -> Lsn:
    """Give how far a walsender can send; of a standby, what it has replayed."""
    row = await (await connection.execute(_FLUSHED)).fetchone()
    assert row is not None
    return Lsn.parse(row[0])


async def insert_position(connection: AsyncConnection[Any]) -> Lsn:
    """Give the end of the last record written: everything visible now is below it.

    Of a standby, of the last one received. Not the flush position, which an asynchronous commit
    that is visible already may be above.
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
