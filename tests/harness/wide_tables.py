"""Tables with a column for each type, and a row for each of its values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from psycopg import sql

from tests.harness.round_trip import Texts, read_texts
from tests.harness.types import BUILT_IN
from tests.harness.user_types import EXTENSIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.harness.databases import Database
    from tests.harness.types import Type, Values

STREAMED = 1000
"""Added to the `id` of a snapshot's row for the streamed row with the same values."""
FIRST_WITH_ESCAPED_CHAR = 15


@dataclass(frozen=True)
class Column:
    name: str
    sql_type: str
    delta: str
    expressions: list[sql.Composable]
    odd: range
    """The expressions whose values the column can't represent."""


@dataclass(frozen=True)
class Wide:
    """A table with a column for each type, and as many rows as the longest list of values."""

    name: str
    columns: list[Column]

    @property
    def rows(self) -> int:
        return max(len(c.expressions) for c in self.columns)

    @property
    def names(self) -> list[str]:
        return [c.name for c in self.columns]

    def create(self, database: Database) -> None:
        table = sql.Identifier(self.name)
        definitions = [
            sql.SQL("{} {}").format(sql.Identifier(c.name), sql.SQL(c.sql_type))
            for c in self.columns
        ]
        with database.connect() as connection:
            connection.execute(
                sql.SQL("CREATE TABLE {} (id int PRIMARY KEY, {})").format(
                    table, sql.SQL(", ").join(definitions)
                )
            )
            connection.execute(sql.SQL("ALTER TABLE {} REPLICA IDENTITY FULL").format(table))
            for i in range(self.rows):
                values = [c.expressions[i % len(c.expressions)] for c in self.columns]
                connection.execute(
                    sql.SQL("INSERT INTO {} VALUES ({}, {})").format(
                        table, i, sql.SQL(", ").join(values)
                    )
                )

    def change(self, database: Database) -> tuple[dict[int, Texts], dict[int, Texts]]:
        """Insert all rows again, rotate their values, delete them; return both sets of values."""
        table, columns = sql.Identifier(self.name), [sql.Identifier(n) for n in self.names]
        insert = sql.SQL("INSERT INTO {0} SELECT id + {1}, {2} FROM {0}").format(
            table, STREAMED, sql.SQL(", ").join(columns)
        )
        update = sql.SQL(
            "UPDATE {0} SET {1} FROM {0} n WHERE {0}.id >= {2} AND n.id = ({0}.id - {2} + 1) % {3}"
        ).format(
            table,
            sql.SQL(", ").join(sql.SQL("{0} = n.{0}").format(c) for c in columns),
            STREAMED,
            self.rows,
        )
        delete = sql.SQL("DELETE FROM {} WHERE id >= {}").format(table, STREAMED)
        with database.connect() as connection:
            connection.execute(insert)
            inserted = read_texts(database, self.name, self.names)
            connection.execute(update)
            updated = read_texts(database, self.name, self.names)
            connection.execute(delete)
        return inserted, updated


def columns_of(types: Sequence[Type]) -> list[Column]:
    return [
        Column(
            f"c{i}",
            t.name,
            t.delta,
            t.expressions(),
            range(len(t.values), len(t.values) + len(t.odd)),
        )
        for i, t in enumerate(types)
    ]


def array_columns_of(types: Sequence[Type]) -> list[Column]:
    found = []
    for i, t in enumerate(types):
        if t.array_delta:
            expressions = t.array_expressions()
            odd = range(4, len(expressions) - 1) if t.array_delta != "string" else range(0)
            found.append(Column(f"a{i}", f"{t.name}[]", t.array_delta, expressions, odd))
    return found


def built_in_types(database: Database) -> list[Type]:
    """Return the types that the server has. Without libxml, xml has no values.

    Nor has "char" values above 127 on servers that send them as bytes, which are not text.
    """
    query = "SELECT setting LIKE '%--with-libxml%' FROM pg_config WHERE name = 'CONFIGURE'"
    values: dict[str, Values] = {} if database.value(query) else {"xml": ()}
    if database.server.major < FIRST_WITH_ESCAPED_CHAR:
        values['"char"'] = ("", "a", "\\", " ")
    return [
        replace(t, values=values.get(t.name, t.values))
        for t in BUILT_IN
        if t.since <= database.server.major
    ]


def install_extensions(database: Database) -> list[Type]:
    """Create the extensions that the server has; return their types."""
    query = "SELECT name FROM pg_available_extensions"
    available = {name for (name,) in database.rows(query)}
    found: list[Type] = []
    for name, types in EXTENSIONS.items():
        if name in available:
            database.execute(f"CREATE EXTENSION {name}")
            found += types
    return found
