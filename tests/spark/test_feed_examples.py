"""The consumers of change feeds in `deploy/` have the rows that a plain consumer has."""

from __future__ import annotations

import runpy
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import jinja2
import pyarrow as pa
import pytest
import yaml
from deltalake import DeltaTable, write_deltalake
from pyspark import pipelines
from pyspark.sql import SparkSession

from spark_jobs.feeds.feed_rows import FEED_COLUMNS
from tests.harness.feeds import apply_changes

if TYPE_CHECKING:
    from collections.abc import Callable

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
DBT = DEPLOY / "dbt"
COMMITS: list[list[tuple[str, int, str | None]]] = [
    [("INSERT", 1, "a"), ("INSERT", 2, "b"), ("INSERT", 3, "c")],
    [("DELETE", 1, None), ("UPDATE", 2, "x"), ("UPDATE", 2, "y"), ("DELETE", 3, None)],
    [("INSERT", 1, "again"), ("INSERT", 4, "d"), ("DELETE", 4, None)],
]


def rows_of(epoch: int) -> pa.Table:
    """Return what a commit appends to a feed."""
    rows = [
        {
            "id": key,
            "note": note,
            "_cdc_operation": operation,
            "_cdc_sequence": f"{epoch:012X}-{seq:016X}-{seq:012X}-{int(operation != 'DELETE')}",
            "_cdc_epoch": epoch,
            "_cdc_lsn": seq,
            "_cdc_seq": seq,
        }
        for seq, (operation, key, note) in enumerate(COMMITS[epoch - 1], 1)
    ]
    kinds = {"string": pa.string(), "bigint": pa.int64(), "timestamp": pa.timestamp("us", "UTC")}
    source = {"id": pa.int64(), "note": pa.string(), "_cdc_raw": pa.map_(pa.string(), pa.string())}
    schema = pa.schema(source | {name: kinds[kind] for name, kind in FEED_COLUMNS.items()})
    return pa.Table.from_pylist(rows, schema)


class Dbt:
    """A `dbt run` of the models, without dbt: their SQL, and a delete and insert by the key."""

    def __init__(self, feed: Path) -> None:
        self.feed = feed
        self.connection = duckdb.connect()
        self.configs: defaultdict[str, dict[str, Any]] = defaultdict(dict)

    def run(self) -> list[tuple[Any, ...]]:
        feed = DeltaTable(str(self.feed)).to_pyarrow_dataset().to_table()
        self.connection.register("feed", feed)
        there = self.connection.sql("SHOW TABLES").fetchall()
        is_first = ("orders_changes",) not in there
        changes = self._sql("orders_changes", is_first=is_first)
        if is_first:
            self.connection.sql(f"CREATE TABLE orders_changes AS {changes}")
        else:
            key = self.configs["orders_changes"]["unique_key"]
            assert self.configs["orders_changes"]["incremental_strategy"] == "delete+insert"
            self.connection.sql(f"CREATE TEMP TABLE new AS {changes}")
            self.connection.sql(
                f"DELETE FROM orders_changes WHERE {key} IN (SELECT {key} FROM new)"
            )
            self.connection.sql("INSERT INTO orders_changes SELECT * FROM new")
            self.connection.sql("DROP TABLE new")
        found = self.connection.sql(self._sql("orders", is_first=True))
        assert found.columns == ["id", "note", "_cdc_raw"]
        return sorted((row[0], row[1]) for row in found.fetchall())

    def _sql(self, model: str, *, is_first: bool) -> str:
        template = jinja2.Template((DBT / "models" / f"{model}.sql").read_text("utf-8"))
        sql: str = template.render(
            config=lambda **given: self.configs[model].update(given) or "",
            source=lambda *_: "feed",
            ref=lambda name: name,
            this=model,
            is_incremental=lambda: not is_first,
        )
        return sql


def pipeline_query(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Return the query of the Spark pipeline's table, as a function."""
    monkeypatch.setattr(pipelines, "materialized_view", lambda **_: lambda query: query)
    path = DEPLOY / "spark_pipeline" / "transformations" / "orders.py"
    module = runpy.run_path(str(path))
    assert module["FEED_COLUMNS"] == list(FEED_COLUMNS)
    query: Callable[[], Any] = module["orders"]
    return query


def test_consumers_have_the_rows_of_the_source(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = tmp_path / "orders"
    dbt, query = Dbt(feed), pipeline_query(monkeypatch)
    monkeypatch.setitem(query.__globals__, "FEED", str(feed))
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: spark)
    for epoch in range(1, len(COMMITS) + 1):
        write_deltalake(str(feed), rows_of(epoch), mode="append")
        every = DeltaTable(str(feed)).to_pyarrow_dataset().to_table().to_pylist()
        in_order = sorted(every, key=lambda row: row["_cdc_sequence"])
        expected = sorted((r["id"], r["note"]) for r in apply_changes(in_order, ["id"]))
        assert dbt.run() == expected
        assert dbt.run() == expected
        found = query()
        assert found.columns == ["id", "note", "_cdc_raw"]
        assert sorted((row["id"], row["note"]) for row in found.collect()) == expected


def test_a_databricks_pipeline_names_what_a_feed_has(monkeypatch: pytest.MonkeyPatch) -> None:
    flows: list[dict[str, Any]] = []
    monkeypatch.setattr(pipelines, "temporary_view", lambda **_: lambda query: query)
    monkeypatch.setattr(pipelines, "create_streaming_table", lambda _: None)
    monkeypatch.setattr(pipelines, "create_auto_cdc_flow", lambda **given: flows.append(given))
    runpy.run_path(str(DEPLOY / "databricks_auto_cdc.py"))
    assert [flow["target"] for flow in flows] == ["customers", "orders"]
    for flow in flows:
        assert flow["except_column_list"] == list(FEED_COLUMNS)
        assert flow["sequence_by"] in FEED_COLUMNS
        assert flow["apply_as_deletes"].split(" = ")[0] in FEED_COLUMNS


def test_the_projects_are_read_as_yaml() -> None:
    spec = yaml.safe_load((DEPLOY / "spark_pipeline" / "spark-pipeline.yml").read_text("utf-8"))
    assert set(spec) == {"name", "storage", "database", "libraries"}
    project = yaml.safe_load((DBT / "dbt_project.yml").read_text("utf-8"))
    assert project["profile"] in yaml.safe_load((DBT / "profiles.yml").read_text("utf-8"))
    models = yaml.safe_load((DBT / "models" / "feeds.yml").read_text("utf-8"))["models"]
    assert {model["name"] for model in models} == {p.stem for p in DBT.glob("models/*.sql")}
