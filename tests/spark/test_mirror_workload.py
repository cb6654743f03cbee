"""Mirrors equal their source, and every cut the lake at its epoch, whatever happens to whom."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from ingestd.model.schema import TableId
from ingestd.testing.oracle.comparison import await_caught_up
from spark_jobs.epochs import read_at
from tests.harness.compare import epochs, registry
from tests.harness.config import wal_config
from tests.harness.mirror_job import MirrorProcess, MirrorRun
from tests.harness.mirrors import (
    assert_cut_is_the_fold,
    assert_mirrors_equal_source,
    cut_epochs,
)
from tests.harness.snapshots import ask_for_snapshot
from tests.harness.waiting import await_until
from tests.harness.workload import TABLES, Workload

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from ingestd.testing.embedded.daemon import Daemon
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

LIMIT_S = 600
SEED = 20261121
STEADY = [TableId("public", name) for name in TABLES]
"""Written to by the workload; their columns stay."""
ALTERED, PARTED, GONE, LATE = (
    TableId("public", name) for name in ("altered", "parted", "gone", "late")
)
SCHEMA = (
    "CREATE TABLE altered (id int PRIMARY KEY, note text, n int)",
    "CREATE TABLE parted (id int, note text, n int, PRIMARY KEY (id)) PARTITION BY HASH (id)",
    "CREATE TABLE parted_0 PARTITION OF parted FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
    "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
    "CREATE TABLE gone (id int PRIMARY KEY, note text, n int)",
)
COLUMNS_WITH_DEFAULTS = (
    "ALTER TABLE altered ADD extra int DEFAULT 5, ADD label text NOT NULL DEFAULT 'ä b'",
    "ALTER TABLE parted ADD rate float8 DEFAULT 0.1",
)
OTHER_TYPE = ("ALTER TABLE altered ALTER n TYPE text",)
MAKE_LATE = "CREATE TABLE late (id int PRIMARY KEY, note text, n int)"
CHURN = (
    """INSERT INTO {t} (id, note, n) SELECT i, 'new', i FROM generate_series(1, 20) i
       ON CONFLICT (id) DO UPDATE SET note = excluded.note, n = excluded.n""",
    "UPDATE {t} SET note = 'changed' WHERE id % 3 = 0",
    "DELETE FROM {t} WHERE id > 100 OR id % 5 = 0",
    "UPDATE {t} SET id = id + 100 WHERE id % 7 = 0",
)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_mirrors_equal_their_source_after_kills_and_ddl(
    spark: SparkSession,
    workload_database: Database,
    make_daemon: MakeDaemon,
    lake: Path,
    tmp_path: Path,
) -> None:
    """The job is killed and interrupted, the daemon killed, tables are re-read and altered."""
    database, target = workload_database, tmp_path / "mirror"
    rng = random.Random(SEED)
    database.execute(*SCHEMA)
    daemon = make_daemon(
        wal_config(
            lake=lake,
            dsn=database.dsn,
            max_delay="500ms",
            source_extra=f'slot = "{database.name}"\npublication = "{database.name}"\n'
            'discover_interval = "1s"',
        )
    )
    workload = Workload(
        database.dsn, seed=SEED, sessions=2, transactions=1_000_000, limit_s=600, pause_s=0.1
    )
    with workload:
        churn(database, ALTERED, PARTED, GONE)
        daemon.start_ready(LIMIT_S)
        # the first load, killed; its JVM needs its time to start
        with MirrorProcess(lake, target, tmp_path, "--interval", "0.1") as process:
            churn(database, ALTERED, PARTED, GONE)
            database.execute(*COLUMNS_WITH_DEFAULTS)
            kill_and_restart(daemon)
            churn(database, ALTERED, PARTED)
            process.await_commits(rng.randint(1, len(STEADY)))
            process.sigkill()
        with mirroring(lake, target, interrupt_after=12) as run:
            database.execute(*OTHER_TYPE, "DROP TABLE gone", MAKE_LATE)
            churn(database, ALTERED, PARTED, LATE)
            ask_for_snapshot(daemon, *map(str, STEADY[:3]))
            kill_and_restart(daemon)
            churn(database, ALTERED, PARTED, LATE)
            run.await_interrupted()
        with mirroring(lake, target) as run:
            workload.stop()
            await_settled(database, daemon, lake)
            last = epochs(lake)[-1]["epoch"]
            run.await_until(lambda: (cut_epochs(spark, target) or [0])[-1] >= last, "the end")
            run.await_until(lambda: is_in_cut(spark, target, LATE), "the table made late")
    cuts = [read_at(spark, str(target), number) for number in cut_epochs(spark, target)]
    assert_mirrors_equal_source(spark, database, lake, target, [*STEADY, ALTERED, PARTED, LATE])
    for cut in rng.sample(cuts, min(3, len(cuts))):
        assert_cut_is_the_fold(database, lake, cut, STEADY)
    assert workload.committed > 100


def mirroring(lake: Path, target: Path, *, interrupt_after: int | None = None) -> MirrorRun:
    return MirrorRun(lake, target, "--interval", "0.1", interrupt_after=interrupt_after)


def churn(database: Database, *tables: TableId) -> None:
    """Insert, update, renumber and delete rows of these tables."""
    for table in tables:
        database.execute(*(statement.replace("{t}", str(table)) for statement in CHURN))


def kill_and_restart(daemon: Daemon) -> None:
    daemon.sigkill()
    daemon.start_ready(LIMIT_S)


def await_settled(database: Database, daemon: Daemon, lake: Path) -> None:
    """Wait until the daemon has seen every table and read what it wants to."""

    def is_settled() -> bool:
        last = {row["table"]: row["state"] for row in registry(lake)}
        return last.get(str(LATE)) == "live" and set(last.values()) <= {"live", "dropped"}

    await_until(is_settled, LIMIT_S, lambda: f"all tables live\n{daemon.tail()}")
    with database.connect() as connection:
        await_caught_up(connection, database.name, LIMIT_S)


def is_in_cut(spark: SparkSession, target: Path, table: TableId) -> bool:
    return str(table) in read_at(spark, str(target), cut_epochs(spark, target)[-1])
