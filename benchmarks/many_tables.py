"""The first load of many small tables."""

from __future__ import annotations

import time

from benchmarks.rig import LIMIT_S, Meter, Rig, config, source
from ingestd.demo.lake_view import view_lake
from ingestd.demo.waiting import await_until

TABLES, ROWS = 300, 100
RAW_ROWS = ROWS + 1
"""With the `t` of the snapshot."""
DATABASE = "many"


def measure(rig: Rig) -> dict[str, float]:
    """Give the seconds from the start of the process until all tables' rows are in an epoch."""
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
        connection.execute("SELECT pg_drop_replication_slot('ingestd_many')")
    rig.psql(f"DROP DATABASE {DATABASE}")
    return {
        "whole_s": whole_s,
        "epochs": epochs,
        "cpu_s": meter.cpu_s,
        "peak_mb": meter.peak_bytes / 1e6,
    }


def _rows(epochs: list[dict[str, object]]) -> bool:
    return sum(int(str(epoch["rows"])) for epoch in epochs) >= TABLES * RAW_ROWS
