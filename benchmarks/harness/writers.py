"""Writers of small transactions at a steady rate during a measurement."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import psycopg

from benchmarks.harness.rig import Rig

Write = Callable[[psycopg.Connection[tuple[Any, ...]], random.Random], None]


class Writers:
    """Sessions that each run `write` as a transaction, `per_second` in total, until the exit.

    `sent`: transactions so far. On exit, raises the error of a failed session.
    """

    def __init__(
        self,
        rig: Rig,
        write: Write,
        per_second: float,
        *,
        sessions: int = 1,
        database: str = "postgres",
    ) -> None:
        self._rig = rig
        self._database = database
        self._write = write
        self._rate = per_second / sessions
        self._stopping = threading.Event()
        self._counts = [0] * sessions
        self._errors: list[psycopg.Error] = []
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(sessions)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        if kind is None and self._errors:
            raise self._errors[0]

    @property
    def sent(self) -> int:
        """The number of transactions of all sessions."""
        return sum(self._counts)

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        try:
            with self._rig.server.connect(self._database, autocommit=True) as connection:
                # Commits that wait for the disk would distort every measurement.
                connection.execute("SET synchronous_commit = off")
                began = time.monotonic()
                while not self._stopping.wait(0.5 / self._rate):
                    due = int((time.monotonic() - began) * self._rate)
                    while self._counts[number] < due and not self._stopping.is_set():
                        with connection.transaction():
                            self._write(connection, rng)
                        self._counts[number] += 1
        except psycopg.Error as error:
            self._errors.append(error)
