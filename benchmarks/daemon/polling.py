"""Polling: the first load against kind `wal`, and the server time of a steady poll."""

from __future__ import annotations

import random
import time
from statistics import median

from benchmarks.daemon import snapshot
from benchmarks.harness.rig import LIMIT_S, Meter, Rig, config
from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.embedded.waiting import await_until

ROWS, RUNS = 1_000_000, 3
STEADY_ROWS, CHANGES, CYCLES = 10_000_000, 1000, 20
INTERVAL_S = 1.0


def measure_load(rig: Rig) -> dict[str, float]:
    """Read 1M rows by both kinds alternately; return medians of RUNS, in seconds."""
    snapshot.fill(rig, ROWS)
    found: dict[str, list[float]] = {"wal": [], "polling": []}
    for number in range(RUNS):
        wal = snapshot.run(rig, f"wal_{number}", 2)
        polling = snapshot.run(rig, f"polling_{number}", 2, kind="polling")
        found["wal"].append(wal["daemon_s"])
        found["polling"].append(polling["daemon_s"])
    rig.psql("DROP TABLE load")
    medians = {kind: median(seconds) for kind, seconds in found.items()}
    return {**medians, "ratio": medians["wal"] / medians["polling"]}


def measure_steady(rig: Rig) -> dict[str, float]:
    """Poll a table of 10M rows, 1000 of which change between two polls.

    `poll_ms`: time that the server spends on statements, without the writers', for each poll with
    changes. The minimum for a poll without an index is `scan_ms`, a scan of the table.
    """
    rig.psql("CREATE TABLE steady (id bigint PRIMARY KEY, note text, at timestamptz NOT NULL)")
    rig.psql(
        f"INSERT INTO steady SELECT i, 'note ' || i, timestamptz '2026-01-01' + i * interval '1 ms'"
        f" FROM generate_series(1, {STEADY_ROWS}) i"
    )
    rig.psql("CREATE INDEX ON steady (at)")
    rig.psql("VACUUM ANALYZE steady")
    began = time.perf_counter()
    rig.psql("SELECT count(*) FROM steady WHERE age(xmin) < 0")
    scan_s = time.perf_counter() - began
    text = "\n".join(
        [
            "[sources.steady]",
            'kind = "polling"',
            f'dsn = "{rig.server.dsn()}"',
            'tables = ["public.steady"]',
            f'interval = "{INTERVAL_S}s"',
            '[sources.steady.table."public.steady"]',
            'cursor = "at"',
        ]
    )
    daemon = rig.daemon("steady", config(text, max_delay="200ms"))
    daemon.start()
    meter = Meter(daemon.pid)
    await_until(lambda: _is_live(daemon), LIMIT_S, "the first load", poll_s=0.1)
    chance = random.Random(1)
    _change(rig, chance)
    _await_rows(daemon, CHANGES)  # after a first check of the complete table
    spent, before = 0.0, _active_ms(rig)
    for cycle in range(CYCLES):
        spent += _change(rig, chance)
        _await_rows(daemon, CHANGES * (cycle + 2))
    time.sleep(1.5)  # a session reports its statistics once a second
    poll_ms = (_active_ms(rig) - before - spent * 1000) / CYCLES
    meter.stop()
    daemon.sigterm()
    rig.psql("DROP TABLE steady")
    return {
        "poll_ms": poll_ms,
        "scan_ms": scan_s * 1000,
        "peak_mb": meter.peak_bytes / 1e6,
    }


def _change(rig: Rig, chance: random.Random) -> float:
    """Change some rows; return the seconds that this took on the server."""
    keys = ",".join(str(chance.randrange(STEADY_ROWS) + 1) for _ in range(CHANGES))
    with rig.server.connect() as connection:
        began = time.perf_counter()
        connection.execute(
            f"UPDATE steady SET note = note || '.', at = now() WHERE id IN ({keys})".encode()
        )
        return time.perf_counter() - began


def _active_ms(rig: Rig) -> float:
    time.sleep(1.5)
    found = rig.psql("SELECT active_time FROM pg_stat_database WHERE datname = current_database()")
    return float(found.strip())


def _await_rows(daemon: Daemon, rows: int) -> None:
    """Wait until almost this many changes are in the lake, as a key may be drawn twice."""
    await_until(lambda: _written(daemon) >= rows * 0.99, LIMIT_S, f"{rows} changes", poll_s=0.02)


def _written(daemon: Daemon) -> int:
    return sum(int(event["rows"]) for event in daemon.events("epoch.committed")) - STEADY_ROWS


def _is_live(daemon: Daemon) -> bool:
    return any(event["state"] == "live" for event in daemon.events("table.state"))
