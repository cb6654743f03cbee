"""The indexes of tables: unique columns, and columns that allow lookups without a scan.

Source: PostgreSQL documentation, "System Catalogs" (pg_index, pg_am).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from psycopg import AsyncConnection

# indkey has 0 for an expression; the columns beyond indnkeyatts are those of INCLUDE.
_INDEXES = """
SELECT i.indrelid::int8, x.relname::text, i.indisunique, i.indpred IS NOT NULL,
       am.amname::text = 'btree',
       ARRAY(SELECT k.number::int4 FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k(number, at)
              WHERE k.at <= i.indnkeyatts ORDER BY k.at)
  FROM pg_catalog.pg_index i
  JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid
  JOIN pg_catalog.pg_am am ON am.oid = x.relam
 WHERE i.indrelid = ANY(%s::oid[]) AND i.indisvalid AND i.indisready AND i.indislive
 ORDER BY i.indrelid, i.indisprimary DESC, x.relname
"""


@dataclass(frozen=True, slots=True)
class IndexRow:
    """A valid index. `columns`: numbers of the columns it is ordered by, 0 for an expression."""

    name: str
    is_unique: bool
    is_partial: bool
    is_ordered: bool
    columns: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Return whether it contains every row, by columns only."""
        return not self.is_partial and 0 not in self.columns


async def list_indexes(
    connection: AsyncConnection[Any], tables: Iterable[int]
) -> dict[int, tuple[IndexRow, ...]]:
    """Return the valid indexes of these tables, by OID; the primary key's first."""
    cursor = await connection.execute(_INDEXES, (list(tables),))
    found: dict[int, tuple[IndexRow, ...]] = {}
    for oid, name, is_unique, is_partial, is_ordered, columns in await cursor.fetchall():
        row = IndexRow(name, is_unique, is_partial, is_ordered, tuple(columns))
        found[oid] = (*found.get(oid, ()), row)
    return found
