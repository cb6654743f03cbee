"""What the driver reads of a lake's own tables is what Spark reads of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ingestd.testing.oracle.comparison import await_caught_up
from spark_jobs.accelerator.by_driver import DriverAccelerator
from spark_jobs.accelerator.newest_files import NewestFiles
from spark_jobs.delta_log.acceleration import SparkAlone
from spark_jobs.lake.source_lake import SourceLake
from tests.harness.config import wal_config

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from spark_jobs.delta_log.acceleration import Accelerator
    from tests.conftest import MakeDaemon
    from tests.harness.databases import Database

pytestmark = [pytest.mark.spark_matrix, pytest.mark.accelerator]


@pytest.mark.thorough
def test_a_daemons_lake(
    spark: SparkSession,
    database: Database,
    make_daemon: MakeDaemon,
    lake: Path,
) -> None:
    extra = f'slot = "{database.name}"\npublication = "{database.name}"'
    config = wal_config(lake=lake, dsn=database.dsn, max_delay="200ms", source_extra=extra)
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, note text)",
        "INSERT INTO t VALUES (1, 'one')",
    )
    daemon = make_daemon(config)
    daemon.start_ready()
    for n in range(2, 5):
        database.execute(f"INSERT INTO t VALUES ({n}, 'more')")
        if n == 3:
            database.execute("ALTER TABLE t ADD since timestamptz DEFAULT '2026-01-01 00:00+00'")
        with database.connect() as connection:
            await_caught_up(connection, database.name)
    daemon.sigterm()

    def read(accelerator: Accelerator) -> tuple[object, ...]:
        found = SourceLake(spark, str(lake), "shop", accelerator=accelerator)
        registry = found.registry()
        ends = [epoch.end_lsn for epoch in found.epochs()]
        tables = [registry.at(table, lsn) for table in registry.tables for lsn in [*ends, None]]
        return found.epochs(), found.epochs(2), registry.tables, tables

    tables = NewestFiles(spark, SourceLake(spark, str(lake), "shop").tables_path)
    assert tables.all_rows() is not None
    by_driver = read(DriverAccelerator())
    epochs_path = SourceLake(spark, str(lake), "shop").epochs_path
    assert NewestFiles(spark, epochs_path, most_entries=0).rows_above("epoch", 0) is None
    assert read(SparkAlone()) == by_driver
    assert by_driver[2] == ["public.t"]
    assert len(by_driver[0]) >= 4  # type: ignore[arg-type] # a list


def test_rows_deleted_by_another_writer_are_left_to_spark(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = str(tmp_path / "t")
    for first in (0, 10):
        rows = spark.range(first, first + 10, numPartitions=1)
        rows.write.format("delta").mode("append").save(path)
    files = NewestFiles(spark, path)
    found = files.rows_above("id", 4)
    assert found is not None
    assert sorted(found["id"].to_pylist()) == list(range(5, 20))
    last = files.last_rows()
    assert last is not None
    assert last["id"].to_pylist() == list(range(10, 20))
    spark.sql(f"OPTIMIZE delta.`{path}`")  # (adds no rows)
    for again in (files.rows_above("id", -1), files.all_rows()):
        assert again is not None
        assert again.num_rows == 20
    spark.sql(f"DELETE FROM delta.`{path}` WHERE id = 3")
    assert files.rows_above("id", -1) is None
    assert files.all_rows() is None
    assert files.last_rows() is None
