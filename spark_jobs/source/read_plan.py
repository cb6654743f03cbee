"""The plan by which tasks read a table, and the transaction that exports their snapshot.

See `spark_jobs.source.exported_snapshot` for the lifetime of the snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.model.errors import TableChangedError
from ingestd.model.schema import Table
from ingestd.ports import Split
from ingestd.postgres.connection.errors import classify
from ingestd.postgres.connection.session import connect
from ingestd.postgres.snapshot.ctid_splits import split_table
from ingestd.postgres.snapshot.errors import read_error
from spark_jobs.source.split_packing import Bins, packed
from spark_jobs.source.table import SourceTable

SERVER_PATIENCE_S = 60
"""The server ends the transaction after this long without a message."""
_WHOLE_BYTES = 1 << 62

_COLUMNS = """
SELECT a.attname::text, a.atttypid::int8, a.atttypmod FROM pg_catalog.pg_attribute a
  JOIN pg_catalog.pg_class c ON c.oid = a.attrelid
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = %s AND n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
"""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """A plan to read a table: made once, executed any number of times. Picklable.

    `partitions`: their number; None for as many as `split_bytes` requires. `idle_s`: None for the
    defaults. `load`: the `load()` that it belongs to; `filters`: an identifier of Spark's filters,
    empty without any.
    """

    source: SourceTable
    partitions: int | None
    split_bytes: int
    resumable: bool
    idle_s: float | None
    limit_s: float
    load: str = ""
    filters: str = ""


async def export(dsn: str) -> tuple[AsyncConnection[Any], str]:
    """Begin a transaction; return it and its snapshot's name. Raises psycopg.Error."""
    connection = await connect(dsn, autocommit=False)
    try:
        await connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        await connection.execute(
            f"SET idle_in_transaction_session_timeout = '{SERVER_PATIENCE_S}s'"
        )
        cursor = await connection.execute("SELECT pg_catalog.pg_export_snapshot()")
        row = await cursor.fetchone()
    except BaseException:
        await connection.close()
        raise
    assert row is not None
    return connection, row[0]


async def cut(plan: ReadPlan, connection: AsyncConnection[Any], snapshot: str, count: int) -> Bins:
    """Split the plan's table under the snapshot, for `count` readers.

    Splits by blocks use the snapshot's own connection: opening another takes longer than
    splitting. A fault does not end the transaction. Raises psycopg.Error, IngestdError.
    """
    table = plan.source.table

    async def splits(target_bytes: int) -> Sequence[Split]:
        if plan.resumable:
            connector = plan.source.connector()
            try:
                manager = connector.splits(resumable=True)
                return await manager.splits(table, snapshot, target_bytes)
            finally:
                await connector.close()
        async with connection.transaction():
            return await split_table(connection, table, snapshot, target_bytes)

    found = await splits(_WHOLE_BYTES)
    if count > 1:
        nbytes = sum(split.estimated_bytes for split in found)
        found = await splits(max(1, -(-nbytes // count)))
    return packed(found, count)


async def count_partitions(plan: ReadPlan, dsn: str) -> int:
    """Return the number of readers for the table's present size. Leaves nothing open."""
    if plan.partitions is not None:
        return plan.partitions
    table = plan.source.table
    try:
        connection, snapshot = await export(dsn)
        async with connection:
            [splits] = await cut(plan, connection, snapshot, 1)
    except psycopg.Error as error:
        raise read_error(error, table.id, dsn) from error
    return max(1, -(-sum(split.estimated_bytes for split in splits) // plan.split_bytes))


async def ensure_as_loaded(connection: AsyncConnection[Any], table: Table) -> None:
    """Check that the columns are those that `load()` found. Raises TableChangedError.

    Columns added since then are ignored.
    """
    cursor = await connection.execute(_COLUMNS, (table.oid, table.id.schema, table.id.name))
    found = {name: (type_oid, typmod) for name, type_oid, typmod in await cursor.fetchall()}
    for column in table.columns:
        if found.get(column.name) != (column.type_oid, column.typmod):
            raise TableChangedError(
                table.id,
                f"column {column.name!r} was dropped or changed after the table was loaded",
                remedy="load() the table again",
            )


def source_error(error: psycopg.Error, plan: ReadPlan, dsn: str) -> Exception:
    """Return the error for a source that can't be reached."""
    return classify(error, f"source {plan.source.source}", dsn)
