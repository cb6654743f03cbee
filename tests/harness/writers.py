"""Sessions that write any tables, with the columns that the tables have at the time.

They continue while tables are altered: each transaction reads the catalog first, and is rolled back
if its table changed in the meantime.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import psycopg
from psycopg import errors, sql

from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ingestd.model.schema import TableId

    Session = psycopg.Connection[tuple[Any, ...]]

UNIQUE = ("id", "code")
"""Columns with these names never get the same value twice."""

_COLUMNS = """
SELECT c.oid::int8, a.attname::text, format_type(a.atttypid, a.atttypmod), a.attnotnull,
       coalesce(b.typcategory, t.typcategory)::text, coalesce(b.oid, t.oid)::regtype::text
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
  JOIN pg_type t ON t.oid = a.atttypid LEFT JOIN pg_type b ON b.oid = t.typbasetype
 WHERE c.oid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
 ORDER BY a.attnum"""
_TOO_LATE = (
    errors.UndefinedTable,
    errors.UndefinedColumn,
    errors.UndefinedObject,
    errors.FeatureNotSupported,  # cached plan must not change result type
    errors.DatatypeMismatch,
    errors.DeadlockDetected,
    errors.SerializationFailure,  # moved to another partition meanwhile
    errors.LockNotAvailable,
    errors.ObjectNotInPrerequisiteState,  # no replica identity: no update, no delete
    errors.IntegrityError,
    errors.DataError,
    errors.ObjectInUse,
)


@dataclass(frozen=True, slots=True)
class WriteColumn:
    name: str
    type: str
    is_required: bool
    category: str
    base: str


class Writers:
    """`sessions` threads that write to `tables` until `stop`, which raises their errors.

    A context manager. Three of four transactions choose from `focus`.
    """

    def __init__(
        self, dsn: str, tables: Collection[TableId], *, seed: int = 1, sessions: int = 2
    ) -> None:
        self.tables = list(tables)
        self.focus: list[TableId] = []
        self.committed: Counter[TableId] = Counter()
        self.refused: Counter[str] = Counter()
        self._dsn = dsn
        self._seed = seed
        self._unique = itertools.count(1_000)
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(sessions, thread_name_prefix="writer")
        self._futures: list[Future[None]] = []
        self._sessions = sessions

    def __enter__(self) -> Self:
        self._futures = [self._pool.submit(self._write, n) for n in range(self._sessions)]
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End after the current transactions."""
        self._stopping.set()
        for future in self._futures:
            future.result(timeout=60)
        self._pool.shutdown()

    def await_writes(self, tables: Iterable[TableId], count: int, limit_s: float = 30.0) -> None:
        """Wait until each of these tables was written in `count` more transactions."""
        self.focus = [t for t in tables if t in self.tables]
        goal = {table: self.committed[table] + count for table in self.focus}

        def reached() -> bool:
            for future in self._futures:
                if future.done():
                    future.result()
            return all(self.committed[table] >= n for table, n in goal.items())

        await_until(reached, limit_s, lambda: f"writes to {goal}, {self.refused}", poll_s=0.01)

    # --- inside ------------------------------------------------------------------------------

    def _write(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        with psycopg.connect(self._dsn, prepare_threshold=None) as session:
            session.execute("SET deadlock_timeout = '50ms'")
            session.execute("SET lock_timeout = '5s'")
            session.commit()
            while not self._stopping.wait(0.002):
                self._transaction(session, rng)

    def _transaction(self, session: Session, rng: random.Random) -> None:
        pool = self.focus if self.focus and rng.random() < 0.75 else self.tables
        chosen = sorted(set(rng.choices(pool, k=rng.choice((1, 1, 2)))))
        try:
            written = [table for table in chosen if write(session, table, rng, self._unique)]
            session.commit()
        except _TOO_LATE as error:
            session.rollback()
            self.refused[type(error).__name__] += 1
        else:
            self.committed.update(written)


def write(
    session: Session, table: TableId, rng: random.Random, unique: itertools.count[int]
) -> bool:
    """Insert, update or delete rows of the table; return False if it does not exist."""
    columns = columns_of(session, table)
    if not columns:
        return False
    for _ in range(rng.choice((1, 2, 4))):
        action = rng.choices((_insert, _update, _delete), (5, 4, 2))[0]
        action(session, table, columns, rng, unique)
    return True


def columns_of(session: Session, table: TableId) -> list[WriteColumn]:
    """Return the table's present columns, except generated ones."""
    name = sql.Identifier(table.schema, table.name).as_string(None)
    found = session.execute(_COLUMNS.encode(), [name]).fetchall()
    return [WriteColumn(*row[1:]) for row in found]


def _insert(
    session: Session,
    table: TableId,
    columns: list[WriteColumn],
    rng: random.Random,
    unique: itertools.count[int],
) -> None:
    # Some columns get their default.
    named = [
        c for c in columns if c.is_required or c.name in UNIQUE or rng.random() < 0.8
    ] or columns
    query = sql.SQL("INSERT INTO {} ({}) VALUES ({}) ON CONFLICT DO NOTHING").format(
        sql.Identifier(table.schema, table.name),
        sql.SQL(", ").join(sql.Identifier(c.name) for c in named),
        sql.SQL(", ").join(_cast(c) for c in named),
    )
    session.execute(query, [_text(session, c, rng, unique) for c in named])


def _update(
    session: Session,
    table: TableId,
    columns: list[WriteColumn],
    rng: random.Random,
    unique: itertools.count[int],
) -> None:
    named = [c for c in columns if rng.random() < (0.1 if c.name in UNIQUE else 0.6)] or columns
    query = sql.SQL("UPDATE {} SET {} WHERE {}").format(
        sql.Identifier(table.schema, table.name),
        sql.SQL(", ").join(
            sql.SQL("{} = {}").format(sql.Identifier(c.name), _cast(c)) for c in named
        ),
        _any_row(table),
    )
    session.execute(query, [_text(session, c, rng, unique) for c in named])


def _delete(
    session: Session,
    table: TableId,
    columns: list[WriteColumn],
    rng: random.Random,
    unique: itertools.count[int],
) -> None:
    del columns, rng, unique
    query = sql.SQL("DELETE FROM {} WHERE {}")
    session.execute(query.format(sql.Identifier(table.schema, table.name), _any_row(table)))


def _any_row(table: TableId) -> sql.Composable:
    return sql.SQL(
        "(tableoid, ctid) IN (SELECT tableoid, ctid FROM {} ORDER BY random() LIMIT 1)"
    ).format(sql.Identifier(table.schema, table.name))


def _cast(column: WriteColumn) -> sql.Composable:
    return sql.SQL("%s::text::{}").format(sql.SQL(column.type))


def _text(
    session: Session, column: WriteColumn, rng: random.Random, unique: itertools.count[int]
) -> str | None:
    """Return a value as text, with digits wherever a column may become numeric."""
    if column.name in UNIQUE:
        return str(next(unique))
    if not column.is_required and rng.random() < 0.15:
        return None
    number = str(rng.randint(1, 99))
    if column.category == "B":
        return rng.choice("tf")
    if column.category == "D":
        return f"2024-0{rng.randint(1, 9)}-1{rng.randint(0, 9)} 12:{rng.randint(10, 59)}:07.25"
    if column.category == "E":
        return _label(session, column, rng)
    has_fraction = column.base in {"numeric", "double precision", "real"}
    return f"{number}.{rng.randint(0, 99):02}" if has_fraction else number


def _label(session: Session, column: WriteColumn, rng: random.Random) -> str:
    query = sql.SQL("SELECT unnest(enum_range(NULL::{}))::text").format(sql.SQL(column.base))
    return str(rng.choice(session.execute(query).fetchall())[0])
