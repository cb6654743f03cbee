"""Whether a table's rows can be read, tried without reading any."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.capture.blocks import BlockRange
from ingestd.capture.copy_queries import probe_query
from ingestd.capture.leaves import leaves_of
from ingestd.capture.relation_lock import lock_relation
from ingestd.capture.splits import read_error
from ingestd.errors import IngestdError, TableError
from ingestd.schema import Table

LOCK_TIMEOUT_S = 1.0
"""How long a probe waits for a table that somebody alters: then it is not tried."""


async def read_fault(
    connection: AsyncConnection[Any], table: Table, dsn: str
) -> IngestdError | None:
    """Say why reading the table would fail, in a reader's own words; None if nothing shows.

    Rights, row security, a filter's or a type's functions that this role may not call: the server
    refuses the query before it looks for a row. Raises psycopg.OperationalError where the
    connection is lost.
    """
    try:
        for leaf in await leaves_of(connection, table):
            blocks = BlockRange(leaf.schema, leaf.name, is_whole=leaf.is_whole, oid=leaf.oid)
            async with connection.transaction():
                await lock_relation(connection, table.id, blocks)
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
