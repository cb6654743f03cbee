"""`python -m tests.soak.storm`: all at once, and the most memory that the daemon takes.

A backlog of small transactions and a large one, a large one from the stream among small ones, a
slow lake, faults of lake and source at many steps, connections that are reset again and again.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from ingestd.failpoints import VARIABLE
from ingestd.lake.delta.read import read_raw
from ingestd.model.schema import TableId
from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.embedded.postgres import PostgresServer
from ingestd.testing.oracle.comparison import await_caught_up
from tests.harness.config import wal_config
from tests.harness.databases import fresh_database
from tests.harness.flaky_network import FlakyNetwork

if TYPE_CHECKING:
    from tests.harness.databases import Database

SETTINGS = {"fsync": "off", "full_page_writes": "off", "max_wal_size": "4GB"}
LIMIT_S = 3600.0
RESET_S = 3.0
SAMPLE_S = 0.1
SLOW = "sink.raw_commit.before=delay:0.5@1+"
FAILING = (
    "sink.raw_commit.before",
    "sink.raw_commit.after",
    "sink.fsync.after",
    "sink.parquet.before",
    "sink.epochs_commit.before",
    "capture.decode.after",
    "capture.receive.after",
    "capture.confirm.before",
    "capture.slot_copy.after",
)
FAULTS = [f"{point}=error@{time}" for point in FAILING for time in (2, 5, 9)]
"""Where it fails, when it comes there for so many times."""
PROGRAM = (sys.executable, "-m", "tests.harness.impatient")
"""It waits for a second after a fault, not for up to thirty: so there is more of the storm."""
TABLES = ("first", "second", "small")
CREATE = """CREATE TABLE {} (id bigint PRIMARY KEY, n int, amount numeric(12,2), score float8,
    at timestamptz, note text, tag text, flag boolean)"""
ROWS = """INSERT INTO {} SELECT i, i % 1000, i / 100.0, i / 3.0, now(), repeat(md5(i::text), 3),
    'tag ' || i % 50, i % 2 = 0 FROM generate_series({}, {}) i"""


@dataclass(slots=True)
class Storm:
    """What came of it, in MB as the kernel counts them; `limit_mb`: what the config says."""

    limit_mb: float
    rows: int = 0
    before_mb: float = 0.0
    usual_mb: float = 0.0
    peak_mb: float = 0.0
    resets: int = 0
    faults: int = 0
    seconds: float = 0.0

    def lines(self) -> list[str]:
        """Return it for people."""
        rows = f"{self.rows} rows in {self.seconds:.0f} s, each once"
        faults = f"all connections reset {self.resets} times, {self.faults} faults by failpoints"
        peak = f"peak RSS {self.peak_mb:.0f} MB, limits.memory {self.limit_mb:.0f} MB"
        usual = f"before the storm {self.before_mb:.0f} MB, half of the time {self.usual_mb:.0f} MB"
        return [f"{rows}; {faults}", f"{peak}; {usual}"]


def weather(database: Database, folder: Path, rows: int, memory_mb: int) -> Storm:
    """Have it all happen. Raises AssertionError where rows are lost or doubled."""
    found = Storm(memory_mb)
    for table in TABLES:
        database.execute(CREATE.format(table))
    lake = folder / "lake"
    with FlakyNetwork(database.server.port) as network:
        daemon = Daemon(folder / "daemon", _config(database, network, lake, memory_mb))
        daemon.program = PROGRAM
        try:
            daemon.start_ready(LIMIT_S)
            found.before_mb = _memory_mb(daemon, "VmHWM")
            assert daemon.sigterm() == 0
            _write_backlog(database, rows)
            daemon.environment[VARIABLE] = ",".join([*FAULTS, SLOW])
            daemon.start()
            written = _endure(database, daemon, network, found, rows)
            found.peak_mb = _memory_mb(daemon, "VmHWM")
            acted = daemon.events("failpoint.reached")
            found.faults = sum(event["action"] == "error" for event in acted)
            assert daemon.sigterm() == 0
        finally:
            daemon.close()
    expected = {"first": 2 * rows, "second": rows, "small": written}
    for table, count in expected.items():
        _assert_each_once(lake, table, count)
    found.rows = sum(expected.values())
    return found


def _config(database: Database, network: FlakyNetwork, lake: Path, memory_mb: int) -> str:
    name = database.name
    return wal_config(
        lake=lake,
        dsn=network.dsn(database.dsn),
        max_delay="1s",
        source_extra=f'slot = "{name}"\npublication = "{name}"\ncatch_up_part = "64MB"',
        extra=f'[limits]\nmemory = "{memory_mb}MB"\n[maintenance]\ncompact = "1m"',
    )


def _write_backlog(database: Database, rows: int) -> None:
    """`rows` in a hundred transactions, and as many in one."""
    step = rows // 100
    for low in range(1, rows, step):
        database.execute(ROWS.format("first", low, low + step - 1))
    database.execute(ROWS.format("second", 1, rows))


def _endure(
    database: Database, daemon: Daemon, network: FlakyNetwork, found: Storm, rows: int
) -> int:
    """Write one more large transaction with small ones alongside; return the number of these."""
    began_s = time.monotonic()
    over = threading.Event()
    with ThreadPoolExecutor() as pool:
        sampled = pool.submit(_sample, daemon, over)
        reset = pool.submit(_reset, network, over)
        try:
            enough = threading.Event()
            small = pool.submit(_write_small, database, enough)
            try:
                database.execute(ROWS.format("first", rows + 1, 2 * rows))
                with database.connect() as connection:
                    await_caught_up(connection, database.name, LIMIT_S)
            finally:
                enough.set()
            with database.connect() as connection:
                await_caught_up(connection, database.name, LIMIT_S)
        finally:
            over.set()
    found.seconds = time.monotonic() - began_s
    found.usual_mb, found.resets = statistics.median(sampled.result()), reset.result()
    return small.result()


def _sample(daemon: Daemon, over: threading.Event) -> list[float]:
    samples = [_memory_mb(daemon, "VmRSS")]
    while not over.wait(SAMPLE_S):
        samples.append(_memory_mb(daemon, "VmRSS"))
    return samples


def _reset(network: FlakyNetwork, over: threading.Event) -> int:
    """Cut the open connections, ever less often: a large transaction needs its time in one."""
    resets, pause_s = 0, RESET_S
    while not over.wait(pause_s):
        network.reset()
        resets += 1
        pause_s *= 1.25
    return resets


def _write_small(database: Database, enough: threading.Event) -> int:
    """Some hundred transactions of a row a second."""
    written = 0
    with database.connect() as connection:
        while not enough.wait(0.003):
            written += 1
            connection.execute(ROWS.format("small", written, written).encode())
    return written


def _memory_mb(daemon: Daemon, what: str) -> float:
    text = Path(f"/proc/{daemon.pid}/status").read_text(encoding="ascii")
    [line] = [line for line in text.splitlines() if line.startswith(f"{what}:")]
    return int(line.split()[1]) * 1024 / 1e6


def _assert_each_once(lake: Path, table: str, count: int) -> None:
    rows = read_raw(str(lake), "shop", TableId("public", table))
    changes = rows.filter(pc.equal(rows["_cdc_op"], "c"))
    ids = np.sort(changes["id"].to_numpy())
    assert np.array_equal(ids, np.arange(1, count + 1)), f"{table}: {len(ids)} of {count} rows"


def main(arguments: list[str]) -> int:
    """Print the report; 1 if the limit was passed or rows are missing: then all is kept."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.storm", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of each large part")
    parser.add_argument("--memory", type=int, default=512, help="MB, for limits.memory")
    chosen = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="ingestd-storm-"))
    server = PostgresServer(folder / "data", settings=SETTINGS)
    try:
        with server, fresh_database(server) as database:
            found = weather(database, folder, chosen.rows, chosen.memory)
    except (AssertionError, TimeoutError) as error:
        traceback.print_exception(error)
        return 1
    finally:
        server.close()
    for line in found.lines():
        print(line, flush=True)  # noqa: T201 - the program's output
    if found.peak_mb > found.limit_mb:
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
