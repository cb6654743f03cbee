"""Tables in which an UPDATE into a row filter may send a row with missing values.

See `ingestd.model.incomplete_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import AsyncConnection

from ingestd.model.schema import Table
from ingestd.postgres.catalog.replica_identity import PublishedIdentity, only_keys

MAY_STOP = "an UPDATE that moves a row there without its large values stops the table"

# Without a TOAST table there are no out-of-line values. Partitioned tables: see the partitions.
# (pg_partition_tree would lock them.)
_WITH_TOAST = """
WITH RECURSIVE t AS (
  SELECT r.oid AS root, r.oid FROM pg_catalog.unnest(%s::oid[]) r (oid)
  UNION
  SELECT t.root, i.inhrelid FROM t JOIN pg_catalog.pg_class p ON p.oid = t.oid AND p.relkind = 'p'
    JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid)
SELECT DISTINCT t.root::int8
  FROM t JOIN pg_catalog.pg_class c ON c.oid = t.oid AND c.reltoastrelid <> 0
"""


async def with_toast(connection: AsyncConnection[Any], tables: Sequence[int]) -> set[int]:
    """Return those of these tables (OIDs) that may have out-of-line values."""
    cursor = await connection.execute(_WITH_TOAST, (list(tables),))
    return {oid for (oid,) in await cursor.fetchall()}


def may_lack_values(table: Table, sending: PublishedIdentity, toasted: set[int]) -> bool:
    """Return whether an UPDATE that moves a row into the row filter may omit values."""
    is_whole = table.replica_identity == "f" and only_keys(table, sending) is None
    return table.row_filter is not None and not is_whole and table.oid in toasted
