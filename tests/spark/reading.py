"""Tables of a database of its own, loaded by `format("ingestd")`. Import the fixtures."""

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

    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

    from ingestd.testing.embedded.postgres import PostgresServer


@dataclass(frozen=True)
class Reading:
    """A database, and how its tables are loaded."""

    spark: SparkSession
    database: Database
    folder: Path
    config: str

    def load(self, table: str, **options: object) -> DataFrame:
        return self.reader(table, **options).load()

    def reader(self, table: str, **options: object) -> DataFrameReader:
        path = self.folder / "ingestd.toml"
        path.write_text(self.config)
        reader = self.spark.read.format("ingestd")
        given = {"config": path, "source": "shop", "table": table, **options}
        for name, value in given.items():
            reader = reader.option(name, str(value))
        return reader

    def sessions(self) -> int:
        """How many sessions the data source has in the database."""
        found = self.database.value(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'ingestd spark'"
            " AND datname = current_database()"
        )
        return int(found)


@pytest.fixture(scope="module")
def reading(
    spark: SparkSession,
    postgres: PostgresServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Reading]:
    spark.dataSource.register(IngestdDataSource)
    folder = tmp_path_factory.mktemp("datasource")
    with fresh_database(postgres) as database:
        config = wal_config(
            lake=folder / "lake",
            dsn=database.dsn,
            tables=["public.*", "!public.hidden"],
            source_extra=f'slot = "{database.name}"',
        )
        yield Reading(spark, database, folder, config)
