"""The order in which a table's keys are read: that of a unique index, by its own operators.

Source: PostgreSQL documentation, "System Catalogs" (pg_index, pg_amop), "Row Constructor
Comparison".
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from psycopg import AsyncConnection, sql
from psycopg.rows import class_row

from ingestd.model.schema import Table
from ingestd.postgres.snapshot.key_lookup import ComparedType
from ingestd.postgres.snapshot.key_range import operator_of

# The primary key, else the unique index with the fewest columns, all of which belong to the key.
# btree: strategy 1 is <, 3 is =, 5 is >. Bit 0 of indoption: descending.
_ORDER = """
SELECT i.indexrelid::int8 AS index_oid, a.attname::text AS name,
       (i.indoption::int2[])[k.place - 1] & 1 = 1 AS is_descending,
       ns.nspname::text AS operator_schema, l.oprname::text AS less, e.oprname::text AS equal,
       g.oprname::text AS greater,
       oc.opcdefault AND k.collation_oid = a.attcollation AS is_default,
       CASE WHEN k.collation_oid <> a.attcollation THEN cn.nspname::text END AS collation_schema,
       CASE WHEN k.collation_oid <> a.attcollation THEN c.collname::text END AS collation_name
  FROM pg_catalog.pg_index i
 CROSS JOIN LATERAL ROWS FROM (
       unnest(i.indkey::int2[]), unnest(i.indclass::oid[]), unnest(i.indcollation::oid[]))
       WITH ORDINALITY k(number, opclass, collation_oid, place)
  JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
  JOIN pg_catalog.pg_opclass oc ON oc.oid = k.opclass
  JOIN pg_catalog.pg_amop la ON la.amopfamily = oc.opcfamily AND la.amopstrategy = 1
       AND la.amoplefttype = oc.opcintype AND la.amoprighttype = oc.opcintype
  JOIN pg_catalog.pg_amop ga ON ga.amopfamily = oc.opcfamily AND ga.amopstrategy = 5
       AND ga.amoplefttype = oc.opcintype AND ga.amoprighttype = oc.opcintype
  JOIN pg_catalog.pg_amop ea ON ea.amopfamily = oc.opcfamily AND ea.amopstrategy = 3
       AND ea.amoplefttype = oc.opcintype AND ea.amoprighttype = oc.opcintype
  JOIN pg_catalog.pg_operator l ON l.oid = la.amopopr
  JOIN pg_catalog.pg_operator g ON g.oid = ga.amopopr AND g.oprnamespace = l.oprnamespace
  JOIN pg_catalog.pg_operator e ON e.oid = ea.amopopr AND e.oprnamespace = l.oprnamespace
  JOIN pg_catalog.pg_namespace ns ON ns.oid = l.oprnamespace
  LEFT JOIN pg_catalog.pg_collation c ON c.oid = k.collation_oid
  LEFT JOIN pg_catalog.pg_namespace cn ON cn.oid = c.collnamespace
 WHERE i.indrelid = %(oid)s AND i.indisvalid AND i.indisunique AND i.indpred IS NULL
   AND i.indexprs IS NULL
   AND NOT EXISTS (SELECT FROM unnest(i.indkey::int2[]) WITH ORDINALITY other(number, place)
                     LEFT JOIN pg_catalog.pg_attribute o
                       ON o.attrelid = i.indrelid AND o.attnum = other.number
                    WHERE other.place <= i.indnkeyatts
                      AND NOT coalesce(o.attnotnull AND o.attname = ANY(%(key)s), false))
 ORDER BY i.indisprimary DESC, i.indnkeyatts, i.indexrelid, k.place
"""


@dataclass(frozen=True, slots=True)
class OrderedColumn:
    """A column of the index. `collation`: the index's, if it differs from the column's.

    `is_default`: its operators are those of the type's default order, in the column's collation.
    `type`: the type that it is compared as, if not its own.
    """

    name: str
    is_descending: bool = False
    operator_schema: str = "pg_catalog"
    less: str = "<"
    equal: str = "="
    greater: str = ">"
    collation_schema: str | None = None
    collation_name: str | None = None
    index_oid: int = 0
    is_default: bool = False
    type: ComparedType | None = None

    @property
    def value(self) -> sql.Composable:
        """The column, with the index's collation."""
        name: sql.Composable = sql.Identifier(self.name)
        if self.type is not None:
            name = self.type.column(name)
        is_text = self.type is not None and self.type.is_text
        if is_text or self.collation_schema is None or self.collation_name is None:
            return name
        collation = sql.Identifier(self.collation_schema, self.collation_name)
        return sql.SQL("{} COLLATE {}").format(name, collation)

    @property
    def after(self) -> sql.Composable:
        """The operator that is true if the left value follows the right one."""
        return self._operator(self.less if self.is_descending else self.greater)

    @property
    def equals(self) -> sql.Composable:
        """The operator that is true if both values have the same place."""
        return self._operator(self.equal)

    @property
    def ordering(self) -> sql.Composable:
        """The ORDER BY item."""
        if self.is_default and not (self.type is not None and self.type.is_text):
            # By the bare column, whose order the index has; no operator need be named.
            direction = sql.SQL("DESC" if self.is_descending else "ASC")
            return sql.SQL("{} {}").format(sql.Identifier(self.name), direction)
        before = self._operator(self.greater if self.is_descending else self.less)
        return sql.SQL("{} USING {}").format(self.value, before)

    def _operator(self, name: str) -> sql.Composable:
        return operator_of(self.operator_schema, name)


@dataclass(frozen=True, slots=True)
class KeyOrder:
    """A total order of the keys. `is_indexed`: by an index; else each page sorts the table."""

    columns: tuple[OrderedColumn, ...]
    is_indexed: bool

    @property
    def ordering(self) -> sql.Composable:
        """The ORDER BY list."""
        return sql.SQL(", ").join(c.ordering for c in self.columns)

    def after(self, place: Sequence[sql.Composable]) -> list[sql.Composable]:
        """Return conditions for the keys that follow one; `place` has the values of its columns.

        Rows that satisfy the first condition precede those that satisfy the second, and so on; an
        index serves each. One row comparison is enough if one operator orders all columns.
        """
        if len({c.after.as_string(None) for c in self.columns}) == 1:
            values = sql.SQL(", ").join(c.value for c in self.columns)
            after = self.columns[0].after
            return [sql.SQL("ROW({}) {} ROW({})").format(values, after, sql.SQL(", ").join(place))]
        return [self._equal_up_to(i, place) for i in reversed(range(len(self.columns)))]

    def _equal_up_to(self, number: int, place: Sequence[sql.Composable]) -> sql.Composable:
        conditions = [
            sql.SQL("{} {} {}").format(column.value, column.equals, value)
            for column, value in zip(self.columns[:number], place, strict=False)
        ]
        column = self.columns[number]
        follows = sql.SQL("{} {} {}").format(column.value, column.after, place[number])
        return sql.SQL(" AND ").join([*conditions, follows])


async def key_order(
    connection: AsyncConnection[Any], table: Table, types: Mapping[str, ComparedType]
) -> KeyOrder:
    """Return the order of a table's keys; `types`: `KeyedRelation.types`. Raises psycopg.Error."""
    async with connection.cursor(row_factory=class_row(OrderedColumn)) as cursor:
        await cursor.execute(_ORDER, {"oid": table.oid, "key": list(table.key)})
        rows = await cursor.fetchall()
    if not rows:
        named = tuple(
            OrderedColumn(name, type=types.get(name), is_default=name in types)
            for name in table.key
        )
        return KeyOrder(named, is_indexed=False)
    chosen = itertools.takewhile(lambda row: row.index_oid == rows[0].index_oid, rows)
    columns = tuple(_typed(c, types.get(c.name)) for c in chosen)
    if all(c.is_descending for c in columns):  # the index can be read backwards
        columns = tuple(replace(c, is_descending=False) for c in columns)
    return KeyOrder(columns, is_indexed=True)


def _typed(column: OrderedColumn, kind: ComparedType | None) -> OrderedColumn:
    if kind is None or not kind.is_text:
        return replace(column, type=kind)
    return OrderedColumn(column.name, column.is_descending, type=kind)
