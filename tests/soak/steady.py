"""A daemon under a steady load, sampled repeatedly; nothing is killed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import psutil
import psycopg.errors

from ingestd.testing.oracle.comparison import await_caught_up, compare_source
from tests.harness.config import wal_config
from tests.harness.waiting import await_until
from tests.harness.workload import Workload
from tests.soak.counted import VARIABLE
from tests.soak.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ingestd.testing.embedded.daemon import Daemon
    from tests.harness.databases import Database

SESSIONS = 3
PAUSE_S = 0.02
"""Between two transactions of a session: some hundred rows a second in all."""
SCRAPE_S = 15.0
LIMIT_S = 120.0
PROGRAM = (sys.executable, "-m", "tests.soak.counted")
DDL = (
    "ALTER TABLE visits ADD later text DEFAULT 'soon'",
    "CREATE TABLE passing AS SELECT n AS id, 'note ' || n AS note FROM generate_series(1, 500) n",
    "ALTER TABLE passing ADD PRIMARY KEY (id)",
    "UPDATE visits SET later = 'now'",
    "UPDATE passing SET note = 'other'",
    "ALTER TABLE visits DROP later",
    "DROP TABLE passing",
)
"""One after the other, then from the start: nothing of it makes the daemon know more for ever."""


def steady_config(database: Database, lake: Path, *, max_delay: str = "1s") -> str:
    """TOML: epochs, maintenance and looks for tables are more frequent than they are by default."""
    return wal_config(
        lake=lake,
        dsn=database.dsn,
        max_delay=max_delay,
        source_extra=f'slot = "{database.name}"\npublication = "{database.name}"\n'
        'discover_interval = "5s"',
        extra='[maintenance]\ncompact = "5m"\nretention = "10m"',
    )


class Steady:
    """The daemon's program is `PROGRAM`, its config that of `steady_config`. `tell`: takes lines.

    `ddl_s`: between two statements of `DDL`; `scrape_s`: between two looks at /metrics and /status.
    """

    def __init__(
        self,
        database: Database,
        lake: Path,
        daemon: Daemon,
        *,
        seed: int,
        tell: Callable[[str], None],
        ddl_s: float = 30.0,
        scrape_s: float = SCRAPE_S,
    ) -> None:
        self._database = database
        self._lake = lake
        self._daemon = daemon
        self._seed = seed
        self._tell = tell
        self._ddl_s = ddl_s
        self._scrape_s = scrape_s
        self._counts = daemon.folder / "counts.json"
        self._over = threading.Event()
        self.scraped = 0
        self.changed = 0
        daemon.program = PROGRAM
        daemon.environment[VARIABLE] = str(self._counts)

    def run(self, seconds: float, every_s: float) -> list[Sample]:
        """Return a sample for each `every_s`, and compare the lake at the end.

        Raises AssertionError where the lake is not the source, or the daemon did not end well.
        """
        self._daemon.start()
        self._daemon.await_ready(LIMIT_S)
        began_s = time.monotonic()
        samples = []
        with self._beside(self._scrape), self._beside(self._change), self._workload(seconds):
            for number in itertools.count():
                due_s = began_s + number * every_s
                if due_s > began_s + seconds:
                    break
                await_until(partial(_is_past, due_s), every_s + LIMIT_S)
                samples.append(self._sample(time.monotonic() - began_s))
                self._tell(str(samples[-1]))
        self._compare()
        code = self._daemon.sigterm()
        assert code == 0, f"it ended with {code}\n{self._daemon.tail()}"
        return samples

    # --- looking -----------------------------------------------------------------------------

    def _sample(self, at_s: float) -> Sample:
        counts = self._told()
        process = psutil.Process(self._daemon.pid)
        memory = process.memory_full_info()
        return Sample(
            at_s=at_s,
            rows=self._rows(),
            rss_mb=memory.rss / 1e6,
            pss_mb=memory.pss / 1e6,
            private_mb=memory.uss / 1e6,
            descriptors=process.num_fds(),
            threads=process.num_threads(),
            tasks=counts["tasks"],
            blocks=counts["blocks"],
            arrow_mb=counts["arrow_bytes"] / 1e6,
        )

    def _told(self) -> dict[str, int]:
        self._counts.unlink(missing_ok=True)
        os.kill(self._daemon.pid, signal.SIGUSR2)
        await_until(self._counts.exists, LIMIT_S, lambda: f"counts\n{self._daemon.tail()}")
        found: dict[str, int] = json.loads(self._counts.read_text(encoding="ascii"))
        return found

    def _rows(self) -> int:
        """The sum of `ingestd_rows_total`."""
        answer = await_until(lambda: self._daemon.get("/metrics"), LIMIT_S, "/metrics")
        return round(
            sum(
                float(line.rpartition(" ")[2])
                for line in answer[1].splitlines()
                if line.startswith("ingestd_rows_total{")
            )
        )

    def _compare(self) -> None:
        with self._database.connect() as connection:
            await_caught_up(connection, self._database.name, LIMIT_S)
            found = compare_source(connection, str(self._lake), "shop")
        wrong = [str(one) for one in found if not one.is_equal]
        assert not wrong, "\n".join(wrong)
        changes, rows = sum(one.changes for one in found), sum(one.rows for one in found)
        self._tell(f"{len(found)} tables equal: {rows} rows, {changes} changes in the lake")

    # --- the load ----------------------------------------------------------------------------

    def _workload(self, seconds: float) -> Workload:
        return Workload(
            self._database.dsn,
            seed=self._seed,
            sessions=SESSIONS,
            transactions=1_000_000_000,
            limit_s=seconds + 3600,
            pause_s=PAUSE_S,
        )

    def _scrape(self) -> None:
        """As Prometheus and an open status page do."""
        while not self._over.wait(self._scrape_s):
            answer = self._daemon.get("/metrics")
            if answer is not None and self._daemon.status() is not None:
                self.scraped += 1

    def _change(self) -> None:
        """To the last statement of a round in any case: then the tables are as at first."""
        while not self._over.wait(self._ddl_s):
            for statement in DDL:
                await_until(partial(self._is_done, statement), LIMIT_S, statement)
                self.changed += 1
                self._over.wait(self._ddl_s)

    def _is_done(self, statement: str) -> bool:
        try:
            self._database.execute("SET lock_timeout = '5s'", statement)
        except (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected):
            return False
        return True

    @contextmanager
    def _beside(self, work: Callable[[], None]) -> Iterator[None]:
        failed: list[BaseException] = []

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised below
                failed.append(error)

        thread = threading.Thread(target=guarded, name=work.__name__)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(LIMIT_S)
        if failed:
            raise failed[0]


def _is_past(due_s: float) -> bool:
    return time.monotonic() >= due_s
