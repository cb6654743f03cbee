"""Rows that are read by their keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from psycopg import AsyncConnection, sql

from ingestd.capture.blocks import BlockRange
from ingestd.decode.types import BUILT_IN, is_number, lake_type
from ingestd.errors import TableChangedError
from ingestd.keys import Key
from ingestd.schema import Column, Table

# Composite values are compared as records: what the server takes no bare literal for.
_RELATION = """
SELECT c.relkind::text = 'p',
       coalesce((SELECT jsonb_object_agg(a.attname, ARRAY[n.nspname::text, t.typname::text])
          FROM pg_catalog.pg_attribute a
          JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
          JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
          LEFT JOIN pg_catalog.pg_type b ON b.oid = t.typbasetype
         WHERE a.attrelid = c.oid AND a.attname = ANY(%s) AND 'c' IN (t.typtype, b.typtype)), '{}')
  FROM pg_catalog.pg_class c WHERE c.oid = %s
"""


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

    `composite`: the types, schema and name, of the key's columns that are composite.
    """

    blocks: BlockRange
    composite: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    async def find(
        cls, connection: AsyncConnection[Any], table: Table, key: Sequence[str]
    ) -> KeyedRelation:
        """Ask the catalog. Raises psycopg.Error; TableChangedError if the table is gone."""
        row = await (await connection.execute(_RELATION, (list(key), table.oid))).fetchone()
        if row is None:
            raise TableChangedError(table.id, "is not there any more")
        name = table.id
        blocks = BlockRange(name.schema, name.name, is_whole=row[0], oid=table.oid)
        return cls(blocks, row[1])

    def literal(self, column: str, value: str | bytes | None) -> sql.Composable:
        """Give a value of a key's column.

        Bare, where it can be: the server takes it for the column's own type. So no type or
        collation need be named, which the role might not be allowed to.
        """
        found = bare_literal(value)
        kind = self.composite.get(column)
        return found if kind is None else sql.SQL("{}::{}").format(found, sql.Identifier(*kind))


def bare_literal(value: str | bytes | None) -> sql.Composable:
    """Give a literal of no type; of bytes that are no UTF-8, of a database without an encoding."""
    if not isinstance(value, bytes):
        return sql.Literal(value)
    try:
        return sql.Literal(value.decode())
    except UnicodeDecodeError:
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
        names = [sql.Identifier(name) for name in key]
        rows = [sql.SQL(", ").join(map(self.keyed.literal, key, values)) for values in self.keys]
        if len(names) == 1:
            return [sql.SQL("{} IN ({})").format(names[0], sql.SQL(", ").join(rows))]
        listed = sql.SQL(", ").join(sql.SQL("({})").format(row) for row in rows)
        return [sql.SQL("({}) IN ({})").format(sql.SQL(", ").join(names), listed)]
