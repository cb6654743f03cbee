"""Spark's SQL and Delta's classes say the same of every table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.errors import AnalysisException

from spark_jobs.accelerator.class_tables import ClassTables
from spark_jobs.delta_log.commits import Signature, signed
from spark_jobs.delta_log.sql_tables import SqlTables
from spark_jobs.delta_log.statements import create, quoted, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_jobs.delta_log.tables import DeltaTables

pytestmark = [pytest.mark.spark_matrix, pytest.mark.accelerator]
SIGNED = Signature("mirror", "shop", "lake", 7, 2)
ODD, NAME = "it's a \\ `text`", "it's-\\`a`"


def facts(spark: SparkSession, tables: DeltaTables, path: str) -> dict[str, Any]:
    """What a table's log says, and the rows of its newest version, and of the one before."""
    state = tables.state(spark, path)
    commits = tables.commits_above(spark, path, -1)
    tables.ensure(spark, path)
    found: dict[str, Any] = {
        "state": state and (state.table_id, state.properties),
        "size": tables.size_bytes(spark, path) if state else None,
        "commits": commits,
        "above": tables.commits_above(spark, path, commits.version - 1),
        "none above": tables.commits_above(spark, path, commits.version),
        "missing": sorted(file.name for file in tables.missing_files(spark, path)),
    }
    for version in (None, commits.version - 1) if commits.version > 0 else ():
        try:
            rows = tables.rows(spark, path, version).collect()
        except AnalysisException:
            rows = []
        found[f"rows of {version}"] = sorted(map(str, rows))
    return found


def test_sql_says_what_the_classes_say(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "a b" / "it's")
    by_sql, by_classes = SqlTables(), ClassTables()
    marks = list[tuple[object, object]]()

    def compare() -> dict[str, Any]:
        found = facts(spark, by_sql, path)
        assert found == facts(spark, by_classes, path)
        states = by_sql.state(spark, path), by_classes.state(spark, path)
        marks.append((states[0] and states[0].mark, states[1] and states[1].mark))
        return found

    assert compare()["commits"].version == -1
    Path(path).mkdir(parents=True)
    assert compare()["state"] is None
    run(spark, create(path, {"id": "long", NAME: "string"}, {"ingestd.source": ODD}))
    assert compare()["state"][1]["ingestd.source"] == ODD
    rows = spark.range(4).selectExpr("id", f"'x' AS {quoted(NAME)}").coalesce(1)
    with signed(spark, SIGNED, "app"):
        rows.write.format("delta").mode("append").save(path)
    [newest] = compare()["above"].newer
    assert (newest.signature, newest.operation) == (SIGNED, "WRITE")
    with signed(spark, SIGNED, "app"):
        rows.write.format("delta").mode("append").save(path)  # skipped: the table has it
    assert compare()["commits"].version == 1
    marks.pop()
    spark.sql(f"DELETE FROM delta.`{path}` WHERE id = 2")
    assert len(compare()["rows of None"]) == 3
    write_deltalake(path, pa.table({"id": pa.array([9]), NAME: ["y"]}), mode="append")
    found = compare()
    assert [commit.is_foreign for commit in found["commits"].newer] == [True, True, False, True]
    assert len(found["rows of None"]) == 4
    assert len(found["rows of 2"]) == 3
    assert len(set(marks[1:])) == len(marks[1:])
    for side in zip(*marks[1:], strict=True):
        assert len(set(side)) == len(side)


def test_sql_finds_missing_files_of_this_machine(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    spark.range(0, 2, 1, 2).write.format("delta").save(path)
    [gone, *_] = Path(path).glob("*.parquet")
    gone.unlink()
    assert [file.name for file in SqlTables().missing_files(spark, path)] == [gone.name]
    assert [file.name for file in ClassTables().missing_files(spark, path)] == [gone.name]
