"""Conditions must not call what the owners of a table's types have defined.

A condition is SQL whose author knows the table, but not what its owner makes of it: next to a value
of a user-defined type, ``id < 1000`` calls an implicit cast that the type's owner created, with the
reader's privileges. So a condition may only name columns whose types, with all their component
types, are built in or owned by a superuser or by this role. (To create a cast, one must own one of
its types; its functions and operators are those of pg_catalog, because `search_path` is pinned.)

The server itself finds the columns that a condition names: it analyzes the condition on a subquery
that has only the trusted ones. That is PREPARE, which plans and runs nothing.

Source: PostgreSQL documentation, "CREATE CAST".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql

from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.user_types import EACH_PART, FIRST_USER_OID, is_trusted
from ingestd.postgres.connection.quoting import printed

_COLUMNS = f"""
SELECT a.attname::text, a.atttypid::int8, ARRAY(
         WITH RECURSIVE inside AS (
           SELECT a.atttypid AS oid WHERE a.atttypid >= {FIRST_USER_OID}
           UNION
           SELECT x.oid FROM inside JOIN pg_catalog.pg_type t ON t.oid = inside.oid
{EACH_PART})
         SELECT part.name FROM inside JOIN pg_catalog.pg_type t ON t.oid = inside.oid
           JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
          CROSS JOIN LATERAL (VALUES (1, n.nspname::text), (2, t.typname::text)) part(place, name)
          WHERE t.oid >= {FIRST_USER_OID} AND NOT (t.typlen = -1 AND t.typelem <> 0)
            AND NOT {is_trusted("t.typowner")}
          ORDER BY t.oid, part.place LIMIT 2)
  FROM pg_catalog.pg_attribute a
 WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""  # noqa: S608 - constants
_SYSTEM = ("ctid", "xmin", "xmax", "cmin", "cmax", "tableoid")
_PREPARE = sql.SQL(
    "PREPARE ingestd_condition AS SELECT FROM (SELECT {columns} FROM {relation}) AS _ WHERE ("
    "\n{condition}\n)"
)


@dataclass(frozen=True, slots=True)
class TypeTrust:
    """A table's columns. `trusted`: with their type OIDs. `others`: by name, an untrusted type."""

    trusted: Mapping[str, int]
    others: Mapping[str, sql.Identifier]


async def read_type_trust(connection: AsyncConnection[Any], oid: int) -> TypeTrust:
    """Return which columns of a table a condition may name. Raises psycopg.Error."""
    rows = await (await connection.execute(_COLUMNS, (oid,))).fetchall()
    return TypeTrust(
        {name: type_oid for name, type_oid, untrusted in rows if not untrusted},
        {name: sql.Identifier(*untrusted) for name, _, untrusted in rows if untrusted},
    )


async def ensure_trusted(
    connection: AsyncConnection[Any],
    table: TableId,
    blocks: BlockRange,
    trust: TypeTrust,
    condition: str,
) -> None:
    """Raise TableError unless the condition names trusted columns only. Runs nothing of it.

    The relation is locked. Raises psycopg.Error, also if the condition is invalid.
    """
    names = map(sql.Identifier, (*trust.trusted, *_SYSTEM))
    query = _PREPARE.format(
        columns=sql.SQL(", ").join(names),
        relation=blocks.relation,
        condition=sql.SQL(condition),
    )
    await connection.execute("DEALLOCATE ALL")
    try:
        await connection.execute(query, binary=True)  # the extended protocol: one statement only
    except psycopg.errors.UndefinedColumn as error:
        if not trust.others:
            raise
        raise TableError(
            table,
            "the condition names a column that does not exist, or one of these, whose types another"
            f" role owns: {', '.join(map(repr, trust.others))}; next to them the server could call"
            " casts of that role's with this role's privileges",
            remedy=_remedy(next(iter(trust.others.values()))),
        ) from error


def _remedy(untrusted: sql.Identifier) -> str:
    alter = printed(sql.SQL("ALTER TYPE {} OWNER TO postgres;").format(untrusted))
    return f"use other columns; or: {alter}  -- or another superuser"
