"""Tests whether a table's rows can be read, without reading any."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.model.errors import IngestdError, TableError
from ingestd.model.schema import Table
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.partitions import leaves_of
from ingestd.postgres.catalog.relation_lock import lock_table
from ingestd.postgres.snapshot.errors import read_error
from ingestd.postgres.snapshot.queries import probe_query

LOCK_TIMEOUT_S = 1.0
"""How long a probe waits for a table that is locked for DDL; after that it is skipped."""


async def read_fault(
    connection: AsyncConnection[Any], table: Table, dsn: str
) -> IngestdError | None:
    """Return the error that reading the table would raise; None if none shows.

    Privileges, row-level security, and functions of a filter or a type that this role may not call:
    the server rejects the query before it reads a row. Raises psycopg.OperationalError if the
    connection is lost.
    """
    try:
        for leaf in await leaves_of(connection, table):
            blocks = BlockRange(leaf.schema, leaf.name, is_whole=leaf.is_whole, oid=leaf.oid)
            async with connection.transaction():
                await lock_table(connection, table, blocks)
                await connection.execute(probe_query(table, blocks))
    except psycopg.errors.LockNotAvailable:
        return None
    except TableError as error:
        return error
    except psycopg.Error as error:
        if connection.closed:
            raise
        return read_error(error, table.id, dsn)
    return None
