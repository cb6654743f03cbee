"""Freshness under small transactions: the time from commit at the source to durable in the lake."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.rig import Rig, config, source
from ingestd.lake.delta.read import read_raw
from ingestd.model.schema import TableId
from ingestd.testing.embedded.daemon import Daemon

RATE, SECONDS = 1000, 30
SESSIONS = 8
"""Each session waits for the disk at every commit."""


@dataclass(frozen=True, slots=True)
class Freshness:
    """`ages_s`: age of each transaction when its epoch was durable; the daemon's CPU and memory."""

    ages_s: NDArray[np.float64]
    per_second: float
    core_share: float
    peak_mb: float

    def quantile_s(self, q: float) -> float:
        """Return the age that this share of the transactions does not exceed."""
        return float(np.quantile(self.ages_s, q))


def measure(
    rig: Rig, *, max_delay: str = "200ms", rate: float = RATE, seconds: int = SECONDS
) -> Freshness:
    """Write `rate` transactions a second for `seconds`."""
    rig.psql("DROP TABLE IF EXISTS ticks")
    rig.psql("CREATE TABLE ticks (id bigserial PRIMARY KEY, at timestamptz, note text)")
    name = f"fresh_{max_delay}"
    text = source(name, rig.server.dsn(), "public.ticks")
    daemon = rig.daemon(name, config(text, max_delay=max_delay))
    daemon.start_ready()
    meter = rig.meter(daemon)
    before_s = meter.process_cpu_s()
    _write(rig, rate, seconds)
    core_share = (meter.process_cpu_s() - before_s) / seconds
    rig.await_confirmed(f"ingestd_{name}", rig.lsn())
    meter.stop()
    daemon.sigterm()
    rig.forget(name)
    ages_s = _ages_s(daemon, name)
    return Freshness(ages_s, len(ages_s) / seconds, core_share, meter.peak_bytes / 1e6)


def _write(rig: Rig, rate: float, seconds: int) -> None:
    script = rig.folder / "ticks.sql"
    script.write_text("INSERT INTO ticks (at, note) VALUES (now(), 'a short note');\n")
    subprocess.run(
        [
            *(rig.server.program("pgbench"), "--no-vacuum", "--file", script),
            *("--client", str(SESSIONS), "--protocol", "prepared"),
            *("--rate", str(rate), "--time", str(seconds), rig.server.dsn(socket=True)),
        ],
        check=True,
        capture_output=True,
        env={**os.environ, "PGCONNECT_TIMEOUT": "10"},
    )


def _ages_s(daemon: Daemon, name: str) -> NDArray[np.float64]:
    durable_us = {
        int(event["epoch"]): datetime.fromisoformat(event["timestamp"]).timestamp() * 1e6
        for event in daemon.events("epoch.committed")
    }
    rows = read_raw(str(daemon.folder / "lake"), name, TableId("public", "ticks"))
    rows = rows.select(["_cdc_op", "_cdc_ts", "_cdc_epoch"])
    is_change = rows["_cdc_op"].to_numpy(zero_copy_only=False) == "c"
    committed_us = rows["_cdc_ts"].cast("int64").to_numpy()[is_change]
    epochs = rows["_cdc_epoch"].to_numpy()[is_change]
    at_us = np.array([durable_us[epoch] for epoch in epochs.tolist()])
    found: NDArray[np.float64] = (at_us - committed_us) / 1e6
    return found
