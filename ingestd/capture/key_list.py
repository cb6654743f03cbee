"""Rows that are read by their keys."""

from __future__ import annotations

from dataclasses import dataclass

from psycopg import sql

from ingestd.capture.blocks import BlockRange
from ingestd.keys import Key
from ingestd.schema import Table


@dataclass(frozen=True, slots=True)
class KeyList:
    """The rows of `table`, in the relation that `whole` names, with these `keys`."""

    table: Table
    whole: BlockRange
    keys: tuple[Key, ...]

    @property
    def relation(self) -> sql.Composable:
        """What stands after FROM."""
        return self.whole.relation

    @property
    def bounds(self) -> list[sql.Composable]:
        """The condition: the server reads the texts as the columns' types, and compares."""
        columns = [self.table.column(n) for n in self.table.identifying]
        numbered = [sql.Identifier(f"k{i}") for i in range(len(columns))]
        values = [
            sql.SQL("{}::{}").format(alias, sql.SQL(column.pg_type))
            for alias, column in zip(numbered, columns, strict=True)
        ]
        lists = [
            sql.SQL("pg_catalog.unnest({}::pg_catalog.text[])").format(list(v))
            for v in zip(*self.keys, strict=True)
        ]
        return [
            sql.SQL("({}) IN (SELECT {} FROM ROWS FROM ({}) AS keys({}))").format(
                sql.SQL(", ").join(sql.Identifier(c.name) for c in columns),
                sql.SQL(", ").join(values),
                sql.SQL(", ").join(lists),
                sql.SQL(", ").join(numbered),
            )
        ]
