"""Data files of some kB with millions of rows, in one table's folder: memory stays bounded (I8)."""

from __future__ import annotations

import json
import resource
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingestd.lake.maintenance.compaction import MaintenancePolicy
from ingestd.lake.maintenance.process import MaintenanceProcess
from ingestd.testing.embedded.waiting import await_until
from tests.harness.bystander import GOOD, config_for, ids_in, peak_mb
from tests.harness.compare import epochs
from tests.harness.hostile_folder import add, commit_of, plant_commit

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("lake writer")

LIMIT_MB = 64 + 200
ADDRESSES_BYTES = 12 << 30
"""Bounds the harm that a failing test does."""


def started(database: Database, lake: Path, make_daemon: MakeDaemon) -> Daemon:
    """Return a daemon with two tables, of both of which it has committed changes."""
    database.execute(*GOOD, "CREATE TABLE bad (id int PRIMARY KEY)", "INSERT INTO bad VALUES (1)")
    more = '[limits]\nmemory = "64MB"\n'
    daemon = make_daemon(config_for("wal", database, lake, more=more))
    daemon.start_ready()
    await_until(lambda: 1 in ids_in(lake, "bad") & ids_in(lake), 30, daemon.tail)
    database.execute("INSERT INTO good VALUES (2)", "INSERT INTO bad VALUES (2)")
    await_until(lambda: 2 in ids_in(lake, "bad") & ids_in(lake), 30, daemon.tail)
    return daemon


def actions_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the actions of a kind in a table's log, newest first."""
    commits = sorted((folder / "_delta_log").glob("*.json"), reverse=True)
    lines = [json.loads(line) for path in commits for line in path.read_text().splitlines()]
    return [line[kind] for line in lines if kind in line]


@pytest.mark.thorough
def test_a_start_with_a_small_file_of_many_rows(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """The rows of an unfinished epoch are counted by reading, as the log has no statistics."""
    daemon = started(database, lake, make_daemon)
    daemon.sigterm()
    folder = lake / "shop" / "public" / "bad"
    last = epochs(lake)[-1]
    like = pq.read_schema(folder / actions_of(folder, "add")[0]["path"])
    values = {"_cdc_epoch": last["epoch"] + 1, "_cdc_lsn": last["end_lsn"], "_cdc_ts": 0}
    schema = pa.schema([like.field(name) for name in values])
    columns = [pa.repeat(pa.scalar(v, pa.int64()), 1_000_000) for v in values.values()]
    rows = pa.table([c.cast(f.type) for c, f in zip(columns, schema, strict=True)], schema)
    path = folder / f"part-{0:032}.parquet"
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for _ in range(100):
            writer.write_table(rows)
    assert path.stat().st_size < 2 << 20
    own = next(i["ingestdWriter"] for i in actions_of(folder, "commitInfo") if "ingestdWriter" in i)
    info = {"ingestdCommit": "0" * 32, "ingestdWriter": own, "timestamp": 1}
    made = [
        {"commitInfo": info},
        {"txn": actions_of(folder, "txn")[0] | {"version": last["end_lsn"]}},
        add(path.name, size=path.stat().st_size, dataChange=True),
    ]
    plant_commit(folder / "_delta_log", commit_of(made))
    daemon.start()
    database.execute("INSERT INTO good VALUES (3)")
    await_until(lambda: 3 in ids_in(lake) or not daemon.is_running, 60, daemon.tail)
    assert daemon.is_running
    assert peak_mb(daemon) < LIMIT_MB


def peak_of_children_mb() -> int:
    """Return the highest peak of all children that have ended."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10


@pytest.mark.thorough
async def test_maintenance_of_small_files_with_long_texts(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """Nine files in each of which a dictionary repeats one text a million times: 2 GB of rows."""
    started(database, lake, make_daemon).sigterm()
    folder = lake / "shop" / "public" / "bad"
    number = 1_000_000
    column = pa.DictionaryArray.from_arrays(
        pa.repeat(pa.scalar(0, pa.int32()), number), ["x" * 2_000]
    )
    actions = []
    for n in range(9):
        path = folder / f"part-{n:032}.parquet"
        pq.write_table(pa.table({"_cdc_op": column}), path, compression="zstd", store_schema=False)
        size = path.stat().st_size
        assert size < 1_000_000
        actions.append(add(path.name, size=size, stats=json.dumps({"numRecords": number})))
    plant_commit(folder / "_delta_log", commit_of(actions))
    before, earlier = resource.getrlimit(resource.RLIMIT_AS), peak_of_children_mb()
    process = MaintenanceProcess(str(lake), "shop", MaintenancePolicy(64 << 20, 3600.0))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES_BYTES, before[1]))
    try:
        found = {done.table: done async for done in process.run(joins=True, cleans=True)}
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert found["public.good"].error is None
    peak = peak_of_children_mb()
    assert peak < 1_000 or peak == earlier, (peak, found["public.bad"].error)
