"""Incremental snapshots alongside the stream: freshness, open transactions, retained WAL."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from benchmarks.harness.rig import COLUMNS, LIMIT_S, ROW, Meter, Rig, config, source
from benchmarks.harness.writers import Writers
from ingestd.http.client import request_snapshot
from ingestd.lake.delta.read import read_files
from ingestd.lake.layout import Layout
from ingestd.lake.store.store import Store, open_store
from ingestd.model.schema import TableId
from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.embedded.waiting import await_until

ROWS, WRITES_PER_S, PHASE_S = 2_000_000, 500, 20.0
NAME = "chunked"
LOAD, TICKS = TableId("public", "load"), TableId("public", "ticks")


def measure(rig: Rig) -> dict[str, float]:
    """Write continuously; first without, then with consecutive snapshots of a table.

    Freshness is that of the transactions committed in each phase, in seconds.
    """
    rig.psql("DROP TABLE IF EXISTS load, ticks")
    rig.psql(f"CREATE TABLE load ({COLUMNS})")
    rig.psql(f"INSERT INTO load SELECT {ROW} FROM generate_series(1, {ROWS}) i")
    rig.psql("CREATE TABLE ticks (id bigserial PRIMARY KEY, at timestamptz, note text)")
    rig.psql("VACUUM ANALYZE load")
    extra = {"snapshot_chunked_above": '"0"'}
    text = source(NAME, rig.server.dsn(), "public.*", **extra)
    daemon = rig.daemon(NAME, config(text, max_delay="1s"))
    daemon.start_ready(LIMIT_S)
    rig.await_confirmed(f"ingestd_{NAME}", rig.lsn())
    meter = Meter(daemon.pid)
    with Writers(rig, _write, WRITES_PER_S, sessions=2) as writers:
        time.sleep(3)
        with Watcher(rig) as alone:
            time.sleep(PHASE_S)
        with Watcher(rig) as beside:
            snapshots = 0
            while beside.seconds < PHASE_S:
                request_snapshot(daemon.listen, NAME, [str(LOAD)])
                snapshots += 1
                _await_snapshots(daemon, snapshots)
        sent = writers.sent
    rig.await_confirmed(f"ingestd_{NAME}", rig.lsn())
    meter.stop()
    daemon.sigterm()
    rig.forget(NAME)
    ages = _ages(daemon)
    without, with_ = (_p99(ages, phase) for phase in (alone, beside))
    rig.psql("DROP TABLE load, ticks")
    return {
        "p99_alone_s": without,
        "p99_beside_s": with_,
        "ratio": with_ / without,
        "longest_s": beside.longest_s,
        "retained_alone_mb": alone.retained_bytes / 1e6,
        "retained_beside_mb": beside.retained_bytes / 1e6,
        "snapshots": snapshots,
        "rows_per_s": snapshots * ROWS / beside.seconds,
        "per_second": sent / (3 + alone.seconds + beside.seconds),
        "peak_mb": meter.peak_bytes / 1e6,
    }


def _write(connection: psycopg.Connection[tuple[Any, ...]], rng: random.Random) -> None:
    """Write to one of the two tables; half of the writes go to the one being read."""
    if rng.randrange(2):
        connection.execute("INSERT INTO ticks (at, note) VALUES (now(), 'a short note')")
    else:
        values = [rng.random(), rng.randrange(1, ROWS)]
        connection.execute("UPDATE load SET score = %s WHERE id = %s", values)


def _await_snapshots(daemon: Daemon, count: int) -> None:
    """Wait until `count` snapshots have ended, besides the first."""

    def are_done() -> bool:
        events = [e for e in daemon.events("table.state") if e["table"] == str(LOAD)]
        return [e["state"] for e in events].count("live") > count

    await_until(are_done, LIMIT_S, "the snapshot")


# --- queries on the server -------------------------------------------------------------------

_LONGEST = """
SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0)::float8
  FROM pg_stat_activity
 WHERE backend_type = 'client backend' AND application_name = 'ingestd'
"""
_RETAINED = """
SELECT (pg_current_wal_insert_lsn() - restart_lsn)::int8 FROM pg_replication_slots
 WHERE slot_name = %s
"""


@dataclass(slots=True)
class Watcher:
    """Samples the server while it is open: the longest transaction, the retained WAL."""

    rig: Rig
    longest_s: float = 0.0
    retained_bytes: int = 0
    began_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ended_at = time.time()
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def seconds(self) -> float:
        """How long the watcher has been open."""
        return (self.ended_at or time.time()) - self.began_at

    def _watch(self) -> None:
        with self.rig.server.connect() as connection:
            while not self._stopping.wait(0.1):
                [longest] = connection.execute(_LONGEST).fetchone() or [0.0]
                [retained] = connection.execute(_RETAINED, [f"ingestd_{NAME}"]).fetchone() or [0]
                self.longest_s = max(self.longest_s, longest)
                self.retained_bytes = max(self.retained_bytes, retained)


# --- data from the lake ----------------------------------------------------------------------


def _ages(daemon: Daemon) -> pa.Table:
    """Return `at`, the commit time of each transaction, and `age` until it was durable (s)."""
    store = open_store(str(daemon.folder / "lake"), None)
    layout = Layout(NAME)
    epochs = _read(store, layout.epochs, ["epoch", "committed_at"])
    durable_at = dict(zip(*(column.to_pylist() for column in epochs.columns), strict=True))
    columns = ["_cdc_op", "_cdc_ts", "_cdc_epoch"]
    parts = [_read(store, layout.raw(table), columns) for table in (LOAD, TICKS)]
    rows = pa.concat_tables(parts)
    rows = rows.filter(pc.is_in(rows.column("_cdc_op"), pa.array(["c", "u"])))
    at = rows.column("_cdc_ts").cast(pa.int64()).to_numpy() / 1e6
    ends = [durable_at[epoch].timestamp() for epoch in rows.column("_cdc_epoch").to_pylist()]
    return pa.table({"at": at, "age": np.array(ends) - at})


def _read(store: Store, folder: str, columns: list[str]) -> pa.Table:
    handle = DeltaTable(store.uri(folder), storage_options=store.storage_options)
    return read_files(handle, store, folder, columns=columns)


def _p99(ages: pa.Table, phase: Watcher) -> float:
    at = ages.column("at")
    inside = pc.and_(pc.greater_equal(at, phase.began_at), pc.less(at, phase.ended_at or 0.0))
    found = ages.filter(inside).column("age").to_numpy()
    return float(np.quantile(found, 0.99))
