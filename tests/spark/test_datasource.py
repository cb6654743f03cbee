"""`format("ingestd")`: tables of a live Postgres in Spark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from spark_jobs.datasource import IngestdDataSource
from tests.harness.config import wal_config
from tests.harness.databases import Database, fresh_database

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from ingestd.demo.postgres import PostgresServer


@dataclass(frozen=True)
class Reading:
    """A database, and how its tables are loaded."""

    spark: SparkSession
    database: Database
    folder: Path
    config: str

    def load(self, table: str, **options: object) -> DataFrame:
        path = self.folder / "ingestd.toml"
        path.write_text(self.config)
        reader = self.spark.read.format("ingestd").option("config", str(path))
        for name, value in {"source": "shop", "table": table, **options}.items():
            reader = reader.option(name, str(value))
        return reader.load()


@pytest.fixture(scope="module")
def registered(spark: SparkSession) -> SparkSession:
    spark.dataSource.register(IngestdDataSource)
    return spark


@pytest.fixture(scope="module")
def reading(
    registered: SparkSession,
    postgres: PostgresServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Reading]:
    folder = tmp_path_factory.mktemp("datasource")
    with fresh_database(postgres) as database:
        config = wal_config(
            lake=folder / "lake",
            dsn=database.dsn,
            tables=["public.*", "!public.hidden"],
            source_extra=f'slot = "{database.name}"',
        )
        yield Reading(registered, database, folder, config)


def test_a_table_is_read_in_the_partitions_that_are_asked_for(reading: Reading) -> None:
    reading.database.execute(
        "CREATE TABLE numbers (id int PRIMARY KEY, note text)",
        "INSERT INTO numbers SELECT i, 'n' || i FROM generate_series(1, 20000) i",
    )
    loaded = reading.load("public.numbers", partitions=3)
    assert loaded.dtypes == [("id", "int"), ("note", "string"), ("_cdc_raw", "map<string,string>")]
    assert loaded.rdd.getNumPartitions() == 3
    [row] = loaded.selectExpr(
        "count(*)", "sum(id)", "count(distinct note)", "count(_cdc_raw)"
    ).collect()
    assert tuple(row) == (20000, 200010000, 20000, 0)
