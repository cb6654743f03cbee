"""Chooses the tables that are read in chunks (incrementally) rather than at a consistent point.

On the first load those above `snapshot_chunked_above`; later all that can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import AsyncConnection

from ingestd.model.errors import TableError
from ingestd.model.schema import Table, TableId
from ingestd.postgres.catalog.partitions import leaves_of
from ingestd.postgres.connection.session import connect
from ingestd.postgres.connection.wal_position import is_standby
from ingestd.postgres.snapshot.key_lookup import can_be_found

SIZE_PATIENCE_S = 1.0
"""How long reading a table's size may wait for a lock on the table."""


def can_be_incremental(table: Table) -> bool:
    """Return whether rows can be identified, and found by the keys that the stream sends."""
    key = [table.column(n) for n in table.identifying]
    return bool(key) and all(map(can_be_found, key))


async def _sizes(connection: AsyncConnection[Any], tables: Sequence[Table]) -> dict[TableId, int]:
    """Return the tables' sizes in bytes, with TOAST; without tables that can't be read by blocks.

    0 for one that is locked for longer than the connection's lock_timeout.
    """
    found = {}
    for table in tables:
        try:
            leaves = await leaves_of(connection, table)
        except TableError:
            continue  # its reader raises the reason
        except psycopg.errors.LockNotAvailable:
            found[table.id] = 0
            continue
        if all(leaf.is_splittable and not leaf.is_whole for leaf in leaves):
            found[table.id] = sum(leaf.nbytes for leaf in leaves)
    return found


async def choose_incremental(
    dsn: str, tables: Sequence[Table], least_bytes: int
) -> frozenset[TableId]:
    """Return the tables of at least `least_bytes` that can be read in chunks.

    None on a standby, whose snapshots hide running transactions.
    """
    able = [t for t in tables if can_be_incremental(t)]
    async with await connect(dsn, lock_timeout_s=SIZE_PATIENCE_S, reads_names=True) as connection:
        if await is_standby(connection):
            return frozenset()
        found = await _sizes(connection, able)
    return frozenset(name for name, nbytes in found.items() if nbytes >= least_bytes)
