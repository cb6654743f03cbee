"""Recovery from SIGKILL: the seconds from the start of the process until /readyz returns 200."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import psutil
import psycopg

from benchmarks.harness.rig import LIMIT_S, Rig, config, source
from benchmarks.harness.writers import Writers
from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.embedded.waiting import await_until

TABLES, KILLS, PER_SECOND = 100, 10, 20
EPOCHS_BEFORE, EPOCHS_BETWEEN = 50, 3
"""To open a table, all commits since its last checkpoint are read: up to a hundred."""
NAME = "recovery"


def measure(rig: Rig) -> dict[str, float]:
    """Kill a daemon KILLS times while all of its TABLES tables are written to."""
    rig.psql(f"CREATE DATABASE {NAME}")
    with rig.server.connect(NAME) as connection:
        for number in range(TABLES):
            connection.execute(f"CREATE TABLE t{number} (id bigserial PRIMARY KEY, note text)")
            connection.execute(
                f"INSERT INTO t{number} (note) SELECT 'a note' FROM generate_series(1, 10)"
            )

    def write(connection: psycopg.Connection[tuple[Any, ...]], rng: random.Random) -> None:
        for number in rng.sample(range(TABLES), 10):
            connection.execute(f"INSERT INTO t{number} (note) VALUES ('a note')")

    daemon = rig.daemon(
        NAME, config(source(NAME, rig.server.dsn(NAME), "public.*"), max_delay="200ms")
    )
    daemon.start_ready(LIMIT_S)
    seconds, cpu_seconds = [], []
    with Writers(rig, write, PER_SECOND, database=NAME):
        _await_epochs(daemon, EPOCHS_BEFORE)
        for _ in range(KILLS):
            _await_epochs(daemon, EPOCHS_BETWEEN)
            daemon.sigkill()
            began = time.perf_counter()
            daemon.start_ready(LIMIT_S)
            seconds.append(time.perf_counter() - began)
            times = psutil.Process(daemon.pid).cpu_times()
            cpu_seconds.append(times.user + times.system)
    daemon.sigterm()
    with rig.server.connect(NAME) as connection:
        connection.execute(f"SELECT pg_catalog.pg_drop_replication_slot('ingestd_{NAME}')")
    rig.psql(f"DROP DATABASE {NAME}")
    return {
        "median_s": statistics.median(seconds),
        "most_s": max(seconds),
        "cpu_s": statistics.median(cpu_seconds),
    }


def _await_epochs(daemon: Daemon, more: int) -> None:
    goal = len(daemon.events("epoch.committed")) + more
    await_until(lambda: len(daemon.events("epoch.committed")) >= goal, LIMIT_S, "epochs")
