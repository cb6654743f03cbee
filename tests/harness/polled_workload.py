"""A seeded random workload with changes that are difficult to poll. Every write has a number.

Cursors are old, null, equal or years ahead. Transactions are slow, commit out of order, or are
rolled back completely or to a savepoint. Keys change, are deleted, and come back, even within one
transaction. Numbers and texts are equal but written differently.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import psycopg
from psycopg import errors

from ingestd.model.schema import TableId
from tests.harness.collations import make_collations

if TYPE_CHECKING:
    from tests.harness.databases import Database

    Session = psycopg.Connection[tuple[Any, ...]]

SCHEMA = (
    "CREATE SEQUENCE versions",
    """CREATE TABLE orders (
        id bigint PRIMARY KEY, at timestamptz, note text,
        version bigint NOT NULL DEFAULT nextval('versions'))""",
    "CREATE INDEX ON orders (at)",
    """CREATE TABLE notes (
        id int PRIMARY KEY, at timestamptz NOT NULL, deleted_at timestamptz,
        version bigint NOT NULL DEFAULT nextval('versions'))""",
    "CREATE INDEX ON notes (at)",
    "CREATE SCHEMA seen",
    "CREATE VIEW seen.notes AS SELECT * FROM notes WHERE deleted_at IS NULL",
    """CREATE TABLE tokens (
        id uuid PRIMARY KEY, version bigint NOT NULL DEFAULT nextval('versions'))""",
    """CREATE TABLE parts (
        number numeric, region text COLLATE ignoring, step int NOT NULL,
        version bigint NOT NULL DEFAULT nextval('versions'), PRIMARY KEY (region, number))""",
    "CREATE INDEX ON parts (step)",
)
ORDERS, NOTES, TOKENS, PARTS = (
    TableId("public", n) for n in ("orders", "notes", "tokens", "parts")
)
SEEN_NOTES = TableId("seen", "notes")
"""Notes that are not hidden."""
KEYS = {ORDERS: ("id",), NOTES: ("id",), TOKENS: ("id",), PARTS: ("region", "number")}
CURSORS = """
[sources.shop.table."public.orders"]
cursor = "at"
detect_deletes = "300ms"

[sources.shop.table."public.notes"]
cursor = "at"
deleted = "deleted_at"
detect_deletes = "300ms"

[sources.shop.table."public.tokens"]
detect_deletes = "300ms"

[sources.shop.table."public.parts"]
cursor = "step"
detect_deletes = "300ms"
"""
STAYING = range(1000, 1010)
"""Orders that exist from the beginning, and in every snapshot."""
_KEYS = 40
_PASSING = (
    errors.DeadlockDetected,
    errors.LockNotAvailable,
    errors.UniqueViolation,
    errors.SerializationFailure,
)


def create_tables(database: Database) -> None:
    """Create the tables, with the orders that always exist."""
    make_collations(database)
    database.execute(*SCHEMA)
    database.execute(
        f"INSERT INTO orders SELECT i, now(), 'stays'"
        f" FROM generate_series({STAYING[0]}, {STAYING[-1]}) i"
    )


class PolledWorkload:
    """Threads that write until `stop`, which raises a thread's error."""

    def __init__(self, dsn: str, *, seed: int, sessions: int = 4) -> None:
        self.outcomes: Counter[str] = Counter()
        self._dsn = dsn
        self._seed = seed
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(sessions, thread_name_prefix="polled")
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
            future.result()
        self._pool.shutdown()

    # --- inside ------------------------------------------------------------------------------

    def _write(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        while not self._stopping.is_set():
            try:
                with psycopg.connect(self._dsn, connect_timeout=5) as session:
                    session.execute("SET deadlock_timeout = '20ms'")
                    session.execute("SET lock_timeout = '2s'")
                    session.commit()
                    while not self._stopping.is_set():
                        self._count(self._transaction(session, rng))
                        self._stopping.wait(rng.uniform(0, 0.02))
            except psycopg.OperationalError:
                self._count("cut off")
                self._stopping.wait(0.05)

    def _count(self, outcome: str) -> None:
        with self._lock:
            self.outcomes[outcome] += 1

    def _transaction(self, session: Session, rng: random.Random) -> str:
        try:
            for _ in range(rng.choice((1, 1, 2, 4))):
                if rng.random() < 0.4:
                    self._in_a_savepoint(session, rng)
                else:
                    _act(session, rng)
                if rng.random() < 0.1:  # slow: others commit meanwhile
                    self._stopping.wait(rng.uniform(0, 0.4))
        except _PASSING:
            session.rollback()
            return "conflict"
        if rng.random() < 0.15:
            session.rollback()
            return "rolled back"
        session.commit()
        return "committed"

    def _in_a_savepoint(self, session: Session, rng: random.Random) -> None:
        session.execute("SAVEPOINT s")
        _act(session, rng)
        if rng.random() < 0.3:
            session.execute("ROLLBACK TO s")
        else:
            session.execute("RELEASE s")


def _act(session: Session, rng: random.Random) -> None:
    _ACTIONS[rng.randrange(len(_ACTIONS))](session, rng)


def _cursor(rng: random.Random) -> str:
    """Return a value for a cursor: mostly a correct one."""
    return rng.choice(
        (
            *("clock_timestamp()", "clock_timestamp()", "now()", "now()"),
            *("now() - interval '1 year'", "NULL", "timestamptz '2020-01-01'"),
            *("now() + interval '3 years'",),
        )
    )


def _run(session: Session, statement: str, *values: object) -> None:
    session.execute(statement.encode(), values or None)


def _put_order(session: Session, rng: random.Random) -> None:
    _run(
        session,
        f"""INSERT INTO orders VALUES (%s, {_cursor(rng)}, %s) ON CONFLICT (id) DO UPDATE
            SET note = excluded.note, at = excluded.at, version = nextval('versions')""",
        rng.randrange(_KEYS),
        rng.choice(("a", "ü", None)),
    )


def _touch_orders(session: Session, rng: random.Random) -> None:
    _run(
        session,
        "UPDATE orders SET note = note, version = nextval('versions') WHERE id BETWEEN %s AND %s",
        low := rng.randrange(_KEYS),
        low + 2,
    )


def _touch_staying(session: Session, rng: random.Random) -> None:
    at = _cursor(rng)
    if rng.random() < 0.5:
        _run(
            session,
            f"UPDATE orders SET at = {at}, version = nextval('versions') WHERE id = %s",
            rng.choice(STAYING),
        )
        return
    # Deleted and inserted in one transaction: every snapshot contains the row.
    _run(
        session,
        "DELETE FROM orders WHERE id = %s",
        key := rng.choice(STAYING),
    )
    _run(session, f"INSERT INTO orders VALUES (%s, {at}, 'again') ON CONFLICT DO NOTHING", key)


def _drop_orders(session: Session, rng: random.Random) -> None:
    _run(session, "DELETE FROM orders WHERE id = %s", rng.randrange(_KEYS))


def _renumber_order(session: Session, rng: random.Random) -> None:
    _run(
        session,
        "UPDATE orders SET id = %s, version = nextval('versions') WHERE id = %s",
        rng.randrange(_KEYS),
        rng.randrange(_KEYS),
    )


def _put_note(session: Session, rng: random.Random) -> None:
    _run(
        session,
        """INSERT INTO notes VALUES (%s, now(), NULL) ON CONFLICT (id) DO UPDATE
           SET at = excluded.at, deleted_at = NULL, version = nextval('versions')""",
        rng.randrange(_KEYS),
    )


def _hide_note(session: Session, rng: random.Random) -> None:
    _run(
        session,
        """UPDATE notes SET deleted_at = now(), at = now(), version = nextval('versions')
            WHERE id = %s""",
        rng.randrange(_KEYS),
    )


def _drop_note(session: Session, rng: random.Random) -> None:
    _run(session, "DELETE FROM notes WHERE id = %s", rng.randrange(_KEYS))


def _token(rng: random.Random) -> str:
    return f"00000000-0000-4000-8000-{rng.randrange(_KEYS):012x}"


def _put_token(session: Session, rng: random.Random) -> None:
    _run(
        session,
        """INSERT INTO tokens VALUES (%s) ON CONFLICT (id) DO UPDATE
           SET version = nextval('versions')""",
        _token(rng),
    )


def _drop_token(session: Session, rng: random.Random) -> None:
    _run(session, "DELETE FROM tokens WHERE id = %s", _token(rng))


def _region(rng: random.Random) -> str:
    return rng.choice(("Nord", "nord", "süd", "Süd", "straße", "", "z"))


def _number(rng: random.Random) -> str:
    return rng.choice(("1", "1.0", "1.00", "2", "-0.5", "1e30", "NaN", "10", "9"))


def _put_part(session: Session, rng: random.Random) -> None:
    _run(
        session,
        """INSERT INTO parts VALUES (%s, %s, %s) ON CONFLICT (region, number) DO UPDATE
           SET step = excluded.step, region = excluded.region, number = excluded.number,
               version = nextval('versions')""",
        _number(rng),
        _region(rng),
        rng.randrange(100),
    )


def _drop_part(session: Session, rng: random.Random) -> None:
    _run(
        session,
        "DELETE FROM parts WHERE region = %s AND number = %s",
        _region(rng),
        _number(rng),
    )


_ACTIONS = (
    *(_put_order, _put_order, _touch_orders, _drop_orders, _renumber_order),
    *(_touch_staying, _touch_staying),
    *(_put_note, _put_note, _hide_note, _drop_note),
    *(_put_token, _put_token, _drop_token),
    *(_put_part, _put_part, _drop_part),
)
