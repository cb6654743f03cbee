"""Conditions must not call what the owners of tables and types have defined.

A condition is SQL whose author knows the table, but not what its owner makes of it: next to a value
of a user-defined type, ``id < 1000`` calls an implicit cast that the type's owner created, with the
reader's privileges. So a condition may only name columns whose types, with all their component
types, are built in or trusted (`ingestd.postgres.catalog.trusted_types`). To create a cast, one
must own one of its types; its functions and operators are those of pg_catalog, because
`search_path` is pinned.

The server itself finds the columns that a condition names: it analyzes the condition on a subquery
that has only the trusted ones. That is PREPARE, which plans and runs nothing.

Nor may a condition have subqueries that read a relation: the planner would evaluate expressions of
another table's indexes, and a subquery on the table itself would have all of its columns. The locks
that PREPARE takes would not show the latter, because the table is locked before. But a relation can
only be named behind the keyword TABLE, or SELECT and FROM, so a condition without these words is
safe whatever exists in the database. Quoted texts and names count only if their ends are not
certain.

Source: PostgreSQL documentation, "CREATE CAST", "Lexical Structure"; src/backend/parser/gram.y
(simple_select).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql

from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.trusted_types import (
    EACH_TRUSTED_PART,
    has_untrusted_functions,
    is_trusted,
    is_type_trusted,
    untrusted_casts,
)
from ingestd.postgres.catalog.user_types import FIRST_USER_OID
from ingestd.postgres.connection.quoting import printed

# A table's own row type can't be given to another role.
_COLUMNS = f"""
WITH RECURSIVE inside AS (
  SELECT a.atttypid AS of, a.atttypid AS oid FROM pg_catalog.pg_attribute a
   WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped
     AND a.atttypid >= {FIRST_USER_OID}
  UNION
  SELECT inside.of, x.oid FROM inside JOIN pg_catalog.pg_type t ON t.oid = inside.oid
{EACH_TRUSTED_PART}),
untrusted AS MATERIALIZED (
         SELECT t.oid, pg_catalog.jsonb_build_array(
                  pg_catalog.jsonb_build_array(n.nspname, t.typname), {is_trusted("t.typowner")},
                  {has_untrusted_functions("t")} OR EXISTS (
                    SELECT FROM pg_catalog.pg_class c
                     WHERE c.oid = t.typrelid AND c.relkind <> 'c'),
                  (SELECT coalesce(pg_catalog.jsonb_agg(pg_catalog.jsonb_build_array(
                            (SELECT pg_catalog.jsonb_build_array(e.nspname, b.typname)
                               FROM pg_catalog.pg_type b JOIN pg_catalog.pg_namespace e
                                 ON e.oid = b.typnamespace WHERE b.oid = k.castsource),
                            (SELECT pg_catalog.jsonb_build_array(e.nspname, b.typname)
                               FROM pg_catalog.pg_type b JOIN pg_catalog.pg_namespace e
                                 ON e.oid = b.typnamespace WHERE b.oid = k.casttarget))), '[]')
                   {untrusted_casts("t")})) AS what
           FROM (SELECT DISTINCT oid FROM inside) part
           JOIN pg_catalog.pg_type t ON t.oid = part.oid
           JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
          WHERE t.oid >= {FIRST_USER_OID} AND NOT (t.typlen = -1 AND t.typelem <> 0)
            AND NOT {is_type_trusted("t")})
SELECT a.attname::text, a.atttypid::int8, (
         SELECT u.what FROM inside JOIN untrusted u ON u.oid = inside.oid
          WHERE inside.of = a.atttypid ORDER BY u.oid LIMIT 1)
  FROM pg_catalog.pg_attribute a
 WHERE a.attrelid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""  # noqa: S608 - constants
_SYSTEM = ("ctid", "xmin", "xmax", "cmin", "cmax", "tableoid")
_PREPARE = sql.SQL(
    "PREPARE ingestd_condition AS SELECT FROM (SELECT {columns} FROM {relation}) AS _ WHERE ("
    "\n{condition}\n)"
)


# Keywords are ASCII. A number may end right before one (`1select`).
_KEYWORD = re.compile(r"(?<![a-z_])(?:select|from|table)(?![a-z0-9_])", re.ASCII | re.IGNORECASE)
_QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")
_UNCERTAIN = ("\\", "--", "/*", "$")
"""In a text with these, where quotes end takes a parser to find."""


@dataclass(frozen=True, slots=True)
class UntrustedType:
    """A type of which something belongs to another role.

    `is_owned`: the type itself does not. `casts`: from and to which types. `is_fixed`: an owner of
    the type is not all that would have to change, besides these casts.
    """

    name: sql.Identifier
    is_owned: bool
    is_fixed: bool
    casts: Sequence[tuple[sql.Identifier, sql.Identifier]]

    @property
    def remedy(self) -> str:
        """What makes a condition possible."""
        ways = [
            sql.SQL("DROP CAST ({} AS {});").format(source, target) for source, target in self.casts
        ]
        if not self.is_owned:
            ways.append(sql.SQL("ALTER TYPE {} OWNER TO postgres;").format(self.name))
        if self.is_fixed or not ways:
            return "use other columns"
        pasted = printed(sql.SQL(" ").join(ways))
        return f"use other columns; or: {pasted}" + (
            "" if self.is_owned else "  -- or another superuser"
        )


@dataclass(frozen=True, slots=True)
class TypeTrust:
    """A table's columns. `trusted`: with their type OIDs. `others`: by name, an untrusted type."""

    trusted: Mapping[str, int]
    others: Mapping[str, UntrustedType]


async def read_type_trust(connection: AsyncConnection[Any], oid: int) -> TypeTrust:
    """Return which columns of a table a condition may name. Raises psycopg.Error."""
    rows = await (await connection.execute(_COLUMNS, {"oid": oid})).fetchall()
    return TypeTrust(
        {name: type_oid for name, type_oid, untrusted in rows if untrusted is None},
        {name: _untrusted(*untrusted) for name, _, untrusted in rows if untrusted is not None},
    )


def reads_relations(condition: str) -> bool:
    """Return whether a condition could have a subquery that reads a relation."""
    if not any(mark in condition for mark in _UNCERTAIN):
        condition = _QUOTED.sub(" ", condition)
    found = {word.lower() for word in _KEYWORD.findall(condition)}
    return "table" in found or {"select", "from"} <= found


async def ensure_trusted(
    connection: AsyncConnection[Any],
    table: TableId,
    blocks: BlockRange,
    trust: TypeTrust,
    condition: str,
) -> None:
    """Raise TableError unless the condition names only trusted columns, and no relation.

    Runs nothing of it. The relation is locked. Raises psycopg.Error, also if the condition is
    invalid.
    """
    if reads_relations(condition):
        raise TableError(
            table,
            "the condition has the word TABLE, or SELECT and FROM, so it may read tables: the"
            " server could call what their owners defined, with this role's privileges",
            remedy="list the values instead of a subquery, like id IN (1, 2); in a condition with"
            " comments, backslashes or $, the words count in quotes, too",
        )
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
            f" role owns, or functions of them: {', '.join(map(repr, trust.others))}; next to them"
            " the server could call casts of that role's with this role's privileges",
            remedy=next(iter(trust.others.values())).remedy,
        ) from error


def _untrusted(
    name: Sequence[str],
    is_owned: bool,  # noqa: FBT001 - of a row
    is_fixed: bool,  # noqa: FBT001 - of a row
    casts: Sequence[Sequence[Sequence[str]]],
) -> UntrustedType:
    named = [(sql.Identifier(*source), sql.Identifier(*target)) for source, target in casts]
    return UntrustedType(sql.Identifier(*name), is_owned, is_fixed, named)
