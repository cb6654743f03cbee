"""Backfills by Spark (docs/backfill.md); with threads for executors: tests/integration."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from ingestd.model.errors import TransientError
from ingestd.testing.embedded.daemon import module_environment
from spark_jobs.backfills.runner import SparkTasks
from tests.harness.backfill import backfill
from tests.harness.compare import (
    assert_change_log_is_sound,
    assert_lake_equals_source,
    registry,
)
from tests.harness.config import wal_config
from tests.harness.toast_writers import ToastWriters, create_big
from tests.harness.waiting import await_until
from tests.harness.workload import TABLES, Workload

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from spark_jobs.backfills.record import Note
    from spark_jobs.backfills.task import BackfillReader, Failure, SplitOrder
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 120
ROWS = 3_000
BIG = "public.big"


def config(database: Database, lake: Path) -> str:
    names = [f'slot = "{database.name}"', f'publication = "{database.name}"']
    return wal_config(
        lake=lake,
        dsn=f"{database.dsn} password={database.server.password}",
        source_extra="\n".join(names),
    )


def states(lake: Path) -> dict[str, str]:
    return {row["table"]: row["state"] for row in registry(lake)}


def notes(lake: Path) -> list[Path]:
    return list(lake.rglob("split-*.json"))


@pytest.mark.thorough
def test_i6_several_tables_under_writes(
    spark: SparkSession, workload_database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    """With keys and without, partitioned, empty, with odd names."""
    database = workload_database
    database.execute(
        "CREATE TABLE parts (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)",
        "CREATE TABLE parts_a PARTITION OF parts FOR VALUES FROM (0) TO (500)",
        "CREATE TABLE parts_b PARTITION OF parts DEFAULT",
        "INSERT INTO parts SELECT i, 'n' || i FROM generate_series(1, 1000) i",
        "CREATE TABLE nothing (id int PRIMARY KEY)",
    )
    daemon = make_daemon(config(database, lake))
    chosen = [f"public.{name}" for name in ("accounts", "documents", "events", "Ünï Tbl")]
    chosen += ["public.parts", "public.nothing"]
    with Workload(database.dsn, seed=6, transactions=10**6, limit_s=240, pause_s=0.02) as writers:
        await_until(lambda: writers.committed > 100, LIMIT_S)
        runner = SparkTasks(spark)
        outcome = backfill(daemon.config_path, "shop", chosen, runner=runner, split_bytes=50_000)
        assert sorted(str(f.table) for f in outcome.filled) == sorted(chosen)
        assert all(filled.is_live for filled in outcome.filled)
        before = writers.committed
        daemon.start()
        await_until(lambda: writers.committed > before + 50, LIMIT_S, daemon.tail)
    everything = [*chosen, *(f"public.{name}" for name in TABLES)]
    await_until(
        lambda: all(states(lake).get(t) == "live" for t in everything), LIMIT_S, daemon.tail
    )
    assert_lake_equals_source(database, lake, slot=database.name)
    assert_change_log_is_sound(database, lake)


def command(config_path: Path, *arguments: str) -> list[str]:
    fixed = ["--config", str(config_path), "--source", "shop", "--split-bytes", "200kB"]
    return [sys.executable, "-m", "spark_jobs.backfill", *fixed, *arguments]


@pytest.mark.long
def test_i3_i6_command_killed_and_run_again(
    database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    create_big(database, 2 * ROWS)
    daemon = make_daemon(config(database, lake))
    with ToastWriters(database, 2 * ROWS) as writers:
        with subprocess.Popen(
            command(daemon.config_path, BIG),
            env=module_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as first:
            await_until(lambda: len(notes(lake)) > 5 or first.poll() is not None, LIMIT_S)
            os.kill(first.pid, signal.SIGKILL)
            assert first.stdout is not None
            said = first.stdout.read().decode()
        assert states(lake) == {BIG: "snapshotting"}, said
        again = subprocess.run(
            command(daemon.config_path, BIG),
            env=module_environment(),
            capture_output=True,
            text=True,
            timeout=2 * LIMIT_S,
            check=False,
        )
        said += again.stdout + again.stderr
        assert again.returncode == 0, said
        assert "splits are done" in again.stdout
        assert "`ingestd run` completes it" in again.stdout
        before = writers.transactions
        daemon.start()
        await_until(lambda: states(lake)[BIG] == "live", LIMIT_S, daemon.tail)
        await_until(lambda: writers.transactions > before + 50, LIMIT_S)
    assert_lake_equals_source(database, lake, slot=database.name)
    assert_change_log_is_sound(database, lake)
    assert database.server.password not in said


def kill_workers() -> None:
    """Kill the Python workers of this process's Spark."""
    daemons: set[int] = set()
    for process in psutil.Process().children(recursive=True):  # parents first
        with suppress(psutil.NoSuchProcess):
            if "pyspark.daemon" in " ".join(process.cmdline()):
                daemons.add(process.pid)
                if process.ppid() in daemons:
                    process.kill()


class WithVictims(SparkTasks):
    """Workers are killed once some splits have been read, until the job has failed."""

    def __init__(self, spark: SparkSession, lake: Path) -> None:
        super().__init__(spark)
        self._lake = lake
        self._is_over = threading.Event()

    def run(self, reader: BackfillReader, orders: Sequence[SplitOrder]) -> list[Note | Failure]:
        with ThreadPoolExecutor(1) as pool:
            killing = pool.submit(self._kill)
            try:
                return super().run(reader, orders)
            finally:
                self._is_over.set()
                killing.result()

    def _kill(self) -> None:
        await_until(lambda: len(notes(self._lake)) > 3 or self._is_over.is_set(), LIMIT_S)
        while not self._is_over.wait(0.05):
            kill_workers()


@pytest.mark.long
def test_i6_a_killed_executor_costs_its_split(
    spark: SparkSession, database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    """A cluster retries a task, local mode does not: the command is run again."""
    create_big(database, 2 * ROWS)
    daemon = make_daemon(config(database, lake))
    with ToastWriters(database, 2 * ROWS):
        with pytest.raises(TransientError, match="Spark gave up a task") as caught:
            backfill(daemon.config_path, "shop", [BIG], runner=WithVictims(spark, lake))
        assert database.server.password not in str(caught.value)
        assert notes(lake)
        [filled] = backfill(daemon.config_path, "shop", [BIG], runner=SparkTasks(spark)).filled
        assert not filled.is_live
        daemon.start()
        await_until(lambda: states(lake)[BIG] == "live", LIMIT_S, daemon.tail)
    assert_lake_equals_source(database, lake, slot=database.name)
    assert_change_log_is_sound(database, lake)


@pytest.mark.spark_matrix
@pytest.mark.spark_few
def test_table_that_can_not_be_read_does_not_keep_others_from_it(
    spark: SparkSession, database: Database, make_daemon: MakeDaemon, lake: Path
) -> None:
    database.execute(
        "CREATE TABLE good (id int PRIMARY KEY)",
        "INSERT INTO good VALUES (1), (2)",
        "CREATE TABLE bad (id int PRIMARY KEY)",
        "INSERT INTO bad VALUES (0)",
        f"CREATE PUBLICATION {database.name} FOR TABLE good, TABLE bad WHERE (1 / id > 0)",
    )
    daemon = make_daemon(config(database, lake))
    chosen = ["public.good", "public.bad"]
    outcome = backfill(daemon.config_path, "shop", chosen, runner=SparkTasks(spark))
    assert [str(f.table) for f in outcome.filled] == ["public.good"]
    [error] = outcome.failed
    assert str(error).startswith("table public.bad: DivisionByZero, SQLSTATE 22012")
    assert states(lake) == {"public.good": "live", "public.bad": "snapshotting"}
