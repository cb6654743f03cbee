"""Transactions over two tables are in a cut of the mirrors completely or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pyspark.sql import functions as f

from ingestd.testing.oracle.comparison import await_caught_up
from spark_jobs.epochs import read_at
from tests.harness.bank import TABLES, TOTAL, Bank
from tests.harness.compare import epochs
from tests.harness.config import wal_config
from tests.harness.mirror_job import MirrorRun
from tests.harness.mirrors import assert_mirrors_equal_source, cut_epochs, versions
from tests.harness.snapshots import ask_for_snapshot

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from spark_jobs.epochs import MirrorCut
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

SEED = 20261121
SAVINGS, CURRENT = map(str, TABLES)


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_the_total_over_two_tables_is_constant_at_every_cut(
    spark: SparkSession, database: Database, make_daemon: MakeDaemon, lake: Path, tmp_path: Path
) -> None:
    """While a table is re-read, the daemon is killed, and the job ends between its commits."""
    target = tmp_path / "mirror"
    daemon = make_daemon(
        wal_config(
            lake=lake,
            dsn=database.dsn,
            max_delay="500ms",
            source_extra=f'slot = "{database.name}"\npublication = "{database.name}"',
        )
    )
    bank = Bank(database.dsn, seed=SEED)
    bank.open()
    with bank:
        daemon.start_ready()
        # two mirrors and a cut, then one mirror: the other is behind when the job starts again
        with MirrorRun(lake, target, "--interval", "0.1", interrupt_after=4) as run:
            bank.await_transfers(50)
            ask_for_snapshot(daemon, SAVINGS)
            bank.await_transfers(50)
            daemon.sigkill()
            bank.await_transfers(50)
            daemon.start_ready()
            run.await_interrupted()
        with MirrorRun(lake, target, "--interval", "0.1") as run:
            cuts = len(cut_epochs(spark, target))
            run.await_until(lambda: len(cut_epochs(spark, target)) >= cuts + 2, "two more cuts")
            bank.__exit__()
            with database.connect() as connection:
                await_caught_up(connection, database.name)
            last = epochs(lake)[-1]["epoch"]
            run.await_until(lambda: cut_epochs(spark, target)[-1] >= last, "the last epoch")
    cut_at = {number: read_at(spark, str(target), number) for number in cut_epochs(spark, target)}
    assert len(cut_at) >= 3
    assert all(len(versions(cut_at, table)) >= 3 for table in TABLES)
    assert {number: total(cut) for number, cut in cut_at.items()} == dict.fromkeys(cut_at, TOTAL)
    assert_mirrors_equal_source(spark, database, lake, target, TABLES)


def total(cut: MirrorCut) -> int:
    both = cut[SAVINGS].select("balance").unionByName(cut[CURRENT].select("balance"))
    [row] = both.agg(f.sum("balance").alias("total")).collect()
    return int(row["total"])
