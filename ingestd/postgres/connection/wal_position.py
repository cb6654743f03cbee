"""Positions in the server's WAL.

Source: PostgreSQL, src/backend/access/transam/xlog.c (XLogBytePosToRecPtr, XLogBytePosToEndRecPtr).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, LiteralString

from psycopg import AsyncConnection, sql

from ingestd.model.lsn import Lsn

# The position a standby reports may be of a record whose replay is not counted yet, but not of one
# that it has not received. (Both are null before the first record.)
_REPLAYED = "pg_catalog.pg_last_wal_replay_lsn()"
_RECEIVED = f"greatest(pg_catalog.pg_last_wal_receive_lsn(), {_REPLAYED})"


def _on_standby(standby: LiteralString, primary: LiteralString) -> sql.SQL:
    """Return SQL that chooses between two expressions by the server's current role."""
    case = f"CASE WHEN pg_catalog.pg_is_in_recovery() THEN {standby} ELSE {primary} END"
    return sql.SQL(case)


CURRENT = _on_standby(_RECEIVED, "pg_catalog.pg_current_wal_lsn()")
"""The end of the server's WAL."""
FLUSHED = _on_standby(_REPLAYED, "pg_catalog.pg_current_wal_flush_lsn()")
"""The position up to which a walsender can send."""

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
# Flushed, unlike a message outside of transactions: a reader of the position need not wait for the
# WAL writer. Waiting for a standby is not needed.
_COMMIT_LOCALLY = "SET LOCAL synchronous_commit = 'local'"
_EMIT = "SELECT pg_catalog.pg_logical_emit_message(true, 'ingestd', '')::text"
_PAGE_HEADER_BYTES = 24
_LONG_PAGE_HEADER_BYTES = 40
"""On the first page of a segment, whose size is a power of two and at least 1 MB."""
_SEGMENT_ALIGNMENT = 1 << 20


async def current_position(connection: AsyncConnection[Any]) -> Lsn:
    """Return the end of the server's WAL; on a standby, of what it has received."""
    row = await (await connection.execute(_CURRENT)).fetchone()
    assert row is not None
    return Lsn.parse(row[0])


async def flush_position(connection: AsyncConnection[Any]) -> Lsn:
    """Return the position up to which a walsender can send; on a standby, what it has replayed."""
    row = await (await connection.execute(_FLUSHED)).fetchone()
    assert row is not None
    return Lsn.parse(row[0])


async def await_flushed(connection: AsyncConnection[Any], position: Lsn) -> None:
    """Wait until a crash of the server can't undo what precedes `position`.

    Returns at once, except for commits that did not wait for the flush (``synchronous_commit =
    off``). The wait is limited: the last bytes may belong to a transaction that continues. On a
    standby: wait until it has replayed them. Source: PostgreSQL documentation, "Asynchronous
    Commit".
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FLUSH_LIMIT_S):
            while await flush_position(connection) < position:  # noqa: ASYNC110 - the server's
                await asyncio.sleep(FLUSH_LOOK_S)


async def replayed_position(connection: AsyncConnection[Any]) -> Lsn | None:
    """Return what a standby has replayed; None on a primary."""
    row = await (await connection.execute(_REPLAYED_BY_STANDBY)).fetchone()
    assert row is not None
    return None if row[0] is None else Lsn.parse(row[0])


async def insert_position(connection: AsyncConnection[Any]) -> Lsn:
    """Return the end of the last record written: everything visible now precedes it.

    On a standby, of the last one received. Not the flush position: a visible asynchronous commit
    may be above it.
    """
    cursor = await connection.execute(_INSERT)
    row = await cursor.fetchone()
    assert row is not None
    return end_of_record(Lsn.parse(row[0]), row[1])


def end_of_record(next_record: Lsn, page_bytes: int) -> Lsn:
    """Return where a record ended, given the start of the next, which may follow a page header.

    The stream's positions are ends of records. On an idle server it would never reach the start.
    """
    at = next_record % page_bytes
    is_long = (next_record - at) % _SEGMENT_ALIGNMENT == 0
    header = _LONG_PAGE_HEADER_BYTES if is_long else _PAGE_HEADER_BYTES
    return Lsn(next_record - at) if at == header else next_record


async def is_standby(connection: AsyncConnection[Any]) -> bool:
    """Return whether the server is a standby."""
    cursor = await connection.execute("SELECT pg_catalog.pg_is_in_recovery()")
    row = await cursor.fetchone()
    return row is not None and bool(row[0])


async def advance_wal(connection: AsyncConnection[Any]) -> None:
    """Write a flushed WAL record that is no change; do nothing on a standby, which keeps moving."""
    if not await is_standby(connection):
        await own_position(connection)


async def own_position(connection: AsyncConnection[Any]) -> Lsn:
    """Write a message to a primary's WAL, flushed, and return a position inside it.

    No other record has that position: records, commits among them, begin and end elsewhere. What
    was visible before precedes it. Source: src/backend/replication/logical/message.c
    (LogLogicalMessage).
    """
    async with connection.transaction():
        await connection.execute(_COMMIT_LOCALLY)
        cursor = await connection.execute(_EMIT)
        row = await cursor.fetchone()
        assert row is not None
        return Lsn(Lsn.parse(row[0]) - 1)
