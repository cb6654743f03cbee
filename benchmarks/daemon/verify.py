"""`ingestd verify` of a table of 1M rows, alongside its daemon, against psql's COPY."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks.daemon.snapshot import fill
from benchmarks.harness.rig import LIMIT_S, Rig, config, source, timed
from ingestd.testing.embedded.waiting import await_until

ROWS, CHANGED = 1_000_000, 100_000
NAME = "verify"
SMALL_MEMORY = "16MB"


def measure(rig: Rig, *, rows: int = ROWS, changed: int = CHANGED) -> dict[str, float]:
    """Return seconds and peaks: with the default memory and with a small one; COPY alone."""
    fill(rig, rows)
    copy: list[str | Path] = [rig.server.program("psql"), "--no-psqlrc", rig.server.dsn()]
    copy += ["-c", "copy load to stdout"]
    timed(copy)
    daemon = rig.daemon(NAME, config(source(NAME, rig.server.dsn(), "public.load")))
    daemon.start_ready(LIMIT_S)
    rig.psql(f"UPDATE load SET amount = amount + 1 WHERE id % {rows // changed} = 0")
    rig.psql("VACUUM load")
    rig.await_confirmed(f"ingestd_{NAME}", rig.lsn())
    found = {"copy_s": timed(copy)}
    for what, more in (("", ()), ("small_", ("--memory", SMALL_MEMORY))):
        seconds, peak_bytes = _run(daemon.config_path, rows, *more)
        found |= {f"{what}s": seconds, f"{what}mb": peak_bytes / 1e6}
    daemon.sigterm()
    rig.forget(NAME)
    rig.psql("DROP TABLE load")
    return found


def _run(config_path: Path, rows: int, *more: str) -> tuple[float, int]:
    """Run the command; return its seconds, from the start of the process, and its peak in bytes."""
    command = [sys.executable, "-m", "ingestd", "verify", NAME, "--json", *more]
    began = time.perf_counter()
    command += ["-c", str(config_path)]
    # in the folder that contains the lake
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=config_path.parent)
    watched, peaks = psutil.Process(process.pid), [0]

    def has_ended() -> bool:
        try:
            peaks[0] = max(peaks[0], watched.memory_info().rss)
        except psutil.NoSuchProcess:
            return True
        return process.poll() is not None

    await_until(has_ended, LIMIT_S, "ingestd verify", poll_s=0.02)
    seconds = time.perf_counter() - began
    said, _ = process.communicate()
    [table] = json.loads(said)["tables"]
    if table["state"] != "equal" or table["source_rows"] != rows:
        msg = f"not equal: {table}"
        raise ValueError(msg)
    return seconds, peaks[0]
