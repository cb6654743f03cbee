"""Sessions that change a table with TOASTed values in all the ways that a snapshot could lose."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import psycopg
from psycopg import errors

if TYPE_CHECKING:
    from tests.harness.databases import Database

TABLE = """
CREATE TABLE big (a int NOT NULL, b text COLLATE "C" NOT NULL, n int, toasted text, note text,
                  PRIMARY KEY (a, b))"""
EXTERNAL = "ALTER TABLE big ALTER toasted SET STORAGE EXTERNAL"
FILL = """
INSERT INTO big SELECT i % 1000 - 500, 'k' || i, i,
       CASE WHEN i % 3 = 0 THEN repeat(md5(i::text), 100) END, repeat('x', 300)
  FROM generate_series(1, {rows}) i"""


def create_big(database: Database, rows: int) -> None:
    """Create the table `big` with `rows` rows; a third of them have a TOASTed value."""
    database.execute(TABLE, EXTERNAL, FILL.format(rows=rows), "CHECKPOINT")


class ToastWriters:
    """`sessions` threads that write until `stop`, which raises their errors; a context manager.

    They run updates that leave the TOASTed value unsent, changes of the key, deletes and inserts.
    Some transactions are rolled back, and some stay open for `held_s` seconds.
    """

    def __init__(
        self, database: Database, rows: int, *, sessions: int = 2, held_s: float = 0.7
    ) -> None:
        self._dsn = database.dsn
        self._rows = rows
        self._held_s = held_s
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(sessions, thread_name_prefix="toast-writer")
        self._sessions = sessions
        self._futures: list[Future[None]] = []
        self.transactions = 0

    def __enter__(self) -> Self:
        self._futures = [self._pool.submit(self._write, n) for n in range(self._sessions)]
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopping.set()
        for future in self._futures:
            future.result(timeout=60)
        self._pool.shutdown()

    def _write(self, number: int) -> None:
        rng = random.Random(number)
        with psycopg.connect(self._dsn) as session:
            session.execute("SET deadlock_timeout = '20ms'")
            session.execute("SET lock_timeout = '50ms'")
            session.commit()
            while not self._stopping.wait(0.001):
                try:
                    self._transact(session, rng)
                except (errors.UniqueViolation, errors.DeadlockDetected, errors.LockNotAvailable):
                    session.rollback()
                self.transactions += 1

    def _transact(self, session: psycopg.Connection[Any], rng: random.Random) -> None:
        for _ in range(rng.randint(1, 4)):
            i = rng.randint(1, self._rows)
            key = {"a": i % 1000 - 500, "b": f"k{i}", "n": rng.randint(1, 10**6)}
            session.execute(rng.choice(_STATEMENTS), key)
        if rng.random() < 0.02:
            self._stopping.wait(self._held_s)
        if rng.random() < 0.1:
            session.rollback()
        else:
            session.commit()


_STATEMENTS = (
    "UPDATE big SET n = %(n)s WHERE a = %(a)s AND b = %(b)s",
    "UPDATE big SET n = %(n)s WHERE a = %(a)s AND b = %(b)s",
    "UPDATE big SET a = a + 7, n = %(n)s WHERE a = %(a)s AND b = %(b)s",
    "UPDATE big SET b = b || 'x' WHERE a = %(a)s AND b = %(b)s",
    "UPDATE big SET a = a - 7 WHERE a = %(a)s + 7 AND b = %(b)s",
    "DELETE FROM big WHERE a = %(a)s AND b = %(b)s",
    (
        "INSERT INTO big VALUES (%(a)s, %(b)s, %(n)s, repeat('new', 1000), 'new') "
        "ON CONFLICT DO NOTHING"
    ),
    "UPDATE big SET toasted = repeat('u', 3000) WHERE a = %(a)s AND b = %(b)s",
)
