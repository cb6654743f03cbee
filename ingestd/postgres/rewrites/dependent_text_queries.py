"""Queries for types whose texts depend on other objects, for these texts, and for their users.

The texts come from the server's own output functions, with the settings that are used to read
values: search_path decides whether a name is qualified.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql

from ingestd.decode.type_mapping import MOST_DEPTH, Types, without_domains
from ingestd.model.errors import TableError
from ingestd.model.schema import TableId
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.relation_lock import lock_relation
from ingestd.postgres.catalog.tables import list_types
from ingestd.postgres.catalog.trusted_types import is_trusted
from ingestd.postgres.catalog.user_types import EACH_PART
from ingestd.postgres.rewrites.dependent_texts import (
    DEPENDENT,
    MONEY,
    StaleText,
    TypeTexts,
    TypeUse,
)

# Through domains, arrays, ranges and composite types.
_USES = f"""
WITH RECURSIVE used AS (
  SELECT o AS root, o AS oid, 'value' AS how FROM pg_catalog.unnest(%s::oid[]) o
  UNION
  SELECT used.root, x.oid, CASE WHEN x.how = 'value' THEN used.how
                                WHEN used.how = 'value' THEN x.how ELSE 'within' END
    FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid
{EACH_PART})
SELECT DISTINCT used.root::int8, t.typname::text, used.how
  FROM used JOIN pg_catalog.pg_type t ON t.oid = used.oid
 WHERE t.typnamespace = 'pg_catalog'::pg_catalog.regnamespace AND t.typname = ANY(%s)
 ORDER BY 1, 2, 3
"""  # noqa: S608 - constants
_OF_SCHEMA = sql.SQL("""
SELECT o.oid::int8, o.oid::pg_catalog.{type}::text,
       n.nspname ~ '^pg_(toast_)?temp_'
  FROM pg_catalog.{catalog} o JOIN pg_catalog.pg_namespace n ON n.oid = o.{schema}
""")
_ROLES = sql.SQL("SELECT oid::int8, rolname::text, false FROM pg_catalog.pg_roles")
_OBJECTS: Mapping[str, sql.SQL] = {
    "aclitem": _ROLES,
    "money": sql.SQL("SELECT 1, 1234567.89::pg_catalog.numeric::pg_catalog.money::text, false"),
    "regdatabase": sql.SQL(
        "SELECT oid::int8, oid::pg_catalog.regdatabase::text, false FROM pg_catalog.pg_database"
    ),
    "regnamespace": sql.SQL(
        "SELECT oid::int8, oid::pg_catalog.regnamespace::text,"
        " nspname ~ '^pg_(toast_)?temp_' FROM pg_catalog.pg_namespace"
    ),
    "regrole": sql.SQL(
        "SELECT oid::int8, oid::pg_catalog.regrole::text, false FROM pg_catalog.pg_roles"
    ),
}
_CATALOGS: Mapping[str, tuple[str, str]] = {
    "regclass": ("pg_class", "relnamespace"),
    "regcollation": ("pg_collation", "collnamespace"),
    "regconfig": ("pg_ts_config", "cfgnamespace"),
    "regdictionary": ("pg_ts_dict", "dictnamespace"),
    "regoper": ("pg_operator", "oprnamespace"),
    "regoperator": ("pg_operator", "oprnamespace"),
    "regproc": ("pg_proc", "pronamespace"),
    "regprocedure": ("pg_proc", "pronamespace"),
    "regtype": ("pg_type", "typnamespace"),
}
_MOST_CONDITIONS = 1_000
# ALTER TYPE does not wait for readers of a table.
_UNSTEADY = f"""
SELECT t.oid::int8 FROM pg_catalog.pg_type t
 WHERE t.oid = ANY(%s::oid[]) AND t.typtype = 'c' AND NOT {is_trusted("t.typowner")}
"""  # noqa: S608 - constants
_RELATION = """
SELECT n.nspname::text, c.relname::text, c.relkind = 'p' FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s
"""


async def read_uses(
    connection: AsyncConnection[Any], types: Iterable[int]
) -> dict[int, tuple[TypeUse, ...]]:
    """Return, by OID, which of these types are or contain a type with dependent texts."""
    cursor = await connection.execute(_USES, (list(types), sorted(DEPENDENT)))
    found: dict[int, tuple[TypeUse, ...]] = {}
    for root, name, how in await cursor.fetchall():
        found[root] = (*found.get(root, ()), TypeUse(name, how))
    return found


async def read_texts(
    connection: AsyncConnection[Any], types: Iterable[str]
) -> dict[str, TypeTexts]:
    """Return the texts of all objects that values of these types can refer to."""
    found = {}
    for type_ in sorted(set(types)):
        rows = await (await connection.execute(_query(type_))).fetchall()
        objects = {oid: text for oid, text, is_temporary in rows if not is_temporary}
        temporary = [text for _, text, is_temporary in rows if is_temporary]
        found[type_] = TypeTexts.from_catalog(type_, objects, temporary)
    return found


def _query(type_: str) -> sql.SQL | sql.Composed:
    if type_ in _OBJECTS:
        return _OBJECTS[type_]
    catalog, schema = map(sql.Identifier, _CATALOGS[type_])
    return _OF_SCHEMA.format(type=sql.Identifier(type_), catalog=catalog, schema=schema)


async def holds(
    connection: AsyncConnection[Any],
    table: int,
    uses: Sequence[TypeUse],
    texts: Sequence[StaleText],
) -> bool:
    """Return whether a table has a row with a value whose text may have changed.

    True if the table can't be read. Raises psycopg.Error.
    """
    by_type = {doubt.type: doubt for doubt in texts}
    columns = {use.column: use.type_oid for use in uses if use.type in by_type}
    types = await list_types(connection, columns.values())
    unsteady = await _unsteady(connection, types)
    asked = _Question(types, await read_uses(connection, types), by_type, unsteady)
    conditions = [
        asked.refers(sql.SQL("r.{}").format(sql.Identifier(name)), oid)
        for name, oid in columns.items()
    ]
    relation = await (await connection.execute(_RELATION, (table,))).fetchone()
    if relation is None or not conditions:
        return False
    schema, name, is_partitioned = relation
    blocks = BlockRange(schema, name, is_whole=is_partitioned, oid=table)
    question = sql.SQL("SELECT EXISTS (SELECT FROM {} AS r WHERE {})").format(
        blocks.relation, sql.SQL(" OR ").join(conditions)
    )
    try:
        async with connection.transaction():
            await lock_relation(connection, TableId(schema, name), blocks, columns)
            row = await (await connection.execute(question)).fetchone()
    except psycopg.errors.InsufficientPrivilege:
        return True
    except (
        TableError,
        psycopg.errors.ObjectNotInPrerequisiteState,
        psycopg.errors.UndefinedTable,
        psycopg.errors.UndefinedColumn,
        psycopg.errors.InvalidSchemaName,
    ):
        return True  # altered since the catalog was read
    return row is None or bool(row[0])


async def _unsteady(connection: AsyncConnection[Any], types: Types) -> Collection[int]:
    """Return those of the composite types whose attributes another role may alter meanwhile."""
    composite = [oid for oid, found in types.items() if found.kind == "composite"]
    if not composite:
        return ()
    cursor = await connection.execute(_UNSTEADY, (composite,))
    return {oid for (oid,) in await cursor.fetchall()}


@dataclass(slots=True)
class _Question:
    """Builds the SQL condition for stale values. `uses`: the dependent types inside each type.

    `unsteady`: types whose attributes are not named, as they may get another type, with a cast.
    `left`: how many more conditions on parts of values it may consist of. Where they do not
    suffice, any value counts.
    """

    types: Types
    uses: Mapping[int, Sequence[TypeUse]]
    doubts: Mapping[str, StaleText]
    unsteady: Collection[int] = ()
    left: int = _MOST_CONDITIONS

    def refers(self, value: sql.Composable, type_oid: int, depth: int = 0) -> sql.Composable:
        """Return the condition for a value of this type."""
        self.left -= 1
        type_oid = without_domains(type_oid, self.types)
        found = self.types.get(type_oid)
        in_doubt = [use for use in self.uses.get(type_oid, ()) if use.type in self.doubts]
        is_total = any(self.doubts[use.type].is_total for use in in_doubt)
        is_too_much = self.left < 0 or depth > MOST_DEPTH
        if found is None or is_total or is_too_much or type_oid in self.unsteady:
            return sql.SQL("{} IS DISTINCT FROM NULL").format(value)
        if found.kind == "array":
            element = sql.Identifier(f"e{depth}")
            return sql.SQL(
                "EXISTS (SELECT FROM (SELECT pg_catalog.unnest({})) AS {}(value) WHERE {})"
            ).format(
                value,
                element,
                self.refers(sql.SQL("{}.value").format(element), found.of, depth + 1),
            )
        if found.kind == "composite":
            fields = [
                self.refers(
                    sql.SQL("({}).{}").format(value, sql.Identifier(a.name)), a.type_oid, depth + 1
                )
                for a in found.attributes
                if any(use.type in self.doubts for use in self.uses.get(a.type_oid, ()))
            ]
            return _any_of(fields)
        [use] = in_doubt
        if use.how != "value" or use.type == MONEY:
            return sql.SQL("{} IS DISTINCT FROM NULL").format(value)
        return _object_is(use.type, value, self.doubts[use.type])


def _any_of(conditions: Sequence[sql.Composable]) -> sql.Composable:
    found = conditions or [sql.SQL("false")]
    return sql.SQL("(") + sql.SQL(" OR ").join(found) + sql.SQL(")")


def _object_is(type_: str, value: sql.Composable, doubt: StaleText) -> sql.Composable:
    if type_ != "aclitem":
        return _is_one_of(sql.SQL("({})::pg_catalog.oid").format(value), doubt)
    # An item that grants nothing is not listed, so the roles it names are unknown.
    roles = sql.SQL(
        "CASE WHEN {} IS NOT NULL THEN NOT EXISTS (SELECT FROM pg_catalog.aclexplode(ARRAY[{}]))"
        " OR EXISTS (SELECT FROM pg_catalog.aclexplode(ARRAY[{}]) AS a WHERE {} OR {}) END"
    )
    grantee, grantor = (
        _is_one_of(sql.SQL("a.{}").format(sql.Identifier(name)), doubt)
        for name in ("grantee", "grantor")
    )
    return roles.format(value, value, value, grantee, grantor)


def _is_one_of(oid: sql.Composable, doubt: StaleText) -> sql.Composable:
    conditions = []
    if doubt.oids:
        listed = sql.SQL("{} = ANY ({}::pg_catalog.oid[])")
        conditions.append(listed.format(oid, sorted(doubt.oids)))
    if doubt.buckets:
        bucketed = sql.SQL(
            "({}::pg_catalog.int8 <= {}::pg_catalog.int8 AND"
            " {}::pg_catalog.int8 % {}::pg_catalog.int8 = ANY ({}::pg_catalog.int8[]))"
        )
        conditions.append(
            bucketed.format(oid, doubt.last, oid, doubt.modulus, sorted(doubt.buckets))
        )
    if doubt.is_above:
        above = sql.SQL("{}::pg_catalog.int8 > {}::pg_catalog.int8")
        conditions.append(above.format(oid, doubt.last))
    return _any_of(conditions)
