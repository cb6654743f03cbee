"""A writer of transactions that a server sends while they are in progress.

They have many rows each, in nested savepoints that are rolled back or released, in PL/pgSQL blocks
that catch their own exceptions, with DDL that is undone. Some transactions are rolled back.
"""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import psycopg

from ingestd.postgres.wal.drain.drain import DrainPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness.databases import Database

    Session = psycopg.Connection[tuple[Any, ...]]

_SCHEMA = (
    "CREATE TABLE ledger_{n} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, note text)",
    "CREATE TABLE journal_{n} (LIKE ledger_{n} INCLUDING ALL, amount numeric)",
)
_CATCHING = """
DO $$ BEGIN
  FOR round IN 1..{rounds} LOOP
    BEGIN
      INSERT INTO journal_{n} (note, amount) SELECT repeat(md5(random()::text), 4), g
        FROM generate_series(1, {rows}) g;
      IF round % 3 = 0 THEN RAISE EXCEPTION 'undone'; END IF;
    EXCEPTION WHEN raise_exception THEN NULL;
    END;
  END LOOP;
END $$"""


def send_while_open(database: Database) -> None:
    """Make this database's walsenders stream transactions above 64 kB, the lowest setting."""
    database.execute(f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'")


def segmenting(database: Database, above_bytes: int = 0, **fields: int) -> DrainPolicy:
    """Return a policy under which drains stream transactions above 64 kB."""
    send_while_open(database)
    most = fields.pop("most_segmented", 1000)
    return DrainPolicy(
        above_bytes,
        open_bytes=0,
        decoding_memory="64kB",
        most_segmented=most,
        **fields,  # type: ignore[arg-type]
    )


def sent_while_open(database: Database, slot: str) -> int:
    """Return how many transactions a slot has streamed; known with a delay, or at its end."""
    query = "SELECT stream_txns FROM pg_stat_replication_slots WHERE slot_name = %s"
    found = database.rows(query, slot)
    return int(found[0][0]) if found else 0


def meanings(messages: list[bytes]) -> Iterator[tuple[bytes, list[bytes]]]:
    """Yield each message except definitions, with the definitions of the relations it names.

    Empty transactions are left out: they are sent only while they are in progress.
    """
    known: dict[bytes, bytes] = {}
    for message in without_empty(messages):
        kind = message[:1]
        if kind == b"R":
            known[message[1:5]] = message
        elif kind in b"IUD":
            yield message, [known[message[1:5]]]
        elif kind not in b"YA":
            yield message, []


def without_empty(messages: list[bytes]) -> list[bytes]:
    found: list[bytes] = []
    for message in messages:
        if message[:1] == b"C" and found[-1][:1] == b"B":
            found.pop()
        else:
            found.append(message)
    return found


class OpenWriters:
    """`sessions` threads, each with its own tables, as a context manager."""

    def __init__(
        self,
        database: Database,
        *,
        seed: int,
        sessions: int = 2,
        steps: int = 12,
        transactions: int = 1 << 30,
        keeps_ddl: bool = False,
    ) -> None:
        self._database = database
        self._seed = seed
        self._sessions = sessions
        self._steps = steps
        self._transactions = transactions
        self._altered: set[int] = set()
        self._actions = {**_ACTIONS, _widen: 1} if keeps_ddl else _ACTIONS
        self._stopping = threading.Event()
        self._pool = ThreadPoolExecutor(sessions, thread_name_prefix="open")
        self._futures: list[Future[None]] = []
        self.committed = self.rolled_back = self.undone = 0
        for n in range(sessions):
            database.execute(*(statement.format(n=n) for statement in _SCHEMA))

    def __enter__(self) -> Self:
        self._futures = [self._pool.submit(self._write, n) for n in range(self._sessions)]
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End after the current transactions; raise a session's error."""
        self._stopping.set()
        self.join()

    def join(self) -> None:
        """Wait for the last transaction; raise a session's error."""
        for future in self._futures:
            future.result()
        self._pool.shutdown()

    def _write(self, n: int) -> None:
        rng = random.Random(f"{self._seed}/{n}")
        with psycopg.connect(self._database.dsn) as session:
            for _ in range(self._transactions):
                if self._stopping.is_set():
                    return
                self._altered.discard(n)
                for _ in range(rng.randint(1, self._steps)):
                    self._step(session, rng, n, depth=0)
                if rng.random() < 0.15:
                    session.rollback()
                    self.rolled_back += 1
                else:
                    session.commit()
                    self.committed += 1
                self._stopping.wait(0.1)

    def _step(self, session: Session, rng: random.Random, n: int, depth: int) -> None:
        if depth < 3 and rng.random() < 0.5:
            is_undone = rng.random() < 0.4
            self.undone += is_undone
            with session.transaction(force_rollback=is_undone):
                for _ in range(rng.randint(1, 3)):
                    self._step(session, rng, n, depth + 1)
            return
        [action] = rng.choices(list(self._actions), list(self._actions.values()))
        if action in {_alter, _widen}:
            # Servers up to 18 fail on some transactions that alter a table after an undone ALTER:
            # they can't find the table while the second ALTER is not decoded yet.
            if n in self._altered:
                return
            self._altered.add(n)
        action(session, rng, n)


def _insert(session: Session, rng: random.Random, n: int) -> None:
    width, rows = rng.randint(1, 9), rng.randint(1, 200)
    _run(
        session,
        f"INSERT INTO ledger_{n} (note)"
        f" SELECT repeat(md5(g::text), {width}) FROM generate_series(1, {rows}) g",
    )


def _amend(session: Session, rng: random.Random, n: int) -> None:
    _run(
        session,
        f"UPDATE ledger_{n} SET note = left(note, 40) || 'x' WHERE id % 20 = {rng.randrange(20)}"
        f" AND id > (SELECT max(id) - 1000 FROM ledger_{n})",
    )


def _delete(session: Session, rng: random.Random, n: int) -> None:
    _run(session, f"DELETE FROM journal_{n} WHERE id % 70 = {rng.randrange(70)}")


def _catch(session: Session, rng: random.Random, n: int) -> None:
    _run(session, _CATCHING.format(n=n, rounds=rng.randint(1, 9), rows=rng.randint(1, 60)))


def _alter(session: Session, rng: random.Random, n: int) -> None:
    """Run DDL that is always undone, with its rows."""
    with session.transaction(force_rollback=True):
        _run(session, f"ALTER TABLE ledger_{n} ADD COLUMN extra text")
        _run(
            session,
            f"INSERT INTO ledger_{n} (note, extra)"
            f" SELECT repeat('n', 90), 'e' FROM generate_series(1, {rng.randint(1, 400)})",
        )


def _widen(session: Session, rng: random.Random, n: int) -> None:
    """Run DDL that is undone only with the surrounding transaction."""
    name = f"more_{rng.randrange(3)}"
    change = rng.choice((f"ADD COLUMN IF NOT EXISTS {name} int", f"DROP COLUMN IF EXISTS {name}"))
    _run(session, f"ALTER TABLE ledger_{n} {change}")
    _run(session, f"INSERT INTO ledger_{n} (note) VALUES ('after')")


def _run(session: Session, statement: str) -> None:
    session.execute(statement.encode())


_ACTIONS = {_insert: 8, _amend: 4, _delete: 2, _catch: 2, _alter: 1}
