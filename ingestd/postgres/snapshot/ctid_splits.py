"""Cuts tables into ranges of blocks, to be read under one exported snapshot.

A range is read by a TID range scan, PostgreSQL 14 or newer. Source: PostgreSQL documentation,
"System Columns" (ctid), "SET TRANSACTION".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql

from ingestd.model.errors import IngestdError, TableChangedError, TableError, TransientError
from ingestd.model.row_checks import WITHOUT_ITS_VALUE
from ingestd.model.schema import Table, TableId
from ingestd.ports import Split
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.partitions import Leaf, leaves_of
from ingestd.postgres.catalog.relation_lock import PUT_BACK
from ingestd.postgres.connection.dsn import role_of
from ingestd.postgres.connection.errors import OF_THE_SERVER, classify, identifier, why_unsendable
from ingestd.postgres.connection.quoting import printed
from ingestd.postgres.connection.server_messages import loggable_message, server_text
from ingestd.postgres.connection.session import connect

LOCK_TIMEOUT_S = 10.0
"""How long a reader waits for a table that is locked for DDL."""


class CtidSplits:
    """Splits of plain tables, and of the leaves of partitioned ones.

    Together they contain every row that the snapshot sees exactly once, whatever happens meanwhile
    except a rewrite, which `ingestd.postgres.snapshot.page_reader` detects. See
    `ingestd.ports.SplitManager`.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    async def splits(self, table: Table, snapshot: str, target_bytes: int) -> Sequence[Split]:
        """Cut `table`; TableError if it is no longer a table, or never was one."""
        if target_bytes <= 0:
            msg = f"target_bytes must be above 0, not {target_bytes}"
            raise ValueError(msg)
        try:
            async with await connect(
                self._dsn, autocommit=False, lock_timeout_s=LOCK_TIMEOUT_S
            ) as connection:
                await enter_snapshot(connection, snapshot)
                return await splits_seen(connection, table, snapshot, target_bytes)
        except psycopg.Error as error:
            raise snapshot_error(error, table.id, self._dsn) from error


async def splits_seen(
    connection: AsyncConnection[Any], table: Table, snapshot: str, target_bytes: int
) -> Sequence[Split]:
    """Cut `table` on a connection that is in the snapshot. Raises psycopg.Error, TableError."""
    return [
        Split(table, snapshot, blocks.to_text(), nbytes)
        for leaf in await leaves_of(connection, table)
        for blocks, nbytes in ranges_of(leaf, target_bytes)
    ]


def ranges_of(leaf: Leaf, target_bytes: int) -> list[tuple[BlockRange, int]]:
    """Cut by blocks, with sizes. The last range is open: it includes blocks added since."""
    if leaf.is_whole:
        return [(BlockRange(leaf.schema, leaf.name, is_whole=True, oid=leaf.oid), leaf.nbytes)]
    if not leaf.is_cut:
        return [(BlockRange(leaf.schema, leaf.name, oid=leaf.oid, file=leaf.file), leaf.nbytes)]
    return cut(leaf, 0, None, target_bytes)


def cut(leaf: Leaf, first: int, end: int | None, target_bytes: int) -> list[tuple[BlockRange, int]]:
    """Cut the blocks of a leaf from `first` to `end` (None: to the last one, and any later).

    Only blocks that exist are cut: `end` may be from a record in the lake.
    """
    blocks = max(0, min(leaf.blocks, leaf.blocks if end is None else end) - first)
    nbytes = leaf.nbytes * blocks // max(1, leaf.blocks)
    count = max(1, min(blocks, -(-nbytes // target_bytes)))
    bounds = [first + blocks * i // count for i in range(count)]
    whole = BlockRange(
        leaf.schema, leaf.name, is_packed=leaf.is_packed, oid=leaf.oid, file=leaf.file
    )
    return [
        (replace(whole, start=start, end=until), nbytes // count)
        for start, until in zip(bounds, [*bounds[1:], end], strict=True)
    ]


async def enter_snapshot(connection: AsyncConnection[Any], snapshot: str) -> None:
    """Begin a transaction that sees an exported snapshot; psycopg must not be in one.

    Raises TransientError (``snapshot_gone``) if the exporting session has ended.
    """
    begin = sql.SQL(
        "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY; SET TRANSACTION SNAPSHOT {}"
    )
    try:
        await connection.execute(begin.format(snapshot))
    except (psycopg.errors.UndefinedObject, psycopg.errors.InvalidParameterValue) as error:
        raise TransientError(
            f"snapshot {snapshot}: the session that exported it has ended", reason="snapshot_gone"
        ) from error


_HOLDERS = sql.SQL(
    "end the session that holds it: SELECT pid, mode, granted FROM pg_catalog.pg_locks"
    " WHERE relation OPERATOR(pg_catalog.=) {}::pg_catalog.regclass;"
)
_GONE = ("42P01", "42703", "3F000")
_RESTRICTED = "55000"
"""The error for a view or foreign table, by `restrict_nonsystem_relation_kind`."""
_NO_MEMORY = psycopg.errors.OutOfMemory


def snapshot_error(
    error: psycopg.Error, table: TableId, dsn: str, *, runs_users_sql: bool = False
) -> IngestdError:
    """Return the result of `read_error`; but locks, and too little memory, affect only this table.

    The table is read again later, while other tables continue.
    """
    if isinstance(error, _NO_MEMORY):
        what = f"the server has too little memory to read it: {loggable_message(error)}"
        return TableChangedError(table, what, remedy=WITHOUT_ITS_VALUE)
    if not isinstance(error, psycopg.errors.LockNotAvailable):
        return read_error(error, table, dsn, runs_users_sql=runs_users_sql)
    return TableChangedError(
        table,
        "could not be read in time: another session holds a lock on it",
        remedy=printed(_HOLDERS.format(sql.Identifier(table.schema, table.name).as_string(None))),
    )


def read_error(
    error: psycopg.Error, table: TableId, dsn: str, *, runs_users_sql: bool = False
) -> IngestdError:
    """Return the error for a table that can't be read: its own fault, or the connection's.

    `runs_users_sql`: as for `loggable_message`.
    """
    what = loggable_message(error, runs_users_sql=runs_users_sql)
    if error.sqlstate in _GONE:
        return TableChangedError(table, f"changed while it was read: {what}")
    if error.sqlstate == _RESTRICTED:
        return TableChangedError(table, f"is no longer a table: {what}", remedy=PUT_BACK)
    if (unsendable := why_unsendable(error)) is not None:
        return TableError(table, f"{unsendable}: {what}", remedy=WITHOUT_ITS_VALUE)
    fault = classify(error, f"table {table}, read", dsn, runs_users_sql=runs_users_sql)
    if error.sqlstate != psycopg.errors.InsufficientPrivilege.sqlstate:
        if isinstance(fault, TransientError) or (error.sqlstate or "08")[:2] in OF_THE_SERVER:
            return fault
        return TableError(table, what, remedy=WITHOUT_ITS_VALUE)
    remedy = fault.remedy
    if "row-level security" not in server_text(error):
        role = identifier(role_of(dsn)) or "<role>"
        schema, name = identifier(table.schema), identifier(table.name)
        remedy = (
            f"GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT ON {schema}.{name} TO {role};"
        )
    return TableError(table, what, remedy=remedy)
