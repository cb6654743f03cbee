"""A range of a table's key: the rows of a split by key."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from psycopg import sql

_OPERATOR = re.compile(r"[-+*/<>=~!@#%^&|`?]{1,63}\Z")


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """A column of the key, and how its index compares it.

    `type`: schema and name; for a column of a domain, those of its base type: a value in the table
    need not pass the domain's checks. `is_cast`: it is compared as the base type.
    `operators`: their schema, the names of < and >=. `collation`: schema
    and name, None for a type without.
    """

    name: str
    type: tuple[str, str]
    operators: tuple[str, str, str]
    collation: tuple[str, str] | None = None
    is_cast: bool = False

    @property
    def text(self) -> sql.Composable:
        """The result of the type's output function, which its input function can read."""
        return sql.SQL("pg_catalog.concat({})").format(sql.Identifier(self.name))

    @property
    def value(self) -> sql.Composable:
        """The column, with the index's collation."""
        name: sql.Composable = sql.Identifier(self.name)
        if self.is_cast:
            name = sql.SQL("coalesce({}, NULL)").format(name)
        if self.collation is None:
            return name
        return sql.SQL("{} COLLATE {}").format(name, sql.Identifier(*self.collation))

    @property
    def ordering(self) -> sql.Composable:
        """The ORDER BY item."""
        schema, less, _ = self.operators
        return sql.SQL("{} USING {}").format(self.value, operator_of(schema, less))

    def literal(self, text: str) -> sql.Composable:
        """Return a literal that is comparable with `value`. It names no user-defined type."""
        if self.type[0] == "pg_catalog":
            return sql.SQL("{}::{}").format(text, sql.Identifier(*self.type))
        return sql.SQL("coalesce({}, {})").format(text, sql.Identifier(self.name))


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Rows of one table or partition from `lower` on, up to `upper` (exclusive); None: no bound.

    `oid`: of that relation; 0 in ranges that earlier versions made.
    The bounds are texts, one for each column of `key`, which all have the same operators.
    """

    schema: str
    name: str
    key: tuple[KeyColumn, ...]
    lower: tuple[str, ...] | None
    upper: tuple[str, ...] | None
    oid: int = 0

    def to_text(self) -> str:
        """Return the text for `Split.where`."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def parse(cls, text: str) -> KeyRange | None:
        """Return the range in a `Split.where`; None if that is not a range of the key."""
        found = json.loads(text)
        if "key" not in found:
            return None
        key = tuple(
            KeyColumn(
                column["name"],
                tuple(column["type"]),
                tuple(column["operators"]),
                None if column["collation"] is None else tuple(column["collation"]),
                is_cast=column.get("is_cast", False),
            )
            for column in found["key"]
        )
        lower, upper = (
            None if bound is None else tuple(bound) for bound in (found["lower"], found["upper"])
        )
        oid = found.get("oid", 0)
        return cls(found["schema"], found["name"], key, lower, upper, oid)

    @property
    def bounds(self) -> list[sql.Composable]:
        """The conditions, to be joined with AND; none for everything."""
        schema, less, not_less = self.key[0].operators
        bounds: list[sql.Composable] = []
        if self.lower is not None:
            bounds.append(self._compared(operator_of(schema, not_less), self.lower))
        if self.upper is not None:
            bounds.append(self._compared(operator_of(schema, less), self.upper))
        return bounds

    def _compared(self, operator: sql.Composable, bound: Sequence[str]) -> sql.Composable:
        return sql.SQL("ROW({}) {} ROW({})").format(
            sql.SQL(", ").join(column.value for column in self.key),
            operator,
            sql.SQL(", ").join(c.literal(t) for c, t in zip(self.key, bound, strict=True)),
        )


def operator_of(schema: str, name: str) -> sql.Composable:
    """Return an operator as SQL, which has no quotes for its name.

    Source: PostgreSQL documentation, "Lexical Structure", "Operators".
    """
    if not _OPERATOR.match(name):
        raise ValueError(name)
    return sql.SQL("OPERATOR({}.{})").format(sql.Identifier(schema), sql.SQL(name))
