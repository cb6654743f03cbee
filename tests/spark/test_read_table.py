"""`read_table`: what `format("ingestd")` reads, by an Arrow function, on every Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ingestd.model.errors import ConfigError, IngestdError
from spark_jobs.source.table_read import read_table
from tests.harness.config import wal_config
from tests.harness.databases import Database, fresh_database

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from ingestd.testing.embedded.postgres import PostgresServer

pytestmark = [pytest.mark.spark_matrix, pytest.mark.spark_few]


class Tables:
    def __init__(self, spark: SparkSession, database: Database, config: Path) -> None:
        self.spark, self.database, self.config = spark, database, config

    def read(self, table: str, **options: object) -> DataFrame:
        given: dict[str, object] = {"config": self.config, "source": "shop", "table": table}
        return read_table(self.spark, **given | options)


@pytest.fixture(scope="module")
def tables(
    spark: SparkSession, postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tables]:
    folder = tmp_path_factory.mktemp("read_table")
    with fresh_database(postgres) as database:
        extra = f'slot = "{database.name}"'
        config = folder / "ingestd.toml"
        config.write_text(
            wal_config(
                lake=folder / "lake", dsn=database.dsn, tables=["public.*"], source_extra=extra
            )
        )
        database.execute(
            "CREATE TABLE accounts (id int PRIMARY KEY, n numeric(12, 2), at timestamptz)",
            "INSERT INTO accounts SELECT i, i / 100.0, '2026-01-02 03:04:05.678901+01'"
            " FROM generate_series(1, 5000) i",
            "INSERT INTO accounts VALUES (0, 'NaN', 'infinity')",
        )
        yield Tables(spark, database, config)


def test_every_row_comes_once_with_the_lake_s_values(tables: Tables) -> None:
    found = tables.read("public.accounts", partitions=3)
    assert found.rdd.getNumPartitions() == 3
    rows: list[Any] = found.orderBy("id").collect()
    assert [row["id"] for row in rows] == list(range(5001))
    assert (rows[0]["n"], rows[0]["at"]) == (None, None)
    assert dict(rows[0]["_cdc_raw"]) == {"n": "NaN", "at": "infinity"}
    assert str(rows[150]["n"]) == "1.50"
    micros = found.where("id = 150").selectExpr("unix_micros(at)").collect()
    assert micros[0][0] == 1_767_319_445_678_901


def test_options_choose_columns_and_rows(tables: Tables) -> None:
    few = tables.read("public.accounts", columns=["id"], where="id % 1000 = 7", raw=False)
    assert few.columns == ["id"]
    assert sorted(row["id"] for row in few.collect()) == [7, 1007, 2007, 3007, 4007]
    assert tables.read("public.accounts", limit=10).count() == 10
    with pytest.raises(ConfigError, match="pushdown"):
        tables.read("public.accounts", pushdown=True)
    with pytest.raises(IngestdError, match="does not exist"):
        tables.read("public.nothing")


def test_an_action_reads_one_snapshot_and_the_next_one_another(tables: Tables) -> None:
    tables.database.execute(
        "CREATE TABLE pairs (id int PRIMARY KEY)",
        "INSERT INTO pairs SELECT generate_series(1, 10)",
    )
    ours = tables.read("public.pairs", partitions=2)
    both = ours.join(tables.read("public.pairs"), "id")
    assert both.count() == 10
    tables.database.execute("INSERT INTO pairs SELECT generate_series(11, 15)")
    assert both.count() == 15
    assert ours.count() == 15
