"""An incremental snapshot, killed at random points during writes: how much is read again."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from benchmarks.harness.rig import COLUMNS, LIMIT_S, ROW, Rig, config, source
from benchmarks.harness.writers import Writers
from ingestd.http.client import request_snapshot
from ingestd.lake.delta.read import read_files
from ingestd.lake.layout import Layout
from ingestd.lake.store.store import open_store
from ingestd.model.schema import TableId
from ingestd.testing.embedded.daemon import Daemon
from ingestd.testing.embedded.waiting import await_until

ROWS, KILLS, WORKERS, WRITES_PER_S = 2_000_000, 20, 2, 200
CHUNK_BYTES = 32_000_000
LIFE_S = (0.0, 2.5)
"""Time from its first query until it is killed."""
NAME = "resume"
TABLE = TableId("public", "load")
COMPARED = ("id", "customer", "score", "note")


def measure(rig: Rig) -> dict[str, float]:
    """Return, in chunks a worker: rows read but lost at a kill, and rows read twice overall.

    `wrong_rows`: differences between lake and source at the end.
    """
    rig.psql("DROP TABLE IF EXISTS load")
    rig.psql(f"CREATE TABLE load ({COLUMNS})")
    rig.psql(f"INSERT INTO load SELECT {ROW} FROM generate_series(1, {ROWS}) i")
    rig.psql("VACUUM ANALYZE load")
    nbytes = int(rig.psql("SELECT pg_table_size('load')"))
    chunk_rows = ROWS * CHUNK_BYTES / nbytes
    extra = {
        "snapshot_chunked_above": '"0"',
        "snapshot_chunk": f'"{CHUNK_BYTES}B"',
        "snapshot_workers": str(WORKERS),
    }
    text = config(source(NAME, rig.server.dsn(), str(TABLE), **extra))
    daemon = rig.daemon(NAME, text)
    rng = random.Random(20)
    lost: list[float] = []
    rounds = 1
    with Writers(rig, _write, WRITES_PER_S):
        for _ in range(KILLS):
            if _is_live(daemon):
                rounds += 1
                daemon.start_ready(LIMIT_S)
                request_snapshot(daemon.listen, NAME, [str(TABLE)])
                await_until(lambda: not _is_live(daemon), LIMIT_S, "the snapshot to begin")
            before = _rows_read(rig), _rows_kept(daemon)
            daemon.start()
            await_until(lambda: _is_reading(rig, daemon), LIMIT_S, "the snapshot to continue")
            time.sleep(rng.uniform(*LIFE_S))
            daemon.sigkill()
            await_until(lambda: not _sessions(rig), LIMIT_S, "its sessions to end")
            read, kept = _rows_read(rig) - before[0], _rows_kept(daemon) - before[1]
            lost.append(max(0.0, read - kept) / chunk_rows / WORKERS)
        daemon.start_ready(LIMIT_S)
    rig.await_confirmed(f"ingestd_{NAME}", rig.lsn())
    again = (_rows_read(rig) - rounds * ROWS) / chunk_rows / WORKERS / KILLS
    wrong = _wrong_rows(rig, daemon)
    daemon.sigterm()
    rig.forget(NAME)
    rig.psql("DROP TABLE load")
    return {
        "lost_mean": sum(lost) / len(lost),
        "lost_max": max(lost),
        "again_mean": again,
        "rounds": rounds,
        "chunk_rows": chunk_rows,
        "wrong_rows": wrong,
    }


def _write(connection: psycopg.Connection[tuple[Any, ...]], rng: random.Random) -> None:
    key = rng.randrange(1, ROWS)
    what = rng.randrange(10)
    if what == 0:
        connection.execute("DELETE FROM load WHERE id = %s", [key])
    elif what == 1:
        values = [ROWS + rng.randrange(1 << 40), key]
        connection.execute("INSERT INTO load (id, customer) VALUES (%s, %s)", values)
    else:
        connection.execute("UPDATE load SET score = %s WHERE id = %s", [rng.random(), key])


# --- queries on the server -------------------------------------------------------------------


def _rows_read(rig: Rig) -> int:
    """Return the rows that block scans have returned; sessions report theirs when they end."""
    return int(
        rig.psql("SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 'load'").strip()
    )


_OURS = "backend_type = 'client backend' AND application_name = 'ingestd'"


def _is_reading(rig: Rig, daemon: Daemon) -> bool:
    """Return whether it reads, or has read all. Raise RuntimeError if the daemon ended."""
    if not daemon.is_running:
        raise RuntimeError(daemon.tail())
    is_reading = _count(rig, f"{_OURS} AND state = 'active' AND query LIKE 'COPY (%'") > 0
    return is_reading or _is_live(daemon)


def _sessions(rig: Rig) -> bool:
    return _count(rig, _OURS) > 0


def _count(rig: Rig, condition: str) -> int:
    with rig.server.connect() as connection:
        query = f"SELECT count(*) FROM pg_stat_activity WHERE {condition}"
        [count] = connection.execute(query.encode()).fetchone() or [0]
    return int(count)


# --- data from the lake ----------------------------------------------------------------------


def _rows_kept(daemon: Daemon) -> int:
    """Return the number of snapshot rows in the lake, of all rounds."""
    rows = _raw(daemon, ["_cdc_op"])
    return 0 if rows is None else rows.column("_cdc_op").to_pylist().count("r")


def _raw(daemon: Daemon, columns: list[str]) -> pa.Table | None:
    store = open_store(str(daemon.folder / "lake"), None)
    folder = Layout(NAME).raw(TABLE)
    try:
        handle = DeltaTable(store.uri(folder), storage_options=store.storage_options)
    except TableNotFoundError:
        return None
    return read_files(handle, store, folder, columns=columns)


def _is_live(daemon: Daemon) -> bool:
    """Return whether the table's snapshot is complete, according to the lake."""
    store = open_store(str(daemon.folder / "lake"), None)
    folder = Layout(NAME).tables
    try:
        handle = DeltaTable(store.uri(folder), storage_options=store.storage_options)
    except TableNotFoundError:
        return False
    events = read_files(handle, store, folder, columns=["at", "state"]).sort_by("at").to_pylist()
    return bool(events) and events[-1]["state"] == "live"


def _wrong_rows(rig: Rig, daemon: Daemon) -> int:
    """Return the number of rows that only the lake or only the source has."""
    rows = _raw(daemon, [*COMPARED, "_cdc_op", "_cdc_lsn", "_cdc_seq"])
    assert rows is not None
    lake = _folded(rows)
    query = f"COPY (SELECT {', '.join(COMPARED)} FROM load ORDER BY id) TO STDOUT (FORMAT csv)"
    with rig.server.connect() as connection, _copied(connection, query) as text:
        types = {field.name: field.type for field in lake.schema}
        there = pa.csv.read_csv(
            pa.BufferReader(text),
            read_options=pa.csv.ReadOptions(column_names=list(COMPARED)),
            convert_options=pa.csv.ConvertOptions(column_types=types, strings_can_be_null=True),
        )
    if lake.equals(there):
        return 0
    both: int = lake.join(there, list(COMPARED), join_type="inner").num_rows
    rows_of_both: int = lake.num_rows + there.num_rows
    return rows_of_both - 2 * both


@contextlib.contextmanager
def _copied(connection: psycopg.Connection[tuple[Any, ...]], query: str) -> Iterator[bytes]:
    with connection.cursor() as cursor, cursor.copy(query.encode()) as copy:
        yield b"".join(copy)


def _folded(rows: pa.Table) -> pa.Table:
    """Return the newest row of each key above the last `t`, by key; without key changes, TOAST."""
    position = [("_cdc_lsn", "ascending"), ("_cdc_seq", "ascending")]
    rows = rows.take(pc.sort_indices(rows, [("id", "ascending"), *position]))
    marks = rows.filter(pc.equal(rows.column("_cdc_op"), "t"))
    void = pc.max(marks.column("_cdc_lsn")).as_py() or 0
    rows = rows.filter(
        pc.and_(
            pc.greater_equal(rows.column("_cdc_lsn"), void),
            pc.not_equal(rows.column("_cdc_op"), "t"),
        )
    )
    keys = rows.column("id").to_numpy()
    is_last = np.append(keys[1:] != keys[:-1], True)
    rows = rows.filter(pa.array(is_last))
    return rows.filter(pc.not_equal(rows.column("_cdc_op"), "d")).select(COMPARED).combine_chunks()
