"""Transfers between accounts of two tables: no transaction changes the total of both."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import psycopg
from psycopg import errors, sql

from ingestd.model.schema import TableId
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from collections.abc import Callable

    Session = psycopg.Connection[tuple[Any, ...]]

TABLES = (TableId("public", "savings"), TableId("public", "current"))
ACCOUNTS, BALANCE = 40, 1000
TOTAL = len(TABLES) * ACCOUNTS * BALANCE


class Bank:
    """`sessions` threads that transfer until the exit; `open` creates the tables.

    Besides plain transfers, they close an account and move its balance, open one with the balance
    of another, move one to the other table, or change its number. The exit re-raises the error of a
    session.
    """

    def __init__(self, dsn: str, *, seed: int, sessions: int = 2) -> None:
        self.transfers = 0
        self._dsn = dsn
        self._seed = seed
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(sessions, thread_name_prefix="bank")
        self._futures: list[Future[None]] = []
        self._sessions = sessions

    def open(self) -> None:
        """Create the accounts."""
        with psycopg.connect(self._dsn) as session:
            for table in TABLES:
                name = sql.Identifier(table.schema, table.name)
                session.execute(
                    sql.SQL("CREATE TABLE {} (id int PRIMARY KEY, balance bigint NOT NULL)").format(
                        name
                    )
                )
                session.execute(
                    sql.SQL("INSERT INTO {} SELECT n, %s FROM generate_series(1, %s) n").format(
                        name
                    ),
                    [BALANCE, ACCOUNTS],
                )

    def __enter__(self) -> Self:
        self._futures = [self._pool.submit(self._run, n) for n in range(self._sessions)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for future in self._futures:
            future.result(timeout=60)
        self._pool.shutdown()

    def await_transfers(self, count: int, limit_s: float = 60.0) -> None:
        """Wait for this many more transfers."""
        goal = self.transfers + count

        def reached() -> bool:
            for future in self._futures:
                if future.done():
                    future.result()
            return self.transfers >= goal

        await_until(reached, limit_s, lambda: f"{goal} transfers, {self.transfers} are done")

    def _run(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        with psycopg.connect(self._dsn) as session:
            while not self._stopping.wait(0.02):
                try:
                    for _ in range(rng.choice((1, 1, 3))):
                        rng.choice(_ACTIONS)(session, rng)
                    session.commit()
                except (errors.DeadlockDetected, errors.UniqueViolation):
                    session.rollback()
                    continue
                with self._lock:
                    self.transfers += 1


def _transfer(session: Session, rng: random.Random) -> None:
    """Transfer from a random account to another, in any of the tables."""
    amount = rng.randint(1, 50)
    take = sql.SQL("UPDATE {} SET balance = balance - %s WHERE id = %s").format(_table(rng))
    if session.execute(take, [amount, rng.randint(1, ACCOUNTS)]).rowcount:
        _put(session, rng, amount)


def _close(session: Session, rng: random.Random) -> None:
    take = sql.SQL("DELETE FROM {} WHERE id = %s RETURNING balance").format(_table(rng))
    taken = session.execute(take, [rng.randint(1, ACCOUNTS)]).fetchone()
    if taken is not None:
        _put(session, rng, taken[0])


def _put(session: Session, rng: random.Random, amount: int) -> None:
    put = sql.SQL(
        "INSERT INTO {} AS t VALUES (%s, %s)"
        " ON CONFLICT (id) DO UPDATE SET balance = t.balance + excluded.balance"
    )
    session.execute(put.format(_table(rng)), [rng.randint(1, ACCOUNTS), amount])


def _renumber(session: Session, rng: random.Random) -> None:
    change = sql.SQL("UPDATE {} SET id = %s WHERE id = %s").format(_table(rng))
    session.execute(change, [rng.randint(1, 2 * ACCOUNTS), rng.randint(1, 2 * ACCOUNTS)])


def _table(rng: random.Random) -> sql.Identifier:
    table = rng.choice(TABLES)
    return sql.Identifier(table.schema, table.name)


_ACTIONS: tuple[Callable[[Session, random.Random], None], ...] = (
    _transfer,
    _transfer,
    _transfer,
    _close,
    _renumber,
)
