"""Draining a backlog of 1.5M changes, against pg_recvlogical on the same WAL."""

from __future__ import annotations

import time

from benchmarks.rig import COLUMNS, ROW, Meter, Rig, config, source, timed
from ingestd.positions import Lsn

ROWS, TRANSACTIONS, UPDATES = 1_000_000, 100, 500_000
CHANGES = ROWS + UPDATES


def measure(rig: Rig, *, socket: bool = False) -> dict[str, float]:
    """Give the seconds of both and the daemon's peak memory and CPU.

    `daemon_s` is from the start of the process until the slot is confirmed at the end.
    """
    rig.psql("DROP TABLE IF EXISTS load")
    rig.psql(f"CREATE TABLE load ({COLUMNS})")
    name = "drain_socket" if socket else "drain_tcp"
    dsn = rig.server.dsn(socket=socket)
    slot = f"ingestd_{name}"
    daemon = rig.daemon(name, config(source(name, dsn, "public.load"), max_delay="1s"))
    daemon.start_ready()
    daemon.sigterm()
    reference = f"reference_{name}"
    rig.psql(f"SELECT pg_create_logical_replication_slot('{reference}', 'pgoutput')")
    target = _load(rig)
    reference_s = _pg_recvlogical(rig, dsn, reference, slot, str(target))
    rig.psql(f"SELECT pg_drop_replication_slot('{reference}')")
    began = time.perf_counter()
    daemon.start()
    meter = Meter(daemon.pid)
    rig.await_confirmed(slot, target)
    daemon_s = time.perf_counter() - began
    meter.stop()
    daemon.sigterm()
    rig.psql(f"SELECT pg_drop_replication_slot('{slot}')")
    rig.psql(f"DROP PUBLICATION {slot}")
    return {
        "reference_s": reference_s,
        "daemon_s": daemon_s,
        "ratio": reference_s / daemon_s,
        "changes_per_s": CHANGES / daemon_s,
        "cpu_s": meter.cpu_s,
        "peak_mb": meter.peak_bytes / 1e6,
    }


def _load(rig: Rig) -> Lsn:
    """Write the workload; give the end of its last commit."""
    step = ROWS // TRANSACTIONS
    with rig.server.connect() as connection:
        for low in range(1, ROWS + 1, step):
            connection.execute(
                f"INSERT INTO load SELECT {ROW} FROM generate_series({low}, {low + step - 1}) i"
            )
        connection.execute(f"UPDATE load SET score = score + 1 WHERE id <= {UPDATES}")
        [end] = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone() or [""]
        # something after it: pg_recvlogical ends only when it sees a later position
        connection.execute("SELECT pg_logical_emit_message(true, 'end', '')")
    return Lsn.parse(end)


def _pg_recvlogical(rig: Rig, dsn: str, slot: str, publication: str, end: str) -> float:
    return timed(
        [
            rig.server.program("pg_recvlogical"),
            *("--dbname", dsn),
            *("--slot", slot),
            "--start",
            *("--endpos", end),
            *("--option", "proto_version=1"),
            *("--option", f"publication_names={publication}"),
            *("--file", "-"),
            "--no-loop",
        ]
    )
