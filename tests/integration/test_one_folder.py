"""What is put into one table's folder neither stops the other tables nor ends the process (I8)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from ingestd.lake.maintenance.compaction import MaintenancePolicy
from ingestd.lake.maintenance.process import MaintenanceProcess
from ingestd.testing.embedded.waiting import await_until
from tests.harness.config import polling_config, wal_config
from tests.harness.hostile_folder import (
    SCHEMA,
    add,
    commit_of,
    deep_commits,
    deep_parquet,
    ids_in,
    newest_version,
    plant_checkpoint,
    plant_commit,
    quoting_commits,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("lake writer")

_THOROUGH = pytest.mark.thorough
FAR = (1 << 63) - 1
DEEP_COMMIT = dict(deep_commits(200_000))["tags of lists"]


def config_of(kind: str, database: Database, lake: Path) -> str:
    name = f"ingestd_{database.name}"
    if kind == "wal":
        source = f'slot = "{name}"\npublication = "{name}"\n'
        return wal_config(lake=lake, dsn=database.dsn, source_extra=source)
    return polling_config(lake=lake, dsn=database.dsn)


def started(
    database: Database, lake: Path, make_daemon: MakeDaemon, kind: str = "polling"
) -> Daemon:
    """Return a daemon with two tables whose rows are in the lake."""
    for name in ("good", "bad"):
        database.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY)", f"INSERT INTO {name} VALUES (1)"
        )
    daemon = make_daemon(config_of(kind, database, lake))
    daemon.start_ready()
    await_until(lambda: 1 in ids_in(lake, "bad") & ids_in(lake), 30, daemon.tail)
    return daemon


def log_of(lake: Path, table: str = "bad") -> Path:
    return lake / "shop" / "public" / table / "_delta_log"


def await_good(daemon: Daemon, lake: Path, row: int, limit_s: float = 40) -> None:
    await_until(lambda: row in ids_in(lake) or not daemon.is_running, limit_s, daemon.tail)
    assert daemon.is_running, daemon.tail()[-1500:]


@pytest.mark.parametrize("depth", [pytest.param(100, marks=pytest.mark.thorough), 5_000])
def test_a_daemon_survives_a_deep_checkpoint(
    database: Database, lake: Path, make_daemon: MakeDaemon, depth: int
) -> None:
    daemon = started(database, lake, make_daemon)
    daemon.sigterm()
    plant_checkpoint(log_of(lake), deep_parquet(depth))
    daemon.start()
    database.execute("INSERT INTO good VALUES (2)")
    await_good(daemon, lake, 2)


@pytest.mark.parametrize("when", ["at a start", "while it runs"])
def test_a_daemon_survives_a_deep_commit(
    database: Database, lake: Path, make_daemon: MakeDaemon, when: str
) -> None:
    daemon = started(database, lake, make_daemon)
    if when == "at a start":
        daemon.sigterm()
    plant_commit(log_of(lake), DEEP_COMMIT)
    if when == "at a start":
        daemon.start()
    database.execute("INSERT INTO good VALUES (2)", "INSERT INTO bad VALUES (2)")
    await_until(
        lambda: not daemon.is_running or bool(daemon.events("table.stopped")), 40, daemon.tail
    )
    await_good(daemon, lake, 2)
    database.execute("INSERT INTO good VALUES (3)")
    await_good(daemon, lake, 3, 75)


@pytest.mark.parametrize(
    "text", ["(os error 28)", pytest.param("request timed out", marks=pytest.mark.thorough)]
)
def test_a_quoted_fault_stops_one_table(
    database: Database, lake: Path, make_daemon: MakeDaemon, text: str
) -> None:
    daemon = started(database, lake, make_daemon)
    daemon.sigterm()
    plant_commit(log_of(lake), quoting_commits(text)["a reader feature"])
    database.execute("INSERT INTO good VALUES (2)")
    daemon.start()
    await_good(daemon, lake, 2)


def _add_void(log: Path) -> None:
    schema = {"type": "struct", "fields": [{**SCHEMA["fields"][0], "name": "x", "type": "void"}]}
    lines = [line for path in log.glob("*.json") for line in path.read_text().splitlines()]
    made = next(action for action in map(json.loads, lines) if "metaData" in action)
    fields = json.loads(made["metaData"]["schemaString"])["fields"]
    schema["fields"] = [*fields, *schema["fields"]]
    made["metaData"]["schemaString"] = json.dumps(schema)
    plant_commit(log, commit_of([{"commitInfo": {"operation": "ADD COLUMNS"}}, made]))


def _end_at_the_last_version(log: Path) -> None:
    DeltaTable(log.parent).create_checkpoint()
    [made] = log.glob("*.checkpoint.parquet")
    made.rename(log / f"{FAR:020}.checkpoint.parquet")
    (log / "_last_checkpoint").write_text(json.dumps({"version": FAR, "size": 3}))
    for path in log.glob("*.json"):
        path.unlink()


def _tear_many(log: Path) -> None:
    first = newest_version(log) + 1
    for number in range(first, first + 2_000):
        (log / f"{number:020}.json").write_text("{")


PLANTED: dict[str, Callable[[Path], None]] = {
    "a loop": lambda log: (log / ".x").symlink_to("."),
    "a pipe without a text as name": lambda log: os.mkfifo(os.fsencode(log) + b"/\xff\xfe"),
    "a type without a name": _add_void,
    "the last version": _end_at_the_last_version,
    "incomplete commits": _tear_many,
}


@pytest.mark.parametrize("when", ["at a start", pytest.param("running", marks=_THOROUGH)])
@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_planted_in_a_log_stops_one_table(
    database: Database, lake: Path, make_daemon: MakeDaemon, kind: str, when: str
) -> None:
    daemon = started(database, lake, make_daemon, "wal")
    if when == "at a start":
        daemon.sigterm()
    PLANTED[kind](log_of(lake))
    if when == "at a start":
        daemon.start()
    else:  # which makes it open the log
        database.execute("ALTER TABLE bad ADD COLUMN v int")
    database.execute("INSERT INTO bad (id) VALUES (2)", "INSERT INTO good VALUES (2)")
    await_good(daemon, lake, 2)
    assert not daemon.events("source.failed")
    await_until(lambda: bool(daemon.events("table.stopped")), 40, daemon.tail)


def forge(lake: Path, kind: str) -> None:
    """Put files with a number that Python or Arrow can't hold into the next epoch."""
    folder, log = log_of(lake).parent, log_of(lake)
    lines = [
        line
        for path in sorted(log.glob("*.json"), reverse=True)
        for line in path.read_text().splitlines()
    ]
    newest = next(json.loads(line)["add"] for line in lines if '"add"' in line)
    stats = json.loads(newest["stats"])
    epochs = DeltaTable(lake / "shop" / "_epochs").to_pyarrow_table()
    number = max(n for n in epochs["epoch"].to_pylist() if n is not None)
    if kind == "time":
        actions = [add(modificationTime=FAR)]
    else:
        for bounds in ("minValues", "maxValues"):
            stats[bounds]["_cdc_epoch"] = number + 1
        stats["numRecords"] = 1 << 62
        actions = [add(f"part-{i}.parquet", stats=json.dumps(stats)) for i in range(3)]
    for action in actions:
        (folder / action["add"]["path"]).write_bytes((folder / newest["path"]).read_bytes())
        action["add"]["size"] = newest["size"]
    plant_commit(log, commit_of(actions))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["time", "count"])
@pytest.mark.parametrize("source", ["wal", "polling"])
def test_a_forged_number_stops_one_table(
    database: Database, lake: Path, make_daemon: MakeDaemon, kind: str, source: str
) -> None:
    daemon = started(database, lake, make_daemon, source)
    database.execute("INSERT INTO bad VALUES (2)")
    await_until(lambda: 2 in ids_in(lake, "bad"), 20, "the second row of bad")
    daemon.sigterm()
    forge(lake, kind)
    database.execute("INSERT INTO good VALUES (2)")
    daemon.start()
    await_good(daemon, lake, 2)
    database.execute("INSERT INTO good VALUES (3)")
    await_good(daemon, lake, 3)


def test_a_pasted_remedy_resnapshots_a_polled_table(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    """Its keys can't be read, so that polls pause; a request ends the pause."""
    daemon = started(database, lake, make_daemon)
    daemon.sigterm()
    for path in log_of(lake).parent.glob("*.parquet"):
        path.write_bytes(b"no Parquet")
    daemon.start()
    database.execute("INSERT INTO bad VALUES (2)")
    await_until(lambda: bool(daemon.events("table.stopped")), 40, daemon.tail)
    remedy = daemon.events("table.stopped")[-1]["remedy"]
    command = remedy[remedy.index("mv ") :]
    url = f"--url http://{daemon.listen}"
    done = subprocess.run(
        ["bash", "-c", f"{command} {url}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, (command, done.stderr, daemon.tail())
    assert ids_in(lake, "bad") >= {1, 2}


async def test_maintenance_continues_after_a_deep_commit(
    database: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = started(database, lake, make_daemon)
    for number in range(2, 6):
        for name in ("bad", "good"):  # maintained in this order
            database.execute(f"INSERT INTO {name} VALUES ({number})")
        await_until(lambda n=number: n in ids_in(lake, "bad") & ids_in(lake), 20, daemon.tail)  # type: ignore[misc]
    daemon.sigterm()
    assert newest_version(log_of(lake)) > 0
    plant_commit(log_of(lake), DEEP_COMMIT)
    process = MaintenanceProcess(str(lake), "shop", MaintenancePolicy(64 << 20, 3600.0))
    found = {done.table: done async for done in process.run(joins=True, cleans=True)}
    assert found["public.bad"].error is not None
    assert found["public.good"].error is None
    assert found["public.good"].small_files == 5
