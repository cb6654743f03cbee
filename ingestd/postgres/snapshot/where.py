"""User-written SQL conditions on a table's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql

from ingestd.model.errors import TableError
from ingestd.model.schema import Table
from ingestd.postgres.catalog.relation_lock import NONE, ensure_condition, lock_relation, whole
from ingestd.postgres.connection.server_messages import loggable_message
from ingestd.postgres.connection.session import connect

LOCK_TIMEOUT_S = 10.0
"""How long to wait for a lock on the table."""

# A text that is valid between parentheses and between brackets can close neither of them: wherever
# it is inserted, it remains one expression.
_CHECKS = (
    "SELECT FROM {table} AS _ WHERE (\n{condition}\n) LIMIT 0",
    "SELECT FROM {table} AS _ WHERE (ARRAY[\n{condition}\n]::boolean[])[1] LIMIT 0",
)


_OF_THE_TEXT = ("42", "22", "0A", "54", "08P01")
"""SQLSTATE: syntax and names, values, unsupported features, program limits, parameters."""


async def check_condition(dsn: str, tables: Sequence[Table], text: str) -> None:
    """Raise TableError unless `text` is one condition on the tables' columns. Reads no row.

    Columns are unqualified. Raises psycopg.Error for an error that the text does not cause.
    """
    async with await connect(dsn, lock_timeout_s=LOCK_TIMEOUT_S) as connection:
        for table in tables:
            async with connection.transaction():
                await _check(connection, table, text)


async def _check(connection: AsyncConnection[Any], table: Table, text: str) -> None:
    # With its partitions: a table that is not partitioned has none.
    blocks = whole(table, is_partitioned=True)
    await lock_relation(connection, table.id, blocks, NONE)
    try:
        await ensure_condition(connection, table.id, blocks, text, NONE)
        for check in _CHECKS:
            query = sql.SQL(check).format(
                table=blocks.relation,
                condition=sql.SQL(text),
            )
            # The extended protocol takes a single statement only.
            await connection.execute(query, binary=True)
    except psycopg.Error as error:
        if not (error.sqlstate or "").startswith(_OF_THE_TEXT):
            raise
        raise TableError(
            table.id,
            f"the condition is invalid: {loggable_message(error, runs_users_sql=True)}",
            remedy="write it as after WHERE in SQL, with unqualified column names",
        ) from error


def joined(conditions: list[str]) -> str:
    """Return the conjunction of these conditions, even if one of them ends in a comment."""
    return " AND ".join(f"(\n{condition}\n)" for condition in conditions)
