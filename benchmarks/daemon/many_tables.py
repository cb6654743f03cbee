"""Many small tables: their first load, and the commits of epochs while all of them change."""

from __future__ import annotations

import random
import statistics
import time
from itertools import cycle, islice
from typing import Any

import psycopg

from benchmarks.harness.rig import LIMIT_S, Meter, Rig, config, source
from benchmarks.harness.writers import Writers
from ingestd.demo.lake_view import view_lake
from ingestd.testing.embedded.waiting import await_until

TABLES, ROWS = 300, 100
RAW_ROWS = ROWS + 1
"""Including the `t` of the snapshot."""
DATABASE = "many"


def measure(rig: Rig) -> dict[str, float]:
    """Return the seconds from the start of the process until all tables' rows are in an epoch."""
    rig.psql(f"CREATE DATABASE {DATABASE}")
    with rig.server.connect(DATABASE) as connection:
        for number in range(TABLES):
            connection.execute(
                f"CREATE TABLE t{number} (id int PRIMARY KEY, name text, price numeric(12,2),"
                " at timestamptz DEFAULT now(), is_open bool)"
            )
            connection.execute(
                f"INSERT INTO t{number} SELECT i, 'row ' || i, i / 7.0, now(), i % 2 = 0"
                f" FROM generate_series(1, {ROWS}) i"
            )
    daemon = rig.daemon("many", config(source("many", rig.server.dsn(DATABASE), "public.*")))
    began = time.perf_counter()
    daemon.start()
    meter = Meter(daemon.pid)
    await_until(lambda: _rows(daemon.events("epoch.committed")), LIMIT_S, "the tables", poll_s=0.05)
    whole_s = time.perf_counter() - began
    meter.stop()
    epochs = len(daemon.events("epoch.committed"))
    daemon.sigterm()
    held = view_lake(str(daemon.folder / "lake"), "many").rows
    if len(held) != TABLES or set(held.values()) != {RAW_ROWS}:
        msg = f"{len(held)} tables in the lake, of {sorted(set(held.values()))} rows"
        raise RuntimeError(msg)
    with rig.server.connect(DATABASE) as connection:
        connection.execute("SELECT pg_catalog.pg_drop_replication_slot('ingestd_many')")
    rig.psql(f"DROP DATABASE {DATABASE}")
    return {
        "whole_s": whole_s,
        "epochs": epochs,
        "cpu_s": meter.cpu_s,
        "peak_mb": meter.peak_bytes / 1e6,
    }


SECONDS = 30.0
PER_SECOND = 4
"""Transactions, each with a row for every table."""


TYPES = {
    "text": "'a note'",
    "int": "17",
    "numeric(12,2)": "12.34",
    "timestamptz": "now()",
    "boolean": "true",
    "float8": "1.5",
    "date": "current_date",
    "uuid": "gen_random_uuid()",
}
"""Types of the columns besides the key, in turn, with their defaults."""


def changing(rig: Rig, tables: int, columns: int = 2) -> dict[str, float]:
    """Change every table in every transaction; return the times of the epochs' commits.

    An epoch grows while the previous one commits: `transactions` is the largest number in one.
    """
    name = f"changing_{tables}"
    types = islice(cycle(TYPES.items()), columns - 1)
    rest = ", ".join(f"c{n} {t} DEFAULT {v}" for n, (t, v) in enumerate(types))
    rig.psql(f"CREATE DATABASE {name}")
    with rig.server.connect(name) as connection:
        for number in range(tables):
            connection.execute(f"CREATE TABLE t{number} (id bigserial PRIMARY KEY, {rest})")
    statement = "; ".join(f"INSERT INTO t{n} DEFAULT VALUES" for n in range(tables))

    def write(connection: psycopg.Connection[tuple[Any, ...]], _: random.Random) -> None:
        connection.execute(statement)

    text = source(name, rig.server.dsn(name), "public.*")
    daemon = rig.daemon(name, config(text, max_delay="200ms"))
    daemon.start()
    daemon.await_ready(LIMIT_S)
    meter = Meter(daemon.pid)
    first = len(daemon.events("epoch.committed"))
    before_s = meter.process_cpu_s()
    with Writers(rig, write, PER_SECOND, database=name):
        time.sleep(SECONDS)
    with rig.server.connect(name) as connection:
        [written] = connection.execute("SELECT max(id) FROM t0").fetchone() or (0,)
    await_until(
        lambda: (
            sum(int(e["rows"]) for e in daemon.events("epoch.committed")[first:])
            >= written * tables
        ),
        LIMIT_S,
        "the changes",
    )
    cpu_s = meter.process_cpu_s() - before_s
    meter.stop()
    daemon.sigterm()
    epochs = daemon.events("epoch.committed")[first:]
    with rig.server.connect(name) as connection:
        connection.execute(f"SELECT pg_catalog.pg_drop_replication_slot('ingestd_{name}')")
    rig.psql(f"DROP DATABASE {name}")
    return {
        "tables": tables,
        "epochs": len(epochs),
        "commit_s": statistics.median(float(e["seconds"]) for e in epochs[1:] or epochs),
        "transactions": max(int(e["transactions"]) for e in epochs),
        "cpu_ms": cpu_s * 1000 / (len(epochs) * tables),
        "peak_mb": meter.peak_bytes / 1e6,
    }


def _rows(epochs: list[dict[str, object]]) -> bool:
    return sum(int(str(epoch["rows"])) for epoch in epochs) >= TABLES * RAW_ROWS
