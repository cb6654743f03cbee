"""Kills at random, under a workload: the daemon, Postgres, connections, maintenance; failpoints.

In rounds: at the end of each the writers rest, the lake is compared to the source, row by row, and
the change log is looked through (`tests.harness.lives`). Whatever is wrong is raised.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

from ingestd.testing.embedded.daemon import module_environment
from tests.harness.lives import HELP, LIMIT_S, OFTEN, USUAL, Lives, durable_lsn, step_of
from tests.harness.maintaining import order_of
from tests.harness.waiting import await_until
from tests.harness.workload import Workload
from tests.soak.report import Report, Resources

if TYPE_CHECKING:
    from ingestd.model.lsn import Lsn
    from ingestd.testing.embedded.postgres import PostgresServer

ROUND_KILLS = 40
PAUSE_S = 0.03
"""Between two transactions of a writer."""
SESSIONS = 2
ENDURED = ("error", "delay:0.3")
POINTS = tuple(point for point in USUAL if step_of(point) not in HELP)


class Soak:
    """One soak; `report` grows meanwhile. `tell`: receives progress lines."""

    def __init__(
        self, lives: Lives, server: PostgresServer, seed: int, tell: Callable[[str], None]
    ) -> None:
        self.report = Report(seed)
        self._lives = lives
        self._daemon = lives.daemon
        self._server = server
        self._rng = random.Random(seed)
        self._tell = tell
        self._began_s = 0.0
        self._ready: Resources | None = None
        self._kinds: dict[str, tuple[Callable[[], None], int]] = {
            "daemon": (self._kill_daemon, 45),
            "daemon, starting": (self._kill_starting_daemon, 15),
            "daemon, at a failpoint": (self._crash_at_failpoint, 12),
            "fault at a failpoint": (self._endure_failpoint, 6),
            "connections": (self._end_connections, 25),
            "postgres": (self._kill_postgres, 5),
            "maintenance": (self._kill_maintenance, 3),
        }

    def run(self, seconds: float, *, kills: int = 0) -> Report:
        """Run for so long, and until there were so many kills; then compare once more."""
        began = time.monotonic()

        def is_over() -> bool:
            return time.monotonic() - began >= seconds and self.report.survived >= kills

        self._start()
        self._compare()
        number = 0
        while True:
            number += 1
            with self._workload(number) as workload:
                goal = self.report.survived + ROUND_KILLS
                while self.report.survived < goal and not is_over():
                    self._once()
            self.report.transactions += workload.committed
            self._compare()
            self.report.seconds = time.monotonic() - began
            if is_over():
                break
        self.report.last = self._resources()
        self._note_longest()
        code = self._daemon.sigterm()
        assert code == 0, f"it ended with {code}\n{self._daemon.tail()}"
        return self.report

    # --- kills -------------------------------------------------------------------------------

    def _once(self) -> None:
        names = list(self._kinds)
        [kind] = self._rng.choices(names, [weight for _, weight in self._kinds.values()])
        self._kinds[kind][0]()
        self._lives.assert_not_early()

    def _kill_daemon(self) -> None:
        """In the middle of its work."""
        self._await_progress()
        self._run_for(0.6)
        self._end("daemon")
        self._start()

    def _kill_starting_daemon(self) -> None:
        self._end("daemon")
        self._lives.start()
        self._run_for(2.5)
        self._end("daemon, starting")
        self._start()

    def _crash_at_failpoint(self) -> None:
        point = self._rng.choice(POINTS)
        times = self._rng.randint(1, 4) if point in OFTEN else 1
        self._end("daemon")
        self._lives.fall_behind()
        self._lives.start(f"{point}=crash@{times}")
        code = self._daemon.await_end(LIMIT_S)
        assert code == -signal.SIGKILL, f"{point}: ended with {code}\n{self._daemon.tail()}"
        assert (point, "crash") in self._lives.acted()
        self.report.failpoints[point] += 1
        self.report.kills["daemon, at a failpoint"] += 1
        self._start()

    def _endure_failpoint(self) -> None:
        point, action = self._rng.choice(POINTS), self._rng.choice(ENDURED)
        self._end("daemon")
        self._lives.fall_behind()
        self._start(f"{point}={action}")
        await_until(
            lambda: any(one == point for one, _ in self._lives.acted()), LIMIT_S, self._stuck
        )
        self.report.failpoints[point] += 1
        self._await_progress()

    def _end_connections(self) -> None:
        """One of the daemon's sessions, or all of them."""
        self._await_progress()
        self._run_for(0.3)
        limit = self._rng.choice((1, 1, 1, 100))
        found = self._lives.database.rows(
            "SELECT pg_terminate_backend(pid) FROM (SELECT pid FROM pg_stat_activity"
            " WHERE datname = %s AND application_name = 'ingestd' ORDER BY random() LIMIT %s) a",
            self._lives.database.name,
            limit,
        )
        self.report.kills["connections"] += len(found)
        self._await_progress()

    def _kill_postgres(self) -> None:
        self._await_progress()
        self._run_for(0.5)
        self._server.kill()
        self.report.kills["postgres"] += 1
        self._run_for(0.5)
        self._server.start()
        self._daemon.await_ready(LIMIT_S)
        self._await_progress()

    def _kill_maintenance(self) -> None:
        """Which joins files meanwhile; in a part of all cases it comes to its end."""
        command = [sys.executable, "-m", "ingestd.lake.maintenance.process"]
        environment = module_environment()
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        ) as process:
            assert process.stdin is not None  # it ends when this is closed
            process.stdin.write(order_of(self._lives.lake).encode())
            process.stdin.flush()
            until_s = time.monotonic() + self._rng.uniform(0.5, 6.0)
            await_until(lambda: process.poll() is not None or time.monotonic() > until_s, LIMIT_S)
            if process.poll() is None:
                process.kill()
                self.report.kills["maintenance"] += 1

    # --- the daemon --------------------------------------------------------------------------

    def _start(self, entries: str = "") -> None:
        began_s = time.monotonic()
        self._lives.start(entries)
        if entries:
            return
        self._daemon.await_ready(LIMIT_S)
        self._began_s = began_s
        self.report.recoveries_s.append(time.monotonic() - began_s)
        self._ready = self._resources()
        self.report.first = self.report.first or self._ready

    def _end(self, kind: str) -> None:
        if kind == "daemon":
            self._note_longest()
        self._daemon.sigkill()
        self._ready = None
        self.report.kills[kind] += 1

    def _note_longest(self) -> None:
        if self._ready is None:
            return
        now, longest = self._resources(), self.report.longest
        if longest is None or now.age_s > longest[1].age_s:
            self.report.longest = self._ready, now

    def _resources(self) -> Resources:
        process = psutil.Process(self._daemon.pid)
        resident_mb = process.memory_info().rss / 1e6
        return Resources(resident_mb, process.num_fds(), time.time() - process.create_time())

    def _await_progress(self) -> None:
        """Wait until the lake has more than now."""
        seen = durable_lsn(self._lives.lake)
        await_until(lambda: _is_beyond(durable_lsn(self._lives.lake), seen), LIMIT_S, self._stuck)

    def _stuck(self) -> str:
        status = self._daemon.status() or {}
        return f"the lake to grow (seed {self.report.seed})\n{status}\n{self._daemon.tail()}"

    def _run_for(self, longest_s: float) -> None:
        """Wait until a random instant."""
        end = time.monotonic() + self._rng.uniform(0.0, longest_s)
        await_until(lambda: time.monotonic() >= end, longest_s + 5, poll_s=0.01)

    # --- rounds ------------------------------------------------------------------------------

    def _workload(self, number: int) -> Workload:
        return Workload(
            self._lives.database.dsn,
            seed=hash((self.report.seed, number)),
            sessions=SESSIONS,
            transactions=10_000_000,
            limit_s=24 * 3600,
            pause_s=PAUSE_S,
        )

    def _compare(self) -> None:
        found = self._lives.compare()
        report = self.report
        report.comparisons += 1
        report.rows_checked += sum(one.rows for one in found)
        report.changes = sum(one.changes for one in found)
        report.lost += sum(one.lost for one in found)
        report.doubled += sum(one.doubled for one in found)
        report.epochs = self._lives.epochs()
        self._tell(f"{report.survived} kills, {report.changes} changes: equal")


def _is_beyond(now: Lsn | None, seen: Lsn | None) -> bool:
    return now is not None and (seen is None or now > seen)
