"""Reading rows by their keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from psycopg import AsyncConnection, sql

from ingestd.decode.type_mapping import BUILT_IN, is_number, lake_type
from ingestd.model.errors import TableChangedError
from ingestd.model.keys import Key
from ingestd.model.schema import Column, Table
from ingestd.postgres.catalog.block_range import BlockRange
from ingestd.postgres.catalog.trusted_types import is_operator_trusted, is_type_trusted
from ingestd.postgres.catalog.user_types import EACH_PART, FIRST_USER_OID
from ingestd.postgres.snapshot.key_range import operator_of
from ingestd.postgres.snapshot.queries import output_of

# The owner of a table may define its types. With a pinned search_path only operators of pg_catalog
# are found. But next to such a value an untyped literal makes the server prefer text, and then call
# a cast of the owner's; so the literal gets the column's type, without a name. A domain inside
# another type checks its values when they are read from text, and ALTER TYPE adds one to a
# composite type at any time. Row estimates call the subtype_diff of a range. So the output texts of
# these are compared.
_KEY = "ROWS FROM (unnest(%(names)s::text[]), unnest(%(types)s::oid[])) AS a(attname, atttypid)"
"""The key's columns with the types that they were described with, which `lock_table` compares."""
_BELOW = """
         CROSS JOIN LATERAL (
               WITH RECURSIVE below AS (
                 SELECT t.oid, t.typtype, t.typbasetype
                 UNION ALL
                 SELECT d.oid, d.typtype, d.typbasetype FROM below
                   JOIN pg_catalog.pg_type d ON d.oid = below.typbasetype)
               SELECT oid FROM below WHERE typtype <> 'd') AS base"""
RUNS_CODE = f"""EXISTS (
               WITH RECURSIVE inside AS (
                 SELECT b.oid
                 UNION
                 SELECT x.oid FROM inside JOIN pg_catalog.pg_type t ON t.oid = inside.oid
{EACH_PART})
               SELECT FROM inside JOIN pg_catalog.pg_type t ON t.oid = inside.oid
                WHERE t.typtype = 'd' OR t.oid >= {FIRST_USER_OID}
                  AND t.typtype IN ('c', 'm', 'r') AND NOT {is_type_trusted("t")})"""  # noqa: S608 - constants
"""Whether comparing values of type `b` with literals may run what the type's owner defined."""
# A role that is not a superuser can't create an operator class, but may own an extension and add
# one to it.
_OF_EXTENSION = f"""
               EXISTS (SELECT FROM pg_catalog.pg_depend x
                 WHERE x.classid = 'pg_catalog.pg_operator'::pg_catalog.regclass
                   AND x.objid = o.oid AND x.deptype = 'e')
               AND {is_operator_trusted("o")}"""
_RELATION = f"""
SELECT c.relkind::text = 'p',
       coalesce((SELECT jsonb_object_agg(a.attname, jsonb_build_object(
                   'is_domain', t.typtype = 'd', 'is_composite', b.typtype = 'c',
                   'is_text', {RUNS_CODE} OR b.typtype = 'b' AND NOT (b.typelem <> 0
                     AND b.typlen = -1) AND NOT EXISTS ({{operator}})))
          FROM {_KEY}
          JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
{_BELOW}
          JOIN pg_catalog.pg_type b ON b.oid = base.oid
         WHERE b.oid >= {FIRST_USER_OID}
           AND (t.typtype = 'd' OR NOT EXISTS ({{operator}}))), '{{{{}}}}'),
       coalesce((SELECT jsonb_object_agg(a.attname, o.found)
          FROM {_KEY}
          JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
{_BELOW}
          JOIN pg_catalog.pg_type b ON b.oid = base.oid
         CROSS JOIN LATERAL ({{operator}}) AS o(found)), '{{{{}}}}')
  FROM pg_catalog.pg_class c
 WHERE c.oid = %(table)s AND NOT EXISTS (
       SELECT FROM {_KEY} WHERE a.atttypid NOT IN (SELECT t.oid FROM pg_catalog.pg_type t))
""".format(  # noqa: S608 - constants
    operator=f"""
        SELECT jsonb_build_array(n.nspname, o.oprname)
          FROM pg_catalog.pg_opclass oc
          JOIN pg_catalog.pg_am m ON m.oid = oc.opcmethod AND m.amname = 'btree'
          JOIN pg_catalog.pg_amop e ON e.amopfamily = oc.opcfamily AND e.amopstrategy = 3
               AND e.amoplefttype = oc.opcintype AND e.amoprighttype = oc.opcintype
          JOIN pg_catalog.pg_operator o ON o.oid = e.amopopr
          JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace
         WHERE oc.opcdefault AND oc.opcintype = b.oid AND n.nspname <> 'pg_catalog'
           AND {_OF_EXTENSION}"""  # noqa: S608 - constants
)
_C = sql.SQL('COLLATE pg_catalog."C"')


@dataclass(frozen=True, slots=True)
class ComparedType:
    """How values of a user-defined type are compared. Its name is never used.

    `is_domain`: the column's type is a domain, and its values are compared as the base type: a
    value in the table need not pass the domain's checks. `is_text`: compared by the result of the
    output function, which no index supports.
    """

    is_domain: bool = False
    is_composite: bool = False
    is_text: bool = False

    def column(self, column: sql.Composable) -> sql.Composable:
        """Return the column in the form in which it is compared."""
        if self.is_text:
            return sql.SQL("{} {}").format(output_of(column), _C)
        # A bare null beside it makes the server use the base type, but hides the index.
        return sql.SQL("coalesce({}, NULL)").format(column) if self.is_domain else column

    def literal(self, value: sql.Composable, column: sql.Composable) -> sql.Composable:
        """Return a literal, which is not null, that is comparable with `column`."""
        if self.is_text:
            return value
        # It gets the column's type; the planner makes a constant of it.
        return sql.SQL("coalesce({}, {})").format(value, column)


def can_be_found(column: Column) -> bool:
    """Return whether the server finds a key's value by the text that the lake has.

    If the lake's type differs from the source's, its text may differ (``0.50`` for ``0.5``); that
    is equal only to a server that compares numbers.
    """
    own = lake_type(column.type_oid, column.typmod)
    is_same = column.type in {own, pa.string()} or is_number(column.type_oid, BUILT_IN)
    is_other = column.is_override and not is_same
    return not (column.mask or is_other or pa.types.is_nested(column.type))


@dataclass(frozen=True, slots=True)
class KeyedRelation:
    """The relation in which a table's rows are found by key, without rows of child tables.

    `types`: how the key's columns are compared, for those that need another type. `equals`: schema
    and name of the `=` operator of an extension's type, by column.
    """

    blocks: BlockRange
    types: Mapping[str, ComparedType] = field(default_factory=dict)
    equals: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    async def find(
        cls, connection: AsyncConnection[Any], table: Table, key: Sequence[str]
    ) -> KeyedRelation:
        """Read the catalog. Raises psycopg.Error; TableChangedError if the table was dropped."""
        types = [table.column(name).type_oid for name in key]
        of = {"names": list(key), "types": types, "table": table.oid}
        cursor = await connection.execute(_RELATION, of)
        row = await cursor.fetchone()
        if row is None:
            raise TableChangedError(table.id, "no longer exists")
        name = table.id
        blocks = BlockRange(name.schema, name.name, is_whole=row[0], oid=table.oid)
        compared = {name: ComparedType(**kind) for name, kind in row[1].items()}
        return cls(blocks, compared, row[2])

    @property
    def has_composite(self) -> bool:
        """True if a column of the key is composite."""
        return any(kind.is_composite for kind in self.types.values())

    def column(self, name: str) -> sql.Composable:
        """Return a column of the key in the form in which it is compared."""
        kind = self.types.get(name)
        column = sql.Identifier(name)
        return column if kind is None else kind.column(column)

    def equal(self, column: str) -> sql.Composable:
        """Return the operator that compares a column of the key with a literal for equality."""
        kind = self.types.get(column)
        is_text = kind is not None and kind.is_text
        found = None if is_text else self.equals.get(column)
        return operator_of(*(found or ("pg_catalog", "=")))

    def literal(self, column: str, value: str | bytes | None) -> sql.Composable:
        """Return a literal for a value of a key's column.

        It is untyped where possible: the server then uses the column's own type. So no type or
        collation need be named, for which the role might lack privileges.
        """
        found = bare_literal(value)
        kind = self.types.get(column)
        if kind is None or value is None:
            return found
        if not kind.is_text and column in self.equals:  # exactly its operator is resolved
            return found
        return kind.literal(found, sql.Identifier(column))


def bare_literal(value: str | bytes | None) -> sql.Composable:
    """Return an untyped literal; bytes are in the database's encoding."""
    if not isinstance(value, bytes):
        return sql.Literal(value)
    if value.isascii():
        return sql.Literal(value.decode())
    escaped = "".join(f"\\x{byte:02x}" for byte in value)
    return sql.SQL("E'{}'").format(sql.SQL(escaped))


@dataclass(frozen=True, slots=True)
class KeyList:
    """The rows of `table`, in this relation, with these `keys`."""

    table: Table
    keyed: KeyedRelation
    keys: tuple[Key, ...]

    @property
    def relation(self) -> sql.Composable:
        """The FROM item."""
        return self.keyed.blocks.relation

    @property
    def bounds(self) -> list[sql.Composable]:
        """The condition."""
        key = self.table.identifying
        if self.keyed.equals or self.keyed.types:
            each = (self._is(dict(zip(key, values, strict=True))) for values in self.keys)
            return [sql.SQL("({})").format(sql.SQL(" OR ").join(each))]
        names = list(map(self.keyed.column, key))
        rows = [sql.SQL(", ").join(map(self.keyed.literal, key, values)) for values in self.keys]
        if len(names) == 1:
            return [sql.SQL("{} IN ({})").format(names[0], sql.SQL(", ").join(rows))]
        listed = sql.SQL(", ").join(sql.SQL("({})").format(row) for row in rows)
        return [sql.SQL("({}) IN ({})").format(sql.SQL(", ").join(names), listed)]

    def _is(self, key: Mapping[str, str | bytes | None]) -> sql.Composable:
        return sql.SQL("({})").format(
            sql.SQL(" AND ").join(
                sql.SQL("{} {} {}").format(
                    self.keyed.column(name),
                    self.keyed.equal(name),
                    self.keyed.literal(name, value),
                )
                for name, value in key.items()
            )
        )
