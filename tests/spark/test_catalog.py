"""Mirrors by name in Spark's catalog: names appear and go with their tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from ingestd.model.errors import OperatorError
from ingestd.model.schema import Column, Table, TableId
from ingestd.testing.embedded.daemon import module_environment
from spark_jobs import history, mirror
from spark_jobs.catalog.entries import CatalogSchema
from spark_jobs.catalog.schema_name import SchemaName
from spark_jobs.catalog.table_names import CatalogNames
from spark_jobs.cli.arguments import EXIT_DONE, EXIT_OPERATOR, EXIT_TRANSIENT
from spark_jobs.lake.targets import table_path
from spark_jobs.reconciling.report import Reconciliation, append_tables, name_report
from tests.harness.raw_lake import RawLake

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark_matrix
COMMENT = "it's ${env:HOME} \\ `x`"
COLUMNS = (
    Column("id", 20, -1, pa.int64(), "bigint", identity=True, comment="the key"),
    Column("note", 25, -1, pa.string(), "text", comment=COMMENT),
)


def table(schema: str, name: str) -> Table:
    return Table(TableId(schema, name), 1, COLUMNS, "d", ("id",), ("id",))


ORDERS, SALES = table("public", "orders"), table("sales", "orders")


class Named:
    """A lake of two tables, and a mirror of it that is named in `schema`."""

    def __init__(self, spark: SparkSession, folder: Path, schema: str) -> None:
        self.spark = spark
        self.raw = RawLake(folder / "lake")
        self.target = folder / "a target"
        self.schema = schema
        self.insert(1)
        self.raw.record("live", ORDERS, SALES)

    def insert(self, key: int, *tables: Table) -> None:
        lsn = self.raw.next_lsn()
        rows = [{"_cdc_lsn": lsn, "_cdc_seq": 1, "id": key, "note": f"n{key}"}]
        self.raw.commit(dict.fromkeys(tables or (ORDERS, SALES), rows))

    def arguments(self, *more: str, catalog: str = "") -> list[str]:
        lake = ["--lake", str(self.raw.uri), "--source", "shop", "--target", str(self.target)]
        return [*lake, "--once", "--catalog", catalog or f"spark_catalog.{self.schema}", *more]

    def run(self, *more: str, catalog: str = "") -> int:
        return mirror.main(self.arguments(*more, catalog=catalog))

    def path(self, of: Table) -> str:
        return table_path(str(self.target), str(of.id))

    def names(self) -> set[str]:
        rows = self.spark.sql(f"SHOW TABLES IN spark_catalog.{self.schema}").collect()
        return {row["tableName"] for row in rows}

    def keys(self, name: str) -> list[int]:
        rows = self.spark.sql(f"SELECT id FROM spark_catalog.{self.schema}.{name} ORDER BY id")
        return [row["id"] for row in rows.collect()]

    def operations(self, of: Table) -> list[str]:
        rows = self.spark.sql(f"DESCRIBE HISTORY delta.`{self.path(of)}`").orderBy("version")
        return [row["operation"] for row in rows.collect()]


@pytest.fixture
def named(spark: SparkSession, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Named]:
    schema = f"s{abs(hash(request.node.name))}"
    yield Named(spark, tmp_path, schema)
    spark.sql(f"DROP SCHEMA IF EXISTS spark_catalog.{schema} CASCADE")


def test_mirrors_are_read_by_name_and_described(named: Named) -> None:
    assert named.run() == EXIT_DONE
    assert named.names() == {"orders", "sales__orders", "_mirror"}
    before = named.operations(ORDERS)
    named.insert(2)
    assert named.run() == EXIT_DONE
    assert len(named.operations(ORDERS)) == len(before) + 1  # no commit for names alone
    assert named.keys("orders") == named.keys("sales__orders") == [1, 2]
    assert named.spark.table(f"spark_catalog.{named.schema}._mirror").count() == 2

    described = named.spark.sql(f"DESCRIBE TABLE spark_catalog.{named.schema}.orders").collect()
    comments = {row["col_name"]: row["comment"] for row in described}
    assert (comments["id"], comments["note"]) == ("the key", COMMENT)
    assert comments["_cdc_lsn"]
    [detail] = named.spark.sql(
        f"DESCRIBE DETAIL spark_catalog.{named.schema}.sales__orders"
    ).collect()
    assert "sales.orders of source shop" in detail["description"]
    properties = {k: v for k, v in detail["properties"].items() if k.startswith("ingestd.")}
    assert properties == {
        "ingestd.source": "shop",
        "ingestd.table": "sales.orders",
        "ingestd.key": '["id"]',
    }

    reader = QueryBuilder().register("t", DeltaTable(named.path(ORDERS)))
    rows = pa.table(reader.execute("SELECT id, note FROM t").read_all())
    with duckdb.connect() as by_path:
        found = by_path.register("t", rows).sql("SELECT * FROM t ORDER BY id").fetchall()
    assert found == [(1, "n1"), (2, "n2")]


def test_a_table_made_again_is_described_again(named: Named) -> None:
    assert named.run() == EXIT_DONE
    assert named.run("--rebuild", "public.orders") == EXIT_DONE
    [field] = [
        one
        for one in named.spark.table(f"spark_catalog.{named.schema}.orders").schema
        if one.name == "note"
    ]
    assert field.metadata["comment"] == COMMENT
    named.insert(2)
    assert named.run() == EXIT_DONE
    assert named.keys("orders") == [1, 2]


def test_a_foreign_table_of_that_name_stops_its_table_alone(
    named: Named, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = f"spark_catalog.{named.schema}.orders"
    named.spark.sql(f"CREATE SCHEMA spark_catalog.{named.schema}")
    for make, drop in (
        (f"CREATE TABLE {taken} (a int) USING parquet", "TABLE"),
        (f"CREATE TABLE {taken} (a int) USING delta", "TABLE"),
        (f"CREATE VIEW {taken} AS SELECT 1 id", "VIEW"),
    ):
        named.spark.sql(make)
        assert named.run() == EXIT_OPERATOR
        printed = capsys.readouterr().err
        assert "table public.orders: " in printed
        assert f"not the table at {named.path(ORDERS)}" in printed
        assert f"remedy: DROP {drop} `spark_catalog`.`{named.schema}`.`orders`" in printed
        if drop == "TABLE":
            assert f"table at {named.spark.conf.get('spark.sql.warehouse.dir')}" in printed
        assert named.keys("sales__orders") == [1]
        named.spark.sql(f"DROP {drop} {taken}")
    named.insert(2)
    assert named.run() == EXIT_DONE
    assert named.keys("orders") == named.keys("sales__orders") == [1, 2]


def test_a_dropped_table_loses_its_name_and_keeps_its_files(named: Named) -> None:
    assert named.run() == EXIT_DONE
    named.raw.record("dropped", ORDERS)
    assert named.run() == EXIT_DONE
    assert named.names() == {"sales__orders", "_mirror"}
    assert named.spark.read.format("delta").load(named.path(ORDERS)).count() == 1

    named.spark.sql(f"CREATE TABLE spark_catalog.{named.schema}.orders (a int) USING parquet")
    assert named.run() == EXIT_DONE
    assert "orders" in named.names()  # another one's

    named.spark.sql(f"DROP TABLE spark_catalog.{named.schema}.orders")
    named.raw.next_lsn()
    named.raw.record("live", ORDERS)
    named.insert(2)
    assert named.run() == EXIT_DONE
    assert named.keys("orders") == [1, 2]


@pytest.fixture
def unreachable(spark: SparkSession) -> Iterator[str]:
    """Yield a catalog whose database can't be reached."""
    of_jdbc = "org.apache.spark.sql.execution.datasources.v2.jdbc.JDBCTableCatalog"
    settings = {
        "": of_jdbc,
        ".url": "jdbc:derby:/no/such/place",
        ".driver": "org.apache.derby.jdbc.EmbeddedDriver",
    }
    for name, value in settings.items():
        spark.conf.set(f"spark.sql.catalog.far{name}", value)
    yield "far.shop"
    for name in settings:
        spark.conf.unset(f"spark.sql.catalog.far{name}")


def test_without_its_catalog_a_mirror_moves_all_the_same(
    named: Named, unreachable: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert named.run(catalog=unreachable) in {EXIT_OPERATOR, EXIT_TRANSIENT}
    printed = capsys.readouterr().err
    assert printed.startswith("the catalog of `far`.`shop`: Spark ")
    assert "Tables without a name are complete at their paths" in printed
    for one in (ORDERS, SALES):
        assert named.spark.read.format("delta").load(named.path(one)).count() == 1
    assert named.run() == EXIT_DONE
    assert named.keys("orders") == named.keys("sales__orders") == [1]


def test_a_catalog_that_fails_is_not_asked_for_each_table(
    spark: SparkSession, unreachable: str
) -> None:
    names = CatalogNames(CatalogSchema(spark, SchemaName.parse(unreachable)), "shop", "mirror")
    names.open()
    fault = names.fault
    assert fault is not None
    names.ensure_free("public.orders", "/nowhere")
    names.register_log("_mirror", "/nowhere")
    names.remove("public.orders", "/nowhere")
    assert names.fault is fault  # the first attempt's


@pytest.mark.parametrize("name", ["nowhere.shop", "`a b`.shop"])
def test_an_unknown_catalog_ends_the_job_before_it_moves(named: Named, name: str) -> None:
    with pytest.raises(OperatorError, match="has no catalog") as caught:
        named.run(catalog=name)
    assert "--conf spark.sql.catalog." in str(caught.value.remedy)
    assert not named.target.exists()
    assert named.spark.catalog.currentCatalog() == "spark_catalog"


def test_histories_have_names(named: Named) -> None:
    assert history.main(named.arguments()) == EXIT_DONE
    assert named.names() == {"orders", "sales__orders", "_history"}
    assert named.keys("orders") == [1]
    # a mirror in the same schema would have the same names
    named.target = named.target.with_name("mirror")
    assert named.run() == EXIT_OPERATOR
    assert named.names() == {"orders", "sales__orders", "_history", "_mirror"}


def test_a_report_has_names(named: Named, tmp_path: Path) -> None:
    run = Reconciliation("r", named.raw.at(), "shop", named.raw.lsn)  # type: ignore[arg-type]
    uri = str(tmp_path / "report")
    append_tables(named.spark, uri, run, [])
    schema = SchemaName("spark_catalog", named.schema)
    assert name_report(named.spark, None, "shop", uri) is None
    assert name_report(named.spark, schema, "shop", uri) is None
    assert named.names() == {"_reconcile_tables"}
    fault = name_report(named.spark, schema, "shop", f"{uri}2")
    assert fault is None
    append_tables(named.spark, f"{uri}2", run, [])
    fault = name_report(named.spark, schema, "shop", f"{uri}2")
    assert f"not the table at {uri}2/tables" in str(fault)


READS = """
import sys
from spark_jobs.session import local_session
spark = local_session("reads", settings={"spark.sql.catalogImplementation": "hive"})
rows = spark.sql("SELECT id, note FROM spark_catalog.shop.orders ORDER BY id").collect()
print([tuple(row) for row in rows])
"""


@pytest.mark.thorough
def test_names_in_a_hive_metastore_outlive_the_session(named: Named, tmp_path: Path) -> None:
    """Derby in the working directory, as Spark has it without a hive-site.xml."""
    environment = {**os.environ, **module_environment()}
    job = ["-m", "spark_jobs.mirror", *named.arguments(catalog="spark_catalog.shop")]
    for arguments, expected in ((job, "mirror.moved"), (["-c", READS], "[(1, 'n1')]")):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert expected in done.stdout
    assert (tmp_path / "metastore_db").is_dir()
