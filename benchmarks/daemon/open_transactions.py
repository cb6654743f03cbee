"""One large transaction among small ones: sent before it commits, or after.

`python -m benchmarks.daemon.open_transactions [ROWS [TIMES]]`.
Transactions that are rolled back are measured too, as they cost work without any use.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Self

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.harness.rig import COLUMNS, ROW, Rig, config, rig, source
from ingestd.lake.delta.read import read_raw
from ingestd.model.lsn import Lsn
from ingestd.model.schema import TableId
from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.embedded.waiting import await_until

RATE = 20
"""Small transactions a second."""
LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class LargeTransactionRun:
    """`delay_s`: from the large COMMIT to durable; `ages_s`: of the small ones, from before it.

    `left_cpu_s`: CPU of walsender and daemon after the COMMIT, which other load does not affect.
    """

    delay_s: float
    ages_s: NDArray[np.float64]
    write_s: float
    daemon_cpu_s: float
    sender_cpu_s: float
    left_cpu_s: float
    peak_mb: float

    def __str__(self) -> str:
        return (
            f"delay {self.delay_s:5.2f} s, small p50 {np.quantile(self.ages_s, 0.5):.2f}"
            f" p99 {np.quantile(self.ages_s, 0.99):.2f} max {self.ages_s.max():.2f} s,"
            f" written in {self.write_s:.1f} s, CPU daemon {self.daemon_cpu_s:.1f}"
            f" walsender {self.sender_cpu_s:.1f}, of both after COMMIT {self.left_cpu_s:.1f} s,"
            f" peak {self.peak_mb:.0f} MB"
        )


class SmallWriter:
    """Inserts one row a transaction, RATE times a second, inside a `with`."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _write(self) -> None:
        with self._rig.server.connect() as connection:
            while not self._stopping.wait(1 / RATE):
                connection.execute("INSERT INTO open_small (at) VALUES (clock_timestamp())")


def measure(
    rig: Rig, rows: int, spool: str, *, commits: bool = True, is_slow: bool = False
) -> LargeTransactionRun:
    """Run one daemon through one large transaction.

    `is_slow`: the transaction is so long that the server has decoded all of it before its end.
    """
    rig.psql("DROP TABLE IF EXISTS open_large, open_small")
    rig.psql(f"CREATE TABLE open_large ({COLUMNS})")
    rig.psql("CREATE TABLE open_small (id bigserial PRIMARY KEY, at timestamptz)")
    name = f"open_{time.monotonic_ns()}"
    text = source(
        name,
        rig.server.dsn(),
        "public.open_*",
        open_transaction_spool=f'"{spool}"',
        catch_up_above='"100GB"',
    )
    daemon = rig.daemon(name, config(text, max_delay="200ms"))
    daemon.start_ready(LIMIT_S)
    meter = rig.meter(daemon)
    sender = psutil.Process(_sender_pid(rig))
    sender_s = sum(sender.cpu_times()[:2])
    before_s = meter.process_cpu_s()
    with SmallWriter(rig), rig.server.connect(autocommit=False) as session:
        began = time.monotonic()
        session.execute(
            f"INSERT INTO open_large SELECT {ROW} FROM generate_series(1, {rows}) i".encode()
        )
        write_s = time.monotonic() - began
        if is_slow:
            _await_sent(rig, rig.lsn())
        at_end_s = sum(sender.cpu_times()[:2]) + meter.process_cpu_s()
        if commits:
            session.commit()
        else:
            session.rollback()
        target = rig.lsn()
        rig.await_confirmed(f"ingestd_{name}", target)
        left_s = sum(sender.cpu_times()[:2]) + meter.process_cpu_s() - at_end_s
    rig.await_confirmed(f"ingestd_{name}", rig.lsn())
    sender_s = sum(sender.cpu_times()[:2]) - sender_s
    daemon_s = meter.process_cpu_s() - before_s
    meter.stop()
    ages_s = _ages_s(daemon, name, "open_small")
    found = LargeTransactionRun(
        float(_ages_s(daemon, name, "open_large").max()) if commits else 0.0,
        ages_s,
        write_s,
        daemon_s,
        sender_s,
        left_s,
        meter.peak_bytes / 1e6,
    )
    daemon.sigterm()
    rig.forget(name)
    return found


def _await_sent(rig: Rig, target: Lsn) -> None:
    """Wait until the walsender has read all WAL below `target`."""
    query = "SELECT sent_lsn FROM pg_stat_replication"
    await_until(lambda: Lsn.parse(rig.psql(query).strip()) >= target, LIMIT_S, "the walsender")


def _sender_pid(rig: Rig) -> int:
    return int(
        await_until(
            lambda: rig.psql("SELECT active_pid FROM pg_replication_slots").strip(), LIMIT_S
        )
    )


def _ages_s(daemon: Daemon, name: str, table: str) -> NDArray[np.float64]:
    durable_us = {
        int(event["epoch"]): datetime.fromisoformat(event["timestamp"]).timestamp() * 1e6
        for event in daemon.events("epoch.committed")
    }
    rows = read_raw(str(daemon.folder / "lake"), name, TableId("public", table))
    rows = rows.select(["_cdc_op", "_cdc_ts", "_cdc_epoch"])
    is_change = rows["_cdc_op"].to_numpy(zero_copy_only=False) == "c"
    committed_us = rows["_cdc_ts"].cast("int64").to_numpy()[is_change]
    epochs = rows["_cdc_epoch"].to_numpy()[is_change]
    last, which = np.unique(epochs, return_inverse=True)
    at_us = np.array([durable_us[epoch] for epoch in last.tolist()])[which]
    found: NDArray[np.float64] = (at_us - committed_us) / 1e6
    return found


def main(arguments: list[str]) -> int:
    """Run both ways alternately."""
    rows, times = [int(a) for a in (*arguments, *("1000000", "2")[len(arguments) :])]
    with rig() as server:
        for _ in range(times):
            for is_slow, commits in ((False, True), (True, True), (False, False)):
                for spool in ("0", "4GB"):
                    found = measure(server, rows, spool, commits=commits, is_slow=is_slow)
                    name = "rolled back" if not commits else "slow" if is_slow else "fast"
                    print(f"{name:>11} {spool:>3}: {found}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
