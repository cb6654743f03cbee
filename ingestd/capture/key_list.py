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
        """The condition. Bare literals: the server takes them for the columns' own types.

        So no type or collation need be named, which the role might not be allowed to.
        """
        names = [sql.Identifier(name) for name in self.table.identifying]
        rows = [sql.SQL(", ").join(map(sql.Literal, key)) for key in self.keys]
        if len(names) == 1:
            return [sql.SQL("{} IN ({})").format(names[0], sql.SQL(", ").join(rows))]
        listed = sql.SQL(", ").join(sql.SQL("({})").format(row) for row in rows)
        return [sql.SQL("({}) IN ({})").format(sql.SQL(", ").join(names), listed)]
