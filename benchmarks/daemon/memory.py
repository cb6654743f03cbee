"""The peak memory of a daemon: under steady load, with huge transactions, with many tables.

`python -m benchmarks.daemon.memory [MILLIONS [NAME...]]` runs some of them, with that many million
rows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psycopg

from benchmarks.harness.figure import Figure, memory_figure
from benchmarks.harness.rig import COLUMNS, ROW, Rig, config, rig, source
from benchmarks.harness.writers import Writers
from ingestd.model.lsn import Lsn
from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.embedded.waiting import await_until

STEADY_MB, GIANT_MB, TABLES_MB = 350, 512, 600
MILLION = 1_000_000
MILLIONS = 20
LIMIT_S = 3600.0
INTERLEAVED, CHANGING = 200, 500
RUN = 20
"""Consecutive rows of one table, in a transaction over many."""
STEADY_S = 30.0
_PREFIX = "mem_"


def measure(rig: Rig, millions: int = MILLIONS, chosen: tuple[str, ...] = ()) -> list[Figure]:
    """Run the chosen steps, or all; `millions`: million rows in the giant transactions."""
    return [figure for name in chosen or STEPS for figure in STEPS[name](rig, millions)]


def _steady(rig: Rig, _: int) -> list[Figure]:
    """Run 1,000 small transactions a second, plus one of 100,000 rows about every second."""
    with _Source(rig, "steady") as found:
        found.create(1)
        found.daemon.start_ready(LIMIT_S)
        counter = iter(range(MILLION, 1 << 40))

        def write(connection: psycopg.Connection[Any], _: object) -> None:
            low = next(counter)
            connection.execute(found.insertion(0, low, low))

        with Writers(rig, write, 1000):
            low = 100 * MILLION
            until = time.monotonic() + STEADY_S
            while time.monotonic() < until:
                found.insert(0, low, low + 99_999)
                low += 100_000
        found.await_all()
        return [memory_figure("peak memory, steady load", found.peak_mb, STEADY_MB)]


def _giant(rig: Rig, millions: int, *, catch_up: bool, tables: int = 1) -> list[Figure]:
    """Run one transaction, read from the stream as it arrives or as a backlog."""
    with _Source(rig, "giant") as found:
        found.create(tables)
        found.daemon.start_ready(LIMIT_S)
        if catch_up:
            found.daemon.sigterm()
        found.insert_at_once(millions * MILLION)
        if catch_up:
            found.daemon.start()
        found.await_all()
        way = "as a backlog" if catch_up else "from the stream"
        over = f" over {tables} tables" if tables > 1 else ""
        what = f"peak memory, one transaction of {millions}M rows{over}, {way}"
        return [memory_figure(what, found.peak_mb, GIANT_MB)]


def _changing(rig: Rig, _: int) -> list[Figure]:
    """Change each of 500 tables by 2 transactions a second for half a minute."""
    with _Source(rig, "changing") as found:
        found.create(CHANGING)
        found.daemon.start_ready(LIMIT_S)
        counter = iter(range(1 << 40))

        def write(connection: psycopg.Connection[Any], _: object) -> None:
            number = next(counter)
            low = 5 * number
            connection.execute(found.insertion(number % CHANGING, low, low + 4))

        with Writers(rig, write, 2 * CHANGING) as writers:
            began = time.monotonic()
            await_until(lambda: time.monotonic() - began > STEADY_S, LIMIT_S, poll_s=0.2)
        assert writers.sent
        found.await_all()
        return [memory_figure(f"peak memory, {CHANGING} tables changing", found.peak_mb, TABLES_MB)]


def _backlogs(rig: Rig, _: int) -> list[Figure]:
    """Drain a backlog of 1.5M changes and one ten times as large, each after a daemon's absence."""
    peaks = []
    for tenth in (1, 10):
        with _Source(rig, "backlog") as found:
            found.create(1)
            found.daemon.start_ready(LIMIT_S)
            found.daemon.sigterm()
            rows = tenth * MILLION
            for low in range(0, rows, 10_000):
                found.insert(0, low, low + 9_999)
            rig.psql(f"UPDATE {found.table(0)} SET score = score + 1 WHERE id < {rows // 2}")
            found.daemon.start()
            found.await_all()
            peaks.append(found.peak_mb)
    ratio = peaks[1] / peaks[0]
    return [
        memory_figure("peak memory, backlog of 1.5M changes", peaks[0], STEADY_MB),
        memory_figure("peak memory, backlog of 15M changes", peaks[1], STEADY_MB),
        Figure(
            "peak memory, backlog of 15M changes against 1.5M", f"{ratio:.2f}", "1.1", ratio <= 1.1
        ),
    ]


STEPS: dict[str, Callable[[Rig, int], list[Figure]]] = {
    "steady": _steady,
    "stream": lambda rig, millions: _giant(rig, millions, catch_up=False),
    "catch_up": lambda rig, millions: _giant(rig, millions, catch_up=True),
    "tables_stream": lambda r, m: _giant(r, m, catch_up=False, tables=INTERLEAVED),
    "tables_catch_up": lambda r, m: _giant(r, m, catch_up=True, tables=INTERLEAVED),
    "changing": _changing,
    "backlogs": _backlogs,
}


class _Source:
    """A separate schema with tables of the usual columns, and a daemon for it."""

    def __init__(self, rig: Rig, name: str) -> None:
        self._rig = rig
        self._name = f"{_PREFIX}{name}"
        text = source(self._name, rig.server.dsn(socket=False), f"{self._name}.*")
        self.daemon: Daemon = rig.daemon(self._name, config(text, max_delay="1s"))
        self._tables = 0

    def __enter__(self) -> Self:
        self._rig.psql(f"CREATE SCHEMA {self._name}")
        return self

    def __exit__(self, *_: object) -> None:
        if self.daemon.is_running:
            self.daemon.sigterm()
        self._rig.forget(self._name)
        self._rig.psql(f"SET client_min_messages = error; DROP SCHEMA {self._name} CASCADE")
        _remove(self.daemon.folder)

    def table(self, number: int) -> str:
        return f"{self._name}.t{number}"

    def create(self, tables: int) -> None:
        self._tables = tables
        with self._rig.server.connect() as connection:
            for number in range(tables):
                connection.execute(f"CREATE TABLE {self.table(number)} ({COLUMNS})")

    def insertion(self, table: int, low: int, high: int) -> bytes:
        text = f"INSERT INTO {self.table(table)} SELECT {ROW} FROM generate_series({low}, {high}) i"
        return text.encode()

    def insert(self, table: int, low: int, high: int) -> None:
        self._rig.psql(self.insertion(table, low, high).decode())

    def insert_at_once(self, rows: int) -> None:
        """Insert in one transaction; with several tables, a few rows of each in turn."""
        if self._tables == 1:
            self.insert(0, 1, rows)
            return
        few = f"SELECT {ROW} FROM generate_series(low, low + {RUN - 1}) i"
        inserts = "\n".join(f"INSERT INTO {self.table(n)} {few};" for n in range(self._tables))
        self._rig.psql(
            f"DO $$ BEGIN FOR low IN 0 .. {rows // self._tables - 1} BY {RUN} LOOP\n{inserts}\n"
            "END LOOP; END $$"
        )

    def await_all(self) -> None:
        """Wait until everything written is durable and confirmed."""
        slot, target = f"ingestd_{self._name}", self._rig.lsn()
        self._rig.psql("SELECT pg_logical_emit_message(true, 'end', '')")
        await_until(lambda: self._has_reached(slot, target), LIMIT_S, f"slot {slot}", poll_s=0.2)

    def _has_reached(self, slot: str, target: Lsn) -> bool:
        if not self.daemon.is_running:
            raise RuntimeError(self.daemon.tail())
        return (self._rig.confirmed(slot) or 0) >= target

    @property
    def peak_mb(self) -> float:
        """The daemon's peak since it started, as reported by the system."""
        text = Path(f"/proc/{self.daemon.pid}/status").read_text(encoding="utf-8")
        [line] = [line for line in text.splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024 / 1e6


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def main(arguments: list[str]) -> None:
    """Print the figures."""
    millions = int(arguments[0]) if arguments else MILLIONS
    with rig() as server:
        for name in arguments[1:] or STEPS:
            for figure in measure(server, millions, (name,)):
                print(f"{figure.what}: {figure.measured} ({figure.reach})", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
