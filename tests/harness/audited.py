"""A source that keeps its own history: triggers record each change of a row."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.harness.databases import Database

SCHEMA = (
    "CREATE TABLE documents (id int PRIMARY KEY, title text, body text, revision int)",
    "ALTER TABLE documents ALTER body SET STORAGE EXTERNAL",
    "CREATE TABLE events (kind text, n int)",
    "ALTER TABLE events REPLICA IDENTITY FULL",
    """CREATE TABLE noted (n bigserial PRIMARY KEY, name text, old jsonb, new jsonb)""",
    """CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
         INSERT INTO noted (name, old, new) VALUES (TG_TABLE_NAME,
           CASE WHEN TG_OP IN ('UPDATE', 'DELETE') THEN to_jsonb(OLD) END,
           CASE WHEN TG_OP IN ('UPDATE', 'INSERT') THEN to_jsonb(NEW) END);
         RETURN NULL; END $$""",
    *(
        statement
        for table in ("documents", "events")
        for statement in (
            (
                f"CREATE TRIGGER a AFTER INSERT OR UPDATE OR DELETE ON {table}"
                " FOR EACH ROW EXECUTE FUNCTION note()"
            ),
            (
                f"CREATE TRIGGER b AFTER TRUNCATE ON {table}"
                " FOR EACH STATEMENT EXECUTE FUNCTION note()"
            ),
        )
    ),
)

Rows = Counter[tuple[tuple[str, Any], ...]]
"""Rows as sorted (column, value) pairs, with the number of copies."""


def as_row(values: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(values.items()))


@dataclass
class Audited:
    """Writes to the tables of SCHEMA in one session.

    `points`: for each transaction, the number of notes at its end and its commit time.
    """

    database: Database
    rng: random.Random
    points: list[tuple[int, datetime]] = field(default_factory=list)

    def create(self) -> None:
        self.database.execute(*SCHEMA)

    def write(self, transactions: int) -> None:
        with self.database.connect(autocommit=False) as session:
            for _ in range(transactions):
                for _ in range(self.rng.choice((1, 3, 6))):
                    statement, values = self._statement()
                    session.execute(statement.encode(), values)
                [[xid]] = session.execute("SELECT pg_current_xact_id()::xid").fetchall()
                session.commit()
                [[notes, at]] = session.execute(
                    "SELECT (SELECT count(*) FROM noted), pg_xact_commit_timestamp(%s::text::xid)",
                    [str(xid)],
                ).fetchall()
                session.commit()
                self.points.append((notes, at))

    def rows(self, table: str, notes: int) -> Rows:
        """Return the rows of a table after this many notes."""
        found: Rows = Counter()
        for name, old, new in self.database.rows(
            "SELECT name, old, new FROM noted ORDER BY n LIMIT %s", notes
        ):
            if name != table:
                continue
            if old is None and new is None:
                found.clear()
            if old is not None:
                found[as_row(old)] -= 1
            if new is not None:
                found[as_row(new)] += 1
        return +found

    def _statement(self) -> tuple[str, list[Any]]:
        rng, key, other = self.rng, self.rng.randrange(12), self.rng.randrange(12)
        body = rng.choice("xyz") * rng.randint(3000, 5000)
        kind = rng.choice("ab")
        statements: list[tuple[str, list[Any]]] = [
            (
                (
                    "INSERT INTO documents (id, title, body, revision) VALUES (%s, 'new', %s, 0)"
                    " ON CONFLICT (id) DO UPDATE SET body = excluded.body"
                ),
                [key, body],
            ),
            (
                "UPDATE documents SET revision = revision + 1 WHERE id BETWEEN %s AND %s",
                [key, key + 2],
            ),
            (
                (
                    "UPDATE documents SET id = %s WHERE id = %s"
                    " AND NOT EXISTS (SELECT FROM documents WHERE id = %s)"
                ),
                [other, key, other],
            ),
            ("UPDATE documents SET title = NULL WHERE id = %s", [key]),
            ("DELETE FROM documents WHERE id = %s", [key]),
            ("INSERT INTO events (kind, n) SELECT %s, 1 FROM generate_series(1, 3)", [kind]),
            ("UPDATE events SET n = n + 1 WHERE kind = %s", [kind]),
            (
                "DELETE FROM events WHERE ctid = ANY(ARRAY(SELECT ctid FROM events LIMIT %s))",
                [rng.choice((1, 2, 30))],
            ),
            (rng.choice(("TRUNCATE events", "SELECT 1", "SELECT 2")), []),
        ]
        return rng.choice(statements)
