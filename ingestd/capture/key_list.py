"""Rows that are read by their keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from psycopg import AsyncConnection, sql

from ingestd.capture.blocks import BlockRange
from ingestd.capture.key_range import operator_of
from ingestd.decode.types import BUILT_IN, is_number, lake_type
from ingestd.errors import TableChangedError
from ingestd.keys import Key
from ingestd.schema import Column, Table

# What the server compares only by the type below a domain, or takes no bare literal for: operators
# on any enum take no domain over one, and composite values are compared as records.
_BELOW = """
         CROSS JOIN LATERAL (
               WITH RECURSIVE below AS (
                 SELECT t.oid, t.typtype, t.typbasetype
                 UNION ALL
                 SELECT d.oid, d.typtype, d.typbasetype FROM below
                   JOIN pg_catalog.pg_type d ON d.oid = below.typbasetype)
               SELECT oid FROM below WHERE typtype <> 'd') AS base"""
_RELATION = f"""
SELECT c.relkind::text = 'p',
       coalesce((SELECT jsonb_object_agg(a.attname, jsonb_build_object(
                   'schema', n.nspname, 'name', b.typname, 'is_composite', b.typtype = 'c',
                   'can_be_named', pg_catalog.has_schema_privilege(n.oid, 'USAGE')))
          FROM pg_catalog.pg_attribute a
          JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
{_BELOW}
          JOIN pg_catalog.pg_type b ON b.oid = base.oid
          JOIN pg_catalog.pg_namespace n ON n.oid = b.typnamespace
         WHERE a.attrelid = c.oid AND a.attname = ANY(%s)
           AND (b.typtype = 'c' OR (b.typtype = 'e' AND t.typtype = 'd'))), '{{}}'),
       coalesce((SELECT jsonb_object_agg(a.attname, jsonb_build_array(n.nspname, o.oprname))
          FROM pg_catalog.pg_attribute a
          JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
{_BELOW}
          JOIN pg_catalog.pg_opclass oc ON oc.opcdefault AND oc.opcintype = base.oid
          JOIN pg_catalog.pg_am m ON m.oid = oc.opcmethod AND m.amname = 'btree'
          JOIN pg_catalog.pg_amop e ON e.amopfamily = oc.opcfamily AND e.amopstrategy = 3
               AND e.amoplefttype = oc.opcintype AND e.amoprighttype = oc.opcintype
          JOIN pg_catalog.pg_operator o ON o.oid = e.amopopr
          JOIN pg_catalog.pg_namespace n ON n.oid = o.oprnamespace
         WHERE a.attrelid = c.oid AND a.attname = ANY(%s) AND n.nspname <> 'pg_catalog'), '{{}}')
  FROM pg_catalog.pg_class c WHERE c.oid = %s
"""  # noqa: S608 - constants


@dataclass(frozen=True, slots=True)
class ComparedType:
    """The type as which a column's values are compared: below the domain, if its type is one.

    `can_be_named`: this role may use the type's schema. Never the domain itself: a value need not
    pass the domain's checks to be in the table.
    """

    schema: str
    name: str
    is_composite: bool = False
    can_be_named: bool = True

    def column(self, column: sql.Composable) -> sql.Composable:
        """Return the column as a value of this type; an index on the column still serves."""
        if not (self.can_be_named or self.is_composite):
            # A bare null beside it makes the server choose the type below, but hides the index.
            return sql.SQL("coalesce({}, NULL)").format(column)
        return sql.SQL("{}::{}").format(column, sql.Identifier(self.schema, self.name))

    def literal(self, value: sql.Composable) -> sql.Composable:
        """Return a literal that compares with `column`."""
        if not self.is_composite:
            return value
        return sql.SQL("{}::{}").format(value, sql.Identifier(self.schema, self.name))


def can_be_found(column: Column) -> bool:
    """Whether the server finds a key's value by the text that the lake's has.

    Of another type than the source's the text may be another (``0.50`` of ``0.5``), which is the
    same to a server that compares numbers.
    """
    own = lake_type(column.type_oid, column.typmod)
    is_same = column.type in {own, pa.string()} or is_number(column.type_oid, BUILT_IN)
    is_other = column.is_override and not is_same
    return not (column.mask or is_other or pa.types.is_nested(column.type))


@dataclass(frozen=True, slots=True)
class KeyedRelation:
    """Where a table's rows are found by their keys: without those of tables that inherit from it.

    `types`: as what the key's columns are compared that are not compared as they are. `equals`: the
    schema and name of what is `=` to an extension's type, by the column.
    """

    blocks: BlockRange
    types: Mapping[str, ComparedType] = field(default_factory=dict)
    equals: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    async def find(
        cls, connection: AsyncConnection[Any], table: Table, key: Sequence[str]
    ) -> KeyedRelation:
        """Ask the catalog. Raises psycopg.Error; TableChangedError if the table is gone."""
        cursor = await connection.execute(_RELATION, (list(key), list(key), table.oid))
        row = await cursor.fetchone()
        if row is None:
            raise TableChangedError(table.id, "is not there any more")
        name = table.id
        blocks = BlockRange(name.schema, name.name, is_whole=row[0], oid=table.oid)
        types = {name: ComparedType(**kind) for name, kind in row[1].items()}
        return cls(blocks, types, row[2])

    @property
    def has_composite(self) -> bool:
        """Whether a column of the key is composite."""
        return any(kind.is_composite for kind in self.types.values())

    def column(self, name: str) -> sql.Composable:
        """Return a column of the key as it is compared."""
        kind = self.types.get(name)
        column = sql.Identifier(name)
        return column if kind is None else kind.column(column)

    def literal(self, column: str, value: str | bytes | None) -> sql.Composable:
        """Give a value of a key's column.

        Bare, where it can be: the server takes it for the column's own type. So no type or
        collation need be named, which the role might not be allowed to.
        """
        found = bare_literal(value)
        kind = self.types.get(column)
        return found if kind is None else kind.literal(found)


def bare_literal(value: str | bytes | None) -> sql.Composable:
    """Return a literal of no type; bytes are those that the database has, in its encoding."""
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
        """What stands after FROM."""
        return self.keyed.blocks.relation

    @property
    def bounds(self) -> list[sql.Composable]:
        """The condition."""
        key = self.table.identifying
        if self.keyed.equals:
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
                    operator_of(*self.keyed.equals.get(name, ("pg_catalog", "="))),
                    self.keyed.literal(name, value),
                )
                for name, value in key.items()
            )
        )
