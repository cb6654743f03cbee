"""`ingestd run --once`, and the same as a library: up to now, then the end."""

from __future__ import annotations

import asyncio
import logging
import runpy
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import pytest
from deltalake import DeltaTable
from psycopg.conninfo import conninfo_to_dict

from ingestd import Capture, CapturedEpoch
from ingestd.model.errors import OperatorError
from ingestd.model.schema import TableId
from ingestd.testing.embedded.ports import free_port
from ingestd.testing.oracle.comparison import compare_source
from tests.harness.command_line import run_command
from tests.harness.config import polling_config, wal_config
from tests.harness.source_code import ROOT
from tests.harness.waiting import await_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 90
KINDS = pytest.mark.parametrize("kind", ["wal", "polling"])
T = TableId("public", "t")


def config(kind: str, database: Database, lake: Path, extra: str = "") -> str:
    if kind == "polling":
        return polling_config(
            lake=lake, dsn=database.dsn, interval="1h", max_delay="1h", extra=extra
        )
    names = f'slot = "{database.name}"\npublication = "{database.name}"\n'
    return wal_config(lake=lake, dsn=database.dsn, source_extra=names, max_delay="1h", extra=extra)


@pytest.fixture
def rows(database: Database) -> Database:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        "INSERT INTO t SELECT n, 'a' FROM generate_series(1, 100) n",
    )
    return database


def assert_complete(database: Database, lake: Path) -> None:
    """Compare at once: nothing runs any more."""
    with database.connect() as connection:
        found = compare_source(connection, str(lake), "shop")
    assert found
    assert all(c.is_equal for c in found), "\n".join(map(str, found))


@KINDS
def test_each_run_delivers_what_was_committed_before(
    rows: Database, lake: Path, make_daemon: MakeDaemon, kind: str
) -> None:
    daemon = make_daemon(config(kind, rows, lake))
    changes = ("SELECT", "UPDATE t SET note = 'b' WHERE id < 50", "SELECT")
    for number, change in enumerate(changes):
        rows.execute(change, f"CREATE TABLE n{number} (id int PRIMARY KEY)")
        rows.execute(f"INSERT INTO n{number} VALUES (1)")
        daemon.start("--once")
        assert daemon.await_end(LIMIT_S) == 0, daemon.tail()
        assert daemon.events("source.drained")
        assert_complete(rows, lake)


def test_reference_tables_are_current_at_the_end(
    rows: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    sections = [
        f'[sources.shop.table."public.{name}"]\nreference = "{kind}"'
        for name, kind in (("t", "snapshot_plus_cdc"), ("u", "snapshot_only"))
    ]
    rows.execute("CREATE TABLE u (id int PRIMARY KEY)", "INSERT INTO u VALUES (1)")
    daemon = make_daemon(config("wal", rows, lake, "\n".join(sections)))
    for number in (2, 3):
        rows.execute(f"INSERT INTO u VALUES ({number})", f"UPDATE t SET note = '{number}'")
        daemon.start("--once")
        assert daemon.await_end(LIMIT_S) == 0, daemon.tail()
        for name, count in (("t", 100), ("u", number)):
            found = DeltaTable(lake / "shop" / "_ref" / "public" / name).to_pyarrow_table()
            assert found.num_rows == count
        assert set(found_notes(lake)) == {str(number)}


def found_notes(lake: Path) -> list[str]:
    table = DeltaTable(lake / "shop" / "_ref" / "public" / "t").to_pyarrow_table()
    return [str(note) for note in table["note"].to_pylist()]


@pytest.mark.parametrize("kind", ["wal", pytest.param("polling", marks=pytest.mark.thorough)])
def test_a_stopped_table_shows_in_the_exit_code(
    rows: Database, lake: Path, make_daemon: MakeDaemon, kind: str
) -> None:
    rows.execute("CREATE TABLE bad (id int PRIMARY KEY, n text)", "INSERT INTO bad VALUES (1, '')")
    daemon = make_daemon(config(kind, rows, lake))
    daemon.start("--once")
    assert daemon.await_end(LIMIT_S) == 0, daemon.tail()
    for path in (lake / "shop" / "public" / "bad" / "_delta_log").iterdir():
        path.write_text("{")
    rows.execute("UPDATE bad SET n = 'x'", "UPDATE t SET note = 'x'")
    daemon.start("--once")
    assert daemon.await_end(LIMIT_S) == 1, daemon.tail()
    assert "table public.bad is stopped" in daemon.tail()
    with rows.connect() as connection:
        [found] = compare_source(connection, str(lake), "shop", [T])
    assert found.is_equal


def test_a_paused_source_ends_at_once(rows: Database, lake: Path, make_daemon: MakeDaemon) -> None:
    daemon = make_daemon(config("wal", rows, lake))
    daemon.start("--once")
    assert daemon.await_end(LIMIT_S) == 0, daemon.tail()
    assert run_command(daemon.config_path, "pause", "shop").returncode == 0
    daemon.start("--once")
    assert daemon.await_end(LIMIT_S) == 1, daemon.tail()
    assert "is paused since" in daemon.tail()


def test_a_server_that_is_away_can_be_retried(
    rows: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    there = conninfo_to_dict(rows.dsn)["port"]
    away = config("wal", rows, lake).replace(f"{there}", str(free_port()))
    daemon = make_daemon(away)
    daemon.start("--once")
    assert daemon.await_end(LIMIT_S) == 75, daemon.tail()


def test_an_interrupted_run_can_be_retried(
    rows: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    daemon = make_daemon(config("wal", rows, lake))
    with rows.connect() as connection:
        connection.execute("BEGIN")
        connection.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        daemon.start("--once")
        await_until(lambda: bool(daemon.events("daemon.started")), LIMIT_S, daemon.tail)
        assert daemon.sigterm() == 75, daemon.tail()
    daemon.start("--once")
    assert daemon.await_end(LIMIT_S) == 0, daemon.tail()
    assert_complete(rows, lake)


class _Result:
    def __init__(self, metadata: dict[str, int]) -> None:
        self.metadata = metadata

    def __class_getitem__(cls, _: object) -> type[Self]:
        return cls


# --- as a library ---------------------------------------------------------------------------------


@KINDS
async def test_a_program_iterates_over_epochs(
    rows: Database, lake: Path, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(config(kind, rows, lake))
    counts = dict.fromkeys(range(2), 0)
    for number in counts:
        async with Capture(path, once=True) as capture:
            async for epoch in capture:
                assert epoch.source == "shop"
                counts[number] += epoch.rows.get(T, 0)
        assert_complete(rows, lake)
        await asyncio.to_thread(rows.execute, "UPDATE t SET note = 'b' WHERE id <= 10")
    assert counts == {0: 101, 1: 10}  # with the marker of the snapshot


def test_deleted_rows_of_a_polled_table_are_swept(
    rows: Database, lake: Path, make_daemon: MakeDaemon
) -> None:
    sweeps = '[sources.shop.table."public.t"]\ndetect_deletes = "1s"'
    daemon = make_daemon(config("polling", rows, lake, sweeps))
    for bound in (0, 10, 20):
        rows.execute(f"DELETE FROM t WHERE id < {bound}")
        daemon.start("--once")
        assert daemon.await_end(LIMIT_S) == 0, daemon.tail()
        assert_complete(rows, lake)


async def test_a_stopped_iteration_leaves_nothing_running(
    rows: Database, lake: Path, tmp_path: Path
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(config("wal", rows, lake).replace('"1h"', '"100ms"'))
    before = asyncio.all_tasks()
    found: list[CapturedEpoch] = []
    async with asyncio.timeout(LIMIT_S), Capture(path) as capture:
        async for epoch in capture:
            found.append(epoch)
            assert capture.status["sources"]["shop"]["epoch"] >= epoch.number
            if len(found) == 2:
                capture.stop()
            await asyncio.to_thread(rows.execute, "UPDATE t SET note = 'c' WHERE id = 1")
    assert asyncio.all_tasks() == before
    assert [epoch.number for epoch in found] == list(range(1, len(found) + 1))


async def test_a_fault_is_raised_where_epochs_are_awaited(
    rows: Database, lake: Path, tmp_path: Path
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(config("wal", rows, lake).replace(f"dbname={rows.name}", "dbname=no_such"))
    for once in (False, True):
        async with asyncio.timeout(LIMIT_S), Capture(path, once=once) as capture:
            with pytest.raises(OperatorError, match="no_such"):
                await anext(capture)


def test_the_dagster_asset_reports_the_rows(
    rows: Database, lake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster is not installed: a stand-in takes what the asset returns."""
    dagster: Any = ModuleType("dagster")
    dagster.asset = lambda **_: lambda function: function
    dagster.MaterializeResult = _Result
    dagster.AssetExecutionContext = object
    dagster.RetryRequested = RuntimeError
    dagster.Definitions = dagster.ScheduleDefinition = lambda *_, **__: None
    monkeypatch.setitem(sys.modules, "dagster", dagster)
    path = tmp_path / "config.toml"
    path.write_text(config("wal", rows, lake))
    monkeypatch.setenv("INGESTD_CONFIG", str(path))
    asset = runpy.run_path(str(ROOT / "deploy" / "dagster_assets.py"))["raw_tables"]
    context = SimpleNamespace(log=logging.getLogger("dagster"))
    assert asset(context).metadata == {"shop/public.t": 101}
    rows.execute("DELETE FROM t WHERE id <= 7")
    assert asset(context).metadata == {"shop/public.t": 7}


def test_a_program_that_configures_no_logging_prints_nothing(
    rows: Database, lake: Path, tmp_path: Path
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(config("wal", rows, lake))
    program = f"""
import asyncio, ingestd
async def main():
    async with ingestd.Capture({str(path)!r}, once=True) as capture:
        async for epoch in capture:
            assert epoch.rows
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
