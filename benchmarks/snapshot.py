"""The snapshot of a table of 1M rows, against psql's COPY of it."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from statistics import median

from benchmarks.rig import COLUMNS, LIMIT_S, ROW, Meter, Rig, config, source, timed
from ingestd.demo.waiting import await_until

ROWS, RUNS = 1_000_000, 3


def measure(rig: Rig) -> dict[str, float]:
    """Give the medians of RUNS of each, in seconds.

    `daemon_s`: from the state `snapshotting` to the durable epoch; `whole_s`: from the start of
    the process.
    """
    rig.psql("DROP TABLE IF EXISTS load")
    rig.psql(f"CREATE TABLE load ({COLUMNS})")
    rig.psql(f"INSERT INTO load SELECT {ROW} FROM generate_series(1, {ROWS}) i")
    rig.psql("VACUUM ANALYZE load")
    rig.psql("CHECKPOINT")
    copy: list[str | Path] = [rig.server.program("psql"), "--no-psqlrc", rig.server.dsn()]
    copy += ["-c", "copy load to stdout"]
    timed(copy)
    runs = [{"reference_s": timed(copy), **_run(rig, number)} for number in range(RUNS)]
    found = {name: median(run[name] for run in runs) for name in runs[0]}
    return found | {"ratio": found["reference_s"] / found["daemon_s"]}


def _run(rig: Rig, number: int) -> dict[str, float]:
    name = f"snapshot_{number}"
    daemon = rig.daemon(name, config(source(name, rig.server.dsn(), "public.load")))
    began = time.perf_counter()
    daemon.start()
    meter = Meter(daemon.pid)
    await_until(lambda: daemon.events("epoch.committed"), LIMIT_S, "the snapshot", poll_s=0.02)
    whole_s = time.perf_counter() - began
    meter.stop()
    [started] = [e for e in daemon.events("source.state") if e["state"] == "snapshotting"]
    committed = daemon.events("epoch.committed")[0]
    daemon.sigterm()
    rig.psql(f"SELECT pg_drop_replication_slot('ingestd_{name}')")
    rig.psql(f"DROP PUBLICATION ingestd_{name}")
    daemon_s = (_time(committed["timestamp"]) - _time(started["timestamp"])).total_seconds()
    return {
        "daemon_s": daemon_s,
        "whole_s": whole_s,
        "cpu_s": meter.cpu_s,
        "peak_mb": meter.peak_bytes / 1e6,
    }


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
