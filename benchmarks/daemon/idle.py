"""CPU usage of a daemon with one or ten idle sources."""

from __future__ import annotations

import time

import psutil

from benchmarks.harness.rig import Rig, config, source

SOURCES, SECONDS = (1, 10), 30


def measure(rig: Rig, sources: int) -> dict[str, float]:
    """Return the share of one core, after the daemon has settled."""
    parts = []
    for number in range(sources):
        name = f"idle_{sources}_{number}"
        rig.psql(f"CREATE DATABASE {name}")
        with rig.server.connect(name) as connection:
            connection.execute("CREATE TABLE quiet (id int PRIMARY KEY)")
        parts.append(source(name, rig.server.dsn(name), "public.quiet"))
    daemon = rig.daemon(f"idle_{sources}", config(*parts))
    daemon.start_ready(limit_s=120)
    process = psutil.Process(daemon.pid)
    time.sleep(15)
    before = process.cpu_times()
    time.sleep(SECONDS)
    after = process.cpu_times()
    peak_mb = process.memory_info().rss / 1e6
    daemon.sigterm()
    used = after.user + after.system - before.user - before.system
    return {"core_share": used / SECONDS, "peak_mb": peak_mb}
