"""The snapshot of a table of 1M rows against psql's COPY, and one of ten times the size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median

from benchmarks.harness.rig import COLUMNS, LIMIT_S, ROW, Rig, config, source, timed
from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.embedded.waiting import await_until

ROWS, RUNS = 1_000_000, 3
LARGER = 10
WORKERS = (1, 2)


def measure(
    rig: Rig, times: int = RUNS, by: Sequence[int] = WORKERS
) -> dict[int, dict[str, float]]:
    """Return the medians of several runs by the number of workers, in seconds, run alternately.

    `daemon_s`: from the state `snapshotting` to the durable epoch with the last row; `whole_s`:
    from the start of the process.
    """
    fill(rig, ROWS)
    copy: list[str | Path] = [rig.server.program("psql"), "--no-psqlrc", rig.server.dsn()]
    copy += ["-c", "copy load to stdout"]
    timed(copy)
    runs: dict[int, list[dict[str, float]]] = {workers: [] for workers in by}
    for number in range(times):
        for workers in by:
            reference_s = timed(copy)
            found = run(rig, f"snapshot_{workers}_{number}", workers)
            runs[workers].append({"reference_s": reference_s, **found})
    medians = {
        workers: {name: median(one[name] for one in each) for name in each[0]}
        for workers, each in runs.items()
    }
    return {w: f | {"ratio": f["reference_s"] / f["daemon_s"]} for w, f in medians.items()}


def measure_larger(rig: Rig) -> dict[str, float]:
    """Read LARGER times as many rows once, with the defaults: incrementally."""
    fill(rig, LARGER * ROWS)
    found = run(rig, "larger", max(WORKERS))
    rig.psql("DROP TABLE load")
    return found


def fill(rig: Rig, rows: int) -> None:
    """Create the table `load` with this many rows."""
    rig.psql("DROP TABLE IF EXISTS load")
    rig.psql(f"CREATE TABLE load ({COLUMNS})")
    rig.psql(f"INSERT INTO load SELECT {ROW} FROM generate_series(1, {rows}) i")
    rig.psql("VACUUM ANALYZE load")
    rig.psql("CHECKPOINT")


def run(rig: Rig, name: str, workers: int, kind: str = "wal") -> dict[str, float]:
    """Read the table `load` once."""
    text = source(name, rig.server.dsn(), "public.load", kind, snapshot_workers=str(workers))
    daemon = rig.daemon(name, config(text))
    began = time.perf_counter()
    daemon.start()
    meter = rig.meter(daemon)
    await_until(lambda: _is_live(daemon), LIMIT_S, daemon.tail, poll_s=0.02)
    whole_s = time.perf_counter() - began
    meter.stop()
    [started] = [e for e in daemon.events("source.state") if e["state"] == "snapshotting"]
    committed = daemon.events("epoch.committed")[-1]
    daemon.sigterm()
    if kind == "wal":
        rig.forget(name)
    daemon_s = (_time(committed["timestamp"]) - _time(started["timestamp"])).total_seconds()
    return {
        "daemon_s": daemon_s,
        "whole_s": whole_s,
        "cpu_s": meter.cpu_s,
        "peak_mb": meter.peak_bytes / 1e6,
        "growth": meter.growth,
    }


def _is_live(daemon: Daemon) -> bool:
    return any(event["state"] == "live" for event in daemon.events("table.state"))


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
