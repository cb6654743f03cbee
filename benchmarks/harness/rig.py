"""A private server and a measured daemon on it."""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg

from ingestd.model.lsn import Lsn
from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.embedded.postgres import PostgresServer
from ingestd.testing.embedded.waiting import await_until

COLUMNS = """
    id bigint PRIMARY KEY, customer int NOT NULL, amount numeric(12,2), status varchar(20),
    note text, is_open boolean, created timestamptz, due date, score float8, payload jsonb
"""
ROW = """
    i, i % 10000, (i % 99999)::numeric / 100, 'status-' || i % 7, 'note number ' || i,
    i % 3 = 0, timestamptz '2024-01-01' + i * interval '1 second', date '2024-01-01' + i % 365,
    i / 7.0, jsonb_build_object('k', i % 100)
"""
LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Rig:
    """A running server, and a folder for lakes and daemons.

    `meters`: one for each measured daemon, by the name of its folder.
    """

    server: PostgresServer
    folder: Path
    meters: dict[str, Meter] = field(default_factory=dict)

    def psql(self, sql: str) -> str:
        """Run SQL, each call in a separate session."""
        return self.server.psql(sql)

    def lsn(self) -> Lsn:
        """Return the server's current position."""
        return Lsn.parse(self.psql("SELECT pg_current_wal_insert_lsn()").strip())

    def daemon(self, name: str, config: str) -> Daemon:
        """Create a daemon in a separate folder, which also contains a relative lake."""
        return Daemon(self.folder / name, config)

    def meter(self, daemon: Daemon) -> Meter:
        """Measure a daemon that was just started, and keep the samples for the plots."""
        meter = self.meters[daemon.folder.name] = Meter(daemon.pid)
        return meter

    def daemon_events(self, name: str, event: str) -> list[dict[str, Any]]:
        """Return the events that the daemon in that folder logged."""
        lines = (self.folder / name / "ingestd.log").read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [one for one in found if one.get("event") == event]

    def confirmed(self, slot: str) -> Lsn | None:
        """Return the position up to which the slot is confirmed."""
        with self.server.connect() as connection:
            return _confirmed(connection, slot)

    def forget(self, source: str) -> None:
        """Drop the slot and the publication of a source whose daemon has ended.

        The server may take a moment to notice that, and keeps the slot active until then.
        """
        mine = f"FROM pg_replication_slots WHERE slot_name = 'ingestd_{source}'"
        await_until(
            lambda: self.psql(f"SELECT active {mine}").strip() != "t", LIMIT_S, f"slot of {source}"
        )
        self.psql(f"SELECT pg_catalog.pg_drop_replication_slot('ingestd_{source}')")
        self.psql(f"DROP PUBLICATION ingestd_{source}")

    def await_confirmed(self, slot: str, target: Lsn) -> None:
        """Wait until the slot is confirmed up to `target`; reuse one session to save time."""
        with self.server.connect(autocommit=True) as connection:
            await_until(
                lambda: (_confirmed(connection, slot) or 0) >= target,
                LIMIT_S,
                f"slot {slot}",
                poll_s=0.02,
            )


def _confirmed(connection: psycopg.Connection[Any], slot: str) -> Lsn | None:
    row = connection.execute(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", [slot]
    ).fetchone()
    return None if row is None or row[0] is None else Lsn.parse(row[0])


@contextmanager
def rig() -> Iterator[Rig]:
    """Start a server with default durability (fsync on), and remove it completely at the end."""
    settings = {
        "max_wal_size": "4GB",
        "shared_buffers": "256MB",
        "max_replication_slots": "30",
        "max_wal_senders": "30",
        "checkpoint_timeout": "30min",
    }
    with tempfile.TemporaryDirectory(prefix="ingestd-bench-") as folder:
        server = PostgresServer(Path(folder) / "data", settings=settings)
        try:
            with server:
                yield Rig(server, Path(folder))
        finally:
            server.remove()


def config(*sources: str, max_delay: str = "5s", lake: str = "lake") -> str:
    """Return a daemon's TOML with these `[sources...]` texts; a relative lake is in its folder."""
    return "\n".join([f'[lake]\nuri = "{lake}"\n[epoch]\nmax_delay = "{max_delay}"', *sources])


def source(name: str, dsn: str, tables: str, kind: str = "wal", **extra: str) -> str:
    """Return the TOML of a source; `extra`: further keys, with their values as TOML."""
    lines = [f"[sources.{name}]", f'kind = "{kind}"', f'dsn = "{dsn}"', f'tables = ["{tables}"]']
    return "\n".join([*lines, *(f"{key} = {value}" for key, value in extra.items()), ""])


class Meter:
    """Resident memory and CPU seconds of a process, from start to `stop`, every 50 ms.

    `began`: the start as time.time(). `at_s`: time of each sample since the start.
    """

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._stopping = threading.Event()
        self.began = time.time()
        self.at_s: list[float] = []
        self.resident_bytes: list[int] = []
        self.cpu_s = 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    @property
    def peak_bytes(self) -> int:
        """The peak of resident memory."""
        return max(self.resident_bytes, default=0)

    @property
    def growth(self) -> float:
        """The peak in the last third of the time, relative to the third before it."""
        third = max(1, len(self.resident_bytes) // 3)
        before, last = self.resident_bytes[-2 * third : -third], self.resident_bytes[-third:]
        return max(last) / max(before, default=1)

    def process_cpu_s(self) -> float:
        """Return the CPU seconds of the process so far."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def stop(self) -> None:
        """Take the last sample."""
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            try:
                resident_bytes = self._process.memory_info().rss
                cpu_s = self.process_cpu_s()
            except psutil.NoSuchProcess:
                return
            self.at_s.append(time.time() - self.began)
            self.resident_bytes.append(resident_bytes)
            self.cpu_s = cpu_s
            if self._stopping.wait(0.05):
                return


def timed(command: list[str | Path], stdout: Path | None = None) -> float:
    """Return the seconds that a command takes; discard its output. Raise CalledProcessError."""
    began = time.perf_counter()
    with (stdout or Path("/dev/null")).open("wb") as sink:
        subprocess.run(command, check=True, stdout=sink)
    return time.perf_counter() - began
