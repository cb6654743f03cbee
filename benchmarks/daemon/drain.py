"""Draining a backlog of changes: daemons against pg_recvlogical, all on the same WAL."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.harness.rig import COLUMNS, ROW, Rig, config, source, timed
from ingestd.model.lsn import Lsn
from ingestd.testing.embedded.daemon import Daemon

ROWS, TRANSACTIONS = 1_000_000, 100


@dataclass(frozen=True, slots=True)
class Run:
    """A daemon that drains the backlog: kind of socket, by SQL functions or streaming only.

    `tag`: distinguishes runs of the same kind. `lake`: its location, by default in the daemon's
    folder; `options`: further config.
    """

    socket: bool = False
    streaming: bool = False
    tag: str = ""
    lake: str = "lake"
    options: str = ""

    @property
    def name(self) -> str:
        """The name of its source and of its folder."""
        way = "stream" if self.streaming else "drain"
        return f"{way}_{'unix' if self.socket else 'tcp'}{self.tag}"

    @property
    def slot(self) -> str:
        """The name of its slot and of its publication."""
        return f"ingestd_{self.name}"


CATCH_UP, STREAM, STREAM_UNIX = Run(), Run(streaming=True), Run(socket=True, streaming=True)


@dataclass(frozen=True, slots=True)
class Drained:
    """`daemon_s`: from the start of the process until the slot is confirmed at the end."""

    daemon_s: float
    cpu_s: float
    peak_mb: float


@dataclass(frozen=True, slots=True)
class Backlog:
    """The size of the backlog, and the times of pg_recvlogical (0 if left out) and of each run."""

    changes: int
    tcp_s: float
    unix_s: float
    drained: dict[Run, Drained]


def measure(
    rig: Rig,
    runs: Sequence[Run] = (CATCH_UP, STREAM, STREAM_UNIX),
    *,
    rows: int = ROWS,
    rounds: int = 1,
    has_references: bool = True,
) -> Backlog:
    """Insert `rows` in 100 transactions, update half of them in one, and drain that with each run.

    Results are medians of `rounds`, run alternately; those of the first round have the names of
    `runs`.
    """
    by_round = [[replace(run, tag=run.tag + "_" * n) for run in runs] for n in range(rounds)]
    references = [
        f"reference_{kind}{n}" for n in range(rounds) for kind in ("tcp", "unix") if has_references
    ]
    every = [run for each in by_round for run in each]
    daemons, target = prepare(rig, every, rows=rows, slots=references)
    reference_s: dict[bool, list[float]] = {False: [], True: []}
    found: dict[Run, list[Drained]] = {run: [] for run in runs}
    for n, each in enumerate(by_round):
        for name in references[2 * n : 2 * n + 2]:
            is_unix = "unix" in name
            dsn = rig.server.dsn(socket=is_unix)
            seconds = _pg_recvlogical(rig, dsn, name, runs[0].slot, str(target))
            reference_s[is_unix].append(seconds)
            rig.psql(f"SELECT pg_catalog.pg_drop_replication_slot('{name}')")
        for base, run in zip(runs, each, strict=True):
            found[base].append(drain(rig, run, daemons[run], target))
    return Backlog(
        rows + rows // 2,
        median(reference_s[False] or [0.0]),
        median(reference_s[True] or [0.0]),
        {run: _median(each) for run, each in found.items()},
    )


def _median(found: Sequence[Drained]) -> Drained:
    return Drained(
        median(one.daemon_s for one in found),
        median(one.cpu_s for one in found),
        median(one.peak_mb for one in found),
    )


def prepare(
    rig: Rig, runs: Sequence[Run], *, rows: int = ROWS, slots: Sequence[str] = ()
) -> tuple[dict[Run, Daemon], Lsn]:
    """Write the backlog for each run's daemon and each of `slots`; return its end.

    Autovacuum is off, as it would use a core during the measurement.
    """
    rig.psql("DROP TABLE IF EXISTS load")
    rig.psql(f"CREATE TABLE load ({COLUMNS}) WITH (autovacuum_enabled = off)")
    daemons = {run: _with_slot(rig, run) for run in runs}
    for name in slots:
        rig.psql(f"SELECT pg_catalog.pg_create_logical_replication_slot('{name}', 'pgoutput')")
    return daemons, _load(rig, rows)


def _with_slot(rig: Rig, run: Run) -> Daemon:
    extra = {"catch_up_above": '"1000GB"'} if run.streaming else {}
    text = source(run.name, rig.server.dsn(socket=run.socket), "public.load", **extra)
    text = config(text, run.options, max_delay="1s", lake=run.lake)
    daemon = rig.daemon(run.name, text)
    daemon.start_ready()
    daemon.sigterm()
    return daemon


def drain(rig: Rig, run: Run, daemon: Daemon, target: Lsn) -> Drained:
    """Start the daemon, wait for the end, and drop its slot."""
    began = time.perf_counter()
    daemon.start()
    meter = rig.meter(daemon)
    rig.await_confirmed(run.slot, target)
    daemon_s = time.perf_counter() - began
    meter.stop()
    daemon.sigterm()
    rig.forget(run.name)
    return Drained(daemon_s, meter.cpu_s, meter.peak_bytes / 1e6)


def _load(rig: Rig, rows: int) -> Lsn:
    """Write the workload; return the end of its last commit."""
    step = rows // TRANSACTIONS
    with rig.server.connect() as connection:
        for low in range(1, rows + 1, step):
            connection.execute(
                f"INSERT INTO load SELECT {ROW} FROM generate_series({low}, {low + step - 1}) i"
            )
        connection.execute(f"UPDATE load SET score = score + 1 WHERE id <= {rows // 2}")
        [end] = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone() or [""]
        # write a later record: pg_recvlogical ends only when it sees a later position
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
