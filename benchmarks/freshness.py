"""Freshness under small transactions: from the commit at the source to durable in the lake."""

from __future__ import annotations

import time

from benchmarks.rig import Meter, Rig, config, source

RATE, SECONDS = 200, 30


def measure(rig: Rig) -> dict[str, float]:
    """Write RATE transactions a second for SECONDS; give quantiles in seconds."""
    rig.psql("DROP TABLE IF EXISTS ticks")
    rig.psql("CREATE TABLE ticks (id bigserial PRIMARY KEY, at timestamptz, note text)")
    dsn = rig.server.dsn()
    daemon = rig.daemon("fresh", config(source("fresh", dsn, "public.ticks"), max_delay="1s"))
    daemon.start_ready()
    meter = Meter(daemon.pid)
    before = meter.cpu_s
    sent = _write(rig)
    rig.await_confirmed("ingestd_fresh", rig.lsn())
    status = daemon.status()
    meter.stop()
    daemon.sigterm()
    rig.psql("SELECT pg_drop_replication_slot('ingestd_fresh')")
    rig.psql("DROP PUBLICATION ingestd_fresh")
    assert status is not None
    found = status["sources"]["fresh"]
    return {
        "per_second": sent / SECONDS,
        "p50_s": found["freshness_p50_seconds"],
        "p99_s": found["freshness_p99_seconds"],
        "core_share": (meter.cpu_s - before) / SECONDS,
        "peak_mb": meter.peak_bytes / 1e6,
    }


def _write(rig: Rig) -> int:
    began = time.monotonic()
    sent = 0
    with rig.server.connect() as connection:
        while (now := time.monotonic()) - began < SECONDS:
            due = int((now - began) * RATE)
            while sent < due:
                connection.execute("INSERT INTO ticks (at, note) VALUES (now(), 'a short note')")
                sent += 1
            time.sleep(0.5 / RATE)
    return sent
