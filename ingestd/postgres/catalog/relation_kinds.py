"""Names in the config that are relations of another kind in the catalog.

Source: PostgreSQL documentation, "System Catalogs" (pg_class).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from psycopg import AsyncConnection

from ingestd.model.schema import TableId

_RELATIONS = """
SELECT n.nspname::text, c.relname::text, c.relkind::text, rn.nspname::text, rc.relname::text
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  LEFT JOIN pg_catalog.pg_class rc ON c.relispartition
       AND rc.oid = pg_catalog.pg_partition_root(c.oid)
  LEFT JOIN pg_catalog.pg_namespace rn ON rn.oid = rc.relnamespace
 WHERE n.nspname = ANY(%s::text[]) AND c.relname = ANY(%s::text[])
"""
_READ_INSTEAD = "capture the tables that it reads"
_KINDS = {
    "v": ("a view", _READ_INSTEAD),
    "m": ("a materialized view", _READ_INSTEAD),
    "f": ("a foreign table", "capture it at the server that has its rows"),
    "S": ("a sequence", "its numbers are in the tables that use it"),
    "i": ("an index", "capture its table"),
    "I": ("an index", "capture its table"),
    "c": ("a composite type", "name a table"),
    "t": ("a TOAST table", "its values are captured with its table"),
}
_SYSTEM = ("a system table", "name one of your own tables")


@dataclass(frozen=True, slots=True)
class NotTable:
    """`what`: a kind of relation, with its article. `instead`: how to capture its rows."""

    what: str
    instead: str


async def find_not_tables(
    connection: AsyncConnection[Any], names: Collection[TableId]
) -> dict[TableId, NotTable]:
    """Return the relations of another kind among these names.

    `names`: names that are not tables that can be captured. Raises psycopg.Error.
    """
    if not names:
        return {}
    schemas, relations = [t.schema for t in names], [t.name for t in names]
    cursor = await connection.execute(_RELATIONS, (schemas, relations))
    found = {}
    for schema, name, kind, root_schema, root in await cursor.fetchall():
        table = TableId(schema, name)
        if table not in names:
            continue
        if root is not None:
            whole = TableId(root_schema, root)
            found[table] = NotTable(f"a partition of {whole}", f"name {whole}, which has its rows")
        else:
            found[table] = NotTable(*_KINDS.get(kind, _SYSTEM))
    return found
