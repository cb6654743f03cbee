"""A seeded random workload of several sessions, with cases that are difficult to capture.

Composite keys, updates of rows with TOASTed columns, key changes (with unsent TOAST under the old
key), truncates, rolled-back savepoints and transactions, upserts, a keyless table with equal rows,
multi-byte names, transactions on several tables.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import psycopg
from psycopg import errors

if TYPE_CHECKING:
    from collections.abc import Callable

    Session = psycopg.Connection[tuple[Any, ...]]
    Action = Callable[[Session, random.Random], None]

SCHEMA = (
    """CREATE TABLE accounts (
        id bigint PRIMARY KEY, owner text NOT NULL, balance numeric(12,2), rate float8, weight real,
        is_open boolean, opened timestamptz, code char(6), token uuid)""",
    """CREATE TABLE order_lines (
        order_id int, line_no smallint, sku varchar(20), quantity int, shipped date,
        PRIMARY KEY (order_id, line_no))""",
    """CREATE TABLE documents (
        id int PRIMARY KEY, title text, body text, revision int NOT NULL, scan bytea)""",
    "ALTER TABLE documents ALTER body SET STORAGE EXTERNAL, ALTER scan SET STORAGE EXTERNAL",
    "CREATE TABLE events (kind text, payload jsonb, at timestamp, amount numeric(20,6))",
    "ALTER TABLE events REPLICA IDENTITY FULL",
    'CREATE TABLE "Ünï Tbl" ("Schlüssel" int PRIMARY KEY, "größe" text, "x y" interval)',
    "CREATE TABLE visits (id int PRIMARY KEY, host inet, seen time)",
)
TABLES = ("accounts", "order_lines", "documents", "events", "Ünï Tbl", "visits")

_KEYS = 60  # few, so that sessions meet
_RECONNECT_LIMIT_S = 60.0
_CONFLICTS = (
    errors.DeadlockDetected,
    errors.LockNotAvailable,
    errors.UniqueViolation,
    errors.SerializationFailure,
)


def create_schema(dsn: str) -> None:
    """Create the tables, empty."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in SCHEMA:
            connection.execute(statement.encode())


class Workload:
    """`sessions` threads that write up to `transactions`, for up to `limit_s`, or until `stop`.

    The choices are seeded; the interleaving is the server's. `pause_s`: between two transactions of
    a session. Sessions reconnect if the server goes down. A context manager starts and stops it;
    `stop` and `join` raise a session's error.
    """

    def __init__(
        self,
        dsn: str,
        *,
        seed: int,
        sessions: int = 3,
        transactions: int = 1000,
        limit_s: float = 60.0,
        pause_s: float = 0.0,
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self._dsn = dsn
        self._seed = seed
        self._budget = transactions
        self._limit_s = limit_s
        self._pause_s = pause_s
        self._deadline = 0.0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._sessions = sessions
        self._pool: ThreadPoolExecutor | None = None
        self._futures: list[Future[None]] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._deadline = time.monotonic() + self._limit_s
        self._pool = ThreadPoolExecutor(self._sessions, thread_name_prefix="workload")
        self._futures = [self._pool.submit(self._write, n) for n in range(self._sessions)]

    @property
    def is_running(self) -> bool:
        return any(not future.done() for future in self._futures)

    @property
    def committed(self) -> int:
        """Transactions committed so far."""
        return self.outcomes["committed"]

    def join(self) -> Counter[str]:
        """Wait for the end; return how many committed, rolled back, conflicted or were cut off."""
        for future in self._futures:
            future.result(timeout=self._limit_s + _RECONNECT_LIMIT_S)
        if self._pool is not None:
            self._pool.shutdown()
        return self.outcomes

    def stop(self) -> Counter[str]:
        """End after the current transactions."""
        self._stopping.set()
        return self.join()

    # --- inside ------------------------------------------------------------------------------

    def _write(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        while not self._is_over():
            try:
                with psycopg.connect(self._dsn, connect_timeout=5) as session:
                    session.execute("SET deadlock_timeout = '20ms'")
                    session.execute("SET lock_timeout = '2s'")
                    session.commit()
                    while self._take():
                        self._count(_transaction(session, rng))
                        self._stopping.wait(self._pause_s)
            except psycopg.OperationalError:
                self._count("cut off")  # server killed or starting: until the deadline
                self._stopping.wait(0.05)

    def _is_over(self) -> bool:
        return self._stopping.is_set() or self._budget <= 0 or time.monotonic() > self._deadline

    def _take(self) -> bool:
        with self._lock:
            if self._is_over():
                return False
            self._budget -= 1
            return True

    def _count(self, outcome: str) -> None:
        with self._lock:
            self.outcomes[outcome] += 1


def _transaction(session: Session, rng: random.Random) -> str:
    """Run one random transaction; return its outcome."""
    try:
        for _ in range(rng.choice((1, 1, 2, 3, 5, 12))):
            if rng.random() < 0.12:
                _undone_savepoint(session, rng)
            else:
                _action(rng)(session, rng)
        if rng.random() < 0.08:
            session.rollback()
            return "rolled back"
        session.commit()
    except _CONFLICTS:
        session.rollback()
        return "conflict"
    return "committed"


def _undone_savepoint(session: Session, rng: random.Random) -> None:
    # Not by Rollback, which psycopg ignores if the server went down meanwhile.
    with session.transaction(force_rollback=rng.random() < 0.7):
        for _ in range(rng.randint(1, 3)):
            _action(rng)(session, rng)


def _action(rng: random.Random) -> Action:
    [(action, _)] = rng.choices(_ACTIONS, weights=[weight for _, weight in _ACTIONS])
    return action


def _key(rng: random.Random) -> int:
    return rng.randint(1, _KEYS)


def _large(rng: random.Random) -> str:
    return rng.randbytes(rng.randint(1500, 4000)).hex()


def _put_account(session: Session, rng: random.Random) -> None:
    session.execute(
        """INSERT INTO accounts VALUES (%s, %s, %s, %s, %s, %s, to_timestamp(%s), %s, %s)
           ON CONFLICT (id) DO UPDATE SET balance = excluded.balance, rate = excluded.rate,
             is_open = excluded.is_open, opened = excluded.opened""",
        [
            _key(rng),
            rng.choice(("", "Ada", "Jürgen", "小明", "a\tb\\n'\"")),
            rng.choice((None, f"{rng.uniform(-1e9, 1e9):.2f}")),
            rng.choice((None, rng.uniform(-1, 1) * 10 ** rng.randint(-300, 300), 0.1, 1e15)),
            rng.uniform(-1, 1) * 10 ** rng.randint(-30, 30),
            rng.choice((None, True, False)),
            rng.uniform(0, 4e9),
            rng.choice(("ab", "abcdef", "")),
            f"{rng.getrandbits(128):032x}",
        ],
    )


def _pay(session: Session, rng: random.Random) -> None:
    amount = rng.randint(1, 500)
    for sign in (-1, 1):
        session.execute(
            "UPDATE accounts SET balance = coalesce(balance, 0) %% 1000000 + %s WHERE id = %s",
            [sign * amount, _key(rng)],
        )


def _close_account(session: Session, rng: random.Random) -> None:
    session.execute("DELETE FROM accounts WHERE id = %s", [_key(rng)])


def _put_lines(session: Session, rng: random.Random) -> None:
    order = _key(rng)
    session.execute(
        """INSERT INTO order_lines SELECT %s, n, 'sku-' || n, %s, DATE '2024-01-01' + n
           FROM generate_series(1, %s) n ON CONFLICT DO NOTHING""",
        [order, rng.randint(1, 9), rng.randint(1, 6)],
    )


def _move_lines(session: Session, rng: random.Random) -> None:
    # the composite key changes, for several rows at once, or in one column only
    session.execute(
        "UPDATE order_lines SET order_id = %s, line_no = line_no + %s WHERE order_id = %s",
        [_key(rng), rng.choice((0, 0, 10)), _key(rng)],
    )


def _drop_lines(session: Session, rng: random.Random) -> None:
    session.execute(
        "DELETE FROM order_lines WHERE order_id = %s AND line_no > %s",
        [_key(rng), rng.randint(0, 4)],
    )


def _put_document(session: Session, rng: random.Random) -> None:
    session.execute(
        """INSERT INTO documents VALUES (%s, %s, %s, 1, %s)
           ON CONFLICT (id) DO UPDATE SET body = excluded.body""",
        [_key(rng), "draft", _large(rng), rng.choice((None, rng.randbytes(3000), b""))],
    )


def _revise_around(session: Session, rng: random.Random) -> None:
    # body and scan are unchanged, so the server does not send them
    session.execute(
        "UPDATE documents SET revision = revision + 1, title = %s WHERE id BETWEEN %s AND %s",
        [rng.choice((None, "final", "")), low := _key(rng), low + 3],
    )


def _renumber_document(session: Session, rng: random.Random) -> None:
    session.execute("UPDATE documents SET id = %s WHERE id = %s", [_key(rng), _key(rng)])


def _insert_then_revise(session: Session, rng: random.Random) -> None:
    key = _key(rng)
    session.execute("DELETE FROM documents WHERE id = %s", [key])
    session.execute("INSERT INTO documents VALUES (%s, 'new', %s, 1, NULL)", [key, _large(rng)])
    session.execute("UPDATE documents SET revision = revision + 1 WHERE id = %s", [key])


def _emit_events(session: Session, rng: random.Random) -> None:
    session.execute(
        """INSERT INTO events SELECT %s, %s, TIMESTAMP '2024-02-29 23:59:59.5', 1.5
           FROM generate_series(1, %s)""",
        [rng.choice("abcd"), rng.choice((None, '{"a": [1, 2]}', '"ü"')), rng.randint(1, 3)],
    )


def _amend_events(session: Session, rng: random.Random) -> None:
    # one of several equal rows, or all of them
    limit = rng.choice((1, 2, 100))
    session.execute(
        """UPDATE events SET amount = coalesce(amount, 0) + 0.25 WHERE ctid = ANY(ARRAY(
             SELECT ctid FROM events WHERE kind = %s LIMIT %s))""",
        [rng.choice("abcd"), limit],
    )


def _drop_events(session: Session, rng: random.Random) -> None:
    session.execute(
        """DELETE FROM events WHERE ctid = ANY(ARRAY(
             SELECT ctid FROM events WHERE kind = %s LIMIT 4))""",
        [rng.choice("abcd")],
    )


def _put_umlaut(session: Session, rng: random.Random) -> None:
    session.execute(
        """INSERT INTO "Ünï Tbl" VALUES (%s, %s, %s)
           ON CONFLICT ("Schlüssel") DO UPDATE SET "größe" = excluded."größe" """,
        [_key(rng), rng.choice(("ß", "", None)), rng.choice((None, "1 day 02:03:04", "3 mons"))],
    )


def _move_umlaut(session: Session, rng: random.Random) -> None:
    session.execute(
        'UPDATE "Ünï Tbl" SET "Schlüssel" = %s WHERE "Schlüssel" = %s', [_key(rng), _key(rng)]
    )


def _visit(session: Session, rng: random.Random) -> None:
    session.execute(
        """INSERT INTO visits VALUES (%s, %s, %s)
           ON CONFLICT (id) DO UPDATE SET seen = excluded.seen""",
        [_key(rng), rng.choice(("10.0.0.1", "10.0.0.0/8", "::1", None)), "12:34:56.78"],
    )


def _truncate(session: Session, rng: random.Random) -> None:
    session.execute(rng.choice((b"TRUNCATE visits", b"TRUNCATE visits, events")))


_ACTIONS: tuple[tuple[Action, int], ...] = (
    (_put_account, 10),
    (_pay, 8),
    (_close_account, 3),
    (_put_lines, 8),
    (_move_lines, 5),
    (_drop_lines, 3),
    (_put_document, 6),
    (_revise_around, 8),
    (_renumber_document, 4),
    (_insert_then_revise, 3),
    (_emit_events, 6),
    (_amend_events, 5),
    (_drop_events, 3),
    (_put_umlaut, 5),
    (_move_umlaut, 3),
    (_visit, 6),
    (_truncate, 1),
)
