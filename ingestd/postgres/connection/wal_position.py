"""Where the server's WAL is.

Source: PostgreSQL, src/backend/access/transam/xlog.c (XLogBytePosToRecPtr, XLogBytePosToEndRecPtr).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, LiteralString

from psycopg import AsyncConnection, sql

from ingestd.model.lsn import Lsn

# What a standby shows may be of a record whose replay has not been counted yet, but not of one that
# it has not received. (Both are null before the first record.)
_REPLAYED = "pg_catalog.pg_last_wal_replay_lsn()"
_RECEIVED = f"greatest(pg_catalog.pg_last_wal_receive_lsn(), {_REPLAYED})"


def _on_standby(standby: LiteralString, primary: LiteralString) -> sql.SQL:
    """Choose between two expressions by what the server is now."""
    case = f"CASE WHEN pg_catalog.pg_is_in_recovery() THEN {standby} ELSE {primary} END"
    return sql.SQL(case)


CURRENT = _on_standby(_RECEIVED, "pg_catalog.pg_current_wal_lsn()")
"""How far the server's WAL goes."""
FLUSHED = _on_standby(_REPLAYED, "pg_catalog.pg_current_wal_flush_lsn()")
"""How far a walsender can send."""

FLUSH_LIMIT_S = 2.0
FLUSH_LOOK_S = 0.02

_CURRENT = sql.SQL("SELECT {}::text").format(CURRENT)
_FLUSHED = sql.SQL("SELECT {}::text").format(FLUSHED)
_REPLAYED_BY_STANDBY = sql.SQL("SELECT ({})::text").format(
    _on_standby(_REPLAYED, "NULL::pg_catalog.pg_lsn")
)
_INSERT = sql.SQL(
    "SELECT {}::text, pg_catalog.current_setting('wal_block_size')::pg_catalog.int4"
).format(_on_standby(_RECEIVED, "pg_catalog.pg_current_wal_insert_lsn()"))
_PAGE_HEADER_BYTES = 24
_LONG_PAGE_HEADER_BYTES = 40
"""Of the first page of a segment, whose size is a power of two from 1 MB on."""
_SEGMENT_ALIGNMENT = 1 << 20


async def current_position(connection: AsyncConnection[Any]) -> Lsn:
    """Return how far the server's WAL goes; of a standby, what it has received."""
    row = await (await connection.execute(_CURRENT)).fetchone()
    assert row is not None
    return Lsn.parse(row[0])


async def flush_position(connection: AsyncConnection[Any]) -> Lsn:
    """Return how far a walsender can send; of a standby, what it has replayed."""
    row = await (await connection.execute(_FLUSHED)).fetchone()
    assert row is not None
    return Lsn.parse(row[0])


async def await_flushed(connection: AsyncConnection[Any], position: Lsn) -> None:
    """Wait until a crash of the server can't take back what lies below `position`.

    At once, but for commits that did not wait for that (``synchronous_commit = off``); and not for
    long: the last bytes may be of a transaction that goes on. Of a standby: until it has replayed
    that. Source: PostgreSQL documentation, "Asynchronous Commit".
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FLUSH_LIMIT_S):
            while await flush_position(connection) < position:  # noqa: ASYNC110 - the server's
                await asyncio.sleep(FLUSH_LOOK_S)


async def replayed_position(connection: AsyncConnection[Any]) -> Lsn | None:
    """Return what a standby has replayed; None of a primary."""
    row = await (await connection.execute(_REPLAYED_BY_STANDBY)).fetchone()
    assert row is not None
    return None if row[0] is None else Lsn.parse(row[0])


async def insert_position(connection: AsyncConnection[Any]) -> Lsn:
    """Return the end of the last record written: everything visible now is below it.

    Of a standby, of the last one received. Not the flush position, which an asynchronous commit
    that is visible already may be above.
    """
    cursor = await connection.execute(_INSERT)
    row = await cursor.fetchone()
    assert row is not None
    return end_of_record(Lsn.parse(row[0]), row[1])


def end_of_record(next_record: Lsn, page_bytes: int) -> Lsn:
    """Return where a record ended, of where the next one begins: that may be behind a page header.

    The stream's positions are ends of records; on an idle server it would never reach a beginning.
    """
    at = next_record % page_bytes
    is_long = (next_record - at) % _SEGMENT_ALIGNMENT == 0
    header = _LONG_PAGE_HEADER_BYTES if is_long else _PAGE_HEADER_BYTES
    return Lsn(next_record - at) if at == header else next_record


async def is_standby(connection: AsyncConnection[Any]) -> bool:
    """Return whether the server only follows another."""
    cursor = await connection.execute("SELECT pg_catalog.pg_is_in_recovery()")
    row = await cursor.fetchone()
    return row is not None and bool(row[0])
