"""The log of cuts: every cut once, whichever other writer commits to it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from delta.tables import DeltaTable
from py4j.protocol import Py4JError

from spark_jobs.accelerator.by_driver import DriverAccelerator
from spark_jobs.accelerator.choice import accelerator_of
from spark_jobs.accelerator.jvm import java_class
from spark_jobs.accelerator.row_files import RowFiles
from spark_jobs.delta_log.acceleration import SparkAlone
from spark_jobs.engine.cuts import CutLog, EpochCut, find_cut
from spark_jobs.epochs import latest
from spark_jobs.lake.source_lake import SourceLake

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark_matrix, pytest.mark.accelerator]
AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
CUT = EpochCut(1, 100, AT, {"public.t": 3, "public.u": 4}, {"public.t": 1, "public.u": 2})


@pytest.fixture
def log(spark: SparkSession, tmp_path: Path) -> CutLog:
    lake = SourceLake(spark, str(tmp_path / "lake"), "shop")
    spark.range(1).write.format("delta").save(lake.epochs_path)
    made = CutLog(spark, str(tmp_path / "target" / "_mirror"), "mirror", accelerator_of(spark))
    assert made.open(lake, lake.require().table_id)
    return made


def cut(epoch: int) -> EpochCut:
    return replace(CUT, epoch=epoch, end_lsn=100 * epoch)


def operations(log: CutLog, spark: SparkSession) -> list[str]:
    history = DeltaTable.forPath(spark, log.path).history().orderBy("version").collect()
    return [row["operation"] for row in history]


def epochs(log: CutLog, spark: SparkSession) -> list[int]:
    rows = spark.read.format("delta").load(log.path).select("epoch").collect()
    return sorted(row["epoch"] for row in rows)


@pytest.mark.thorough
def test_cuts_are_added_without_a_job_and_read_by_spark(log: CutLog, spark: SparkSession) -> None:
    spark.sparkContext.setJobGroup("cuts", "")
    log.append_cut(cut(1), replace=False)
    log.append_cut(cut(2), replace=False)
    newest = log.last()
    assert newest is not None
    assert latest(spark, log.path.removesuffix("/_mirror")).versions == cut(2).tables
    assert not spark.sparkContext.statusTracker().getJobIdsForGroup("cuts")
    assert replace(newest, last_commit_ts=AT) == cut(2)
    assert operations(log, spark)[1:] == ["STREAMING UPDATE"] * 2
    found = [find_cut(spark, log.path, SparkAlone(), epoch) for epoch in (1, 2)]
    assert [c and replace(c, last_commit_ts=AT) for c in found] == [cut(1), cut(2)]
    [row, _] = spark.read.format("delta").load(log.path).orderBy("epoch").collect()
    assert row["last_commit_ts"].astimezone(UTC) == AT


@pytest.mark.thorough
def test_the_newest_cut_is_replaced_without_a_spark_job(log: CutLog, spark: SparkSession) -> None:
    log.append_cut(cut(1), replace=False)
    log.append_cut(cut(2), replace=False)
    spark.sparkContext.setJobGroup("replaced", "")
    log.append_cut(replace(cut(2), end_lsn=7), replace=True)
    next_run = CutLog(spark, log.path, "mirror", accelerator_of(spark))
    for end_lsn in (8, 9):
        newest = next_run.last()
        assert newest is not None
        assert newest.end_lsn == end_lsn - 1
        next_run.append_cut(replace(cut(2), end_lsn=end_lsn), replace=True)
    assert not spark.sparkContext.statusTracker().getJobIdsForGroup("replaced")
    next_run.append_cut(cut(3), replace=False)
    rows = spark.read.format("delta").load(log.path).orderBy("epoch").collect()
    assert [(row["epoch"], row["end_lsn"]) for row in rows] == [(1, 100), (2, 9), (3, 300)]
    log.append_cut(replace(cut(3), end_lsn=5), replace=True)  # another run has moved on: by Spark
    assert operations(log, spark)[-1] == "WRITE"
    found = find_cut(spark, log.path, SparkAlone())
    assert found is not None
    assert found.end_lsn == 5


@pytest.mark.thorough
def test_maintenance_between_cuts_is_nothing_to_stop_at(log: CutLog, spark: SparkSession) -> None:
    for epoch in (1, 2):
        log.append_cut(cut(epoch), replace=False)
    DeltaTable.forPath(spark, log.path).optimize().executeCompaction()
    for epoch in (3, 4):
        log.append_cut(cut(epoch), replace=False)
    assert epochs(log, spark) == [1, 2, 3, 4]
    assert operations(log, spark)[-3:] == ["OPTIMIZE", "WRITE", "STREAMING UPDATE"]


@pytest.mark.thorough
def test_a_cut_that_another_run_has_added_is_not_added_again(
    log: CutLog, spark: SparkSession
) -> None:
    log.append_cut(cut(1), replace=False)
    other = CutLog(spark, log.path, "mirror", accelerator_of(spark))
    assert other.last() is not None
    for epoch in (2, 3):
        other.append_cut(cut(epoch), replace=False)
    for epoch in (2, 3, 4):
        log.append_cut(cut(epoch), replace=False)
    other.append_cut(cut(4), replace=False)
    assert epochs(log, spark) == [1, 2, 3, 4]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_cut_whose_commit_fails_is_added_once_by_spark(
    log: CutLog, spark: SparkSession, *, is_there: bool
) -> None:
    faults = [Py4JError("no")]

    class FailingFiles(RowFiles):
        def _commit(self, *arguments: Any) -> bool:
            is_new = super()._commit(*arguments) if is_there or not faults else False
            if faults:
                raise faults.pop()
            return is_new

    failing = CutLog(spark, log.path, "mirror", DriverAccelerator(row_type=FailingFiles))
    assert failing.last() is None
    failing.append_cut(cut(1), replace=False)
    assert not faults
    failing.append_cut(cut(2), replace=False)
    assert epochs(failing, spark) == [1, 2]


@pytest.mark.parametrize("place", ["_put", "_added"])
def test_an_unknown_delta_adds_no_cut_and_is_asked_once(
    log: CutLog, spark: SparkSession, place: str
) -> None:
    asked: list[str] = []

    class UnknownFiles(RowFiles):
        def __getattribute__(self, name: str) -> Any:
            if name != place:
                return super().__getattribute__(name)
            asked.append(name)
            return java_class(self.session, "org.apache.spark.sql.delta.NoSuchClass").apply()

    log.append_cut(cut(1), replace=False)
    accelerator = DriverAccelerator(row_type=UnknownFiles)
    unknown = CutLog(spark, log.path, "mirror", accelerator)
    assert unknown.last() is not None
    for epoch in (2, 3):
        unknown.append_cut(cut(epoch), replace=False)
    unknown.append_cut(replace(cut(3), end_lsn=7), replace=True)
    assert asked == [place]
    assert accelerator.switch.is_off
    assert operations(log, spark)[-3:] == ["WRITE"] * 3
    assert epochs(log, spark) == [1, 2, 3]


@pytest.mark.thorough
def test_a_log_whose_files_have_other_names_is_read_by_spark(
    spark: SparkSession, tmp_path: Path
) -> None:
    default = "spark.databricks.delta.properties.defaults.columnMapping.mode"
    lake = SourceLake(spark, str(tmp_path / "lake"), "shop")
    spark.range(1).write.format("delta").save(lake.epochs_path)
    mapped = CutLog(spark, str(tmp_path / "target" / "_mirror"), "mirror", accelerator_of(spark))
    spark.conf.set(default, "name")
    try:
        mapped.open(lake, lake.require().table_id)
    finally:
        spark.conf.unset(default)
    for epoch in (1, 2):
        mapped.append_cut(cut(epoch), replace=False)
    newest = mapped.last()
    assert newest is not None
    assert newest.epoch == 2
    assert epochs(mapped, spark) == [1, 2]


@pytest.mark.thorough
def test_a_log_that_maps_its_columns_is_spark_s_to_write(log: CutLog, spark: SparkSession) -> None:
    log.append_cut(cut(1), replace=False)
    spark.sql(
        f"ALTER TABLE delta.`{log.path}` SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"
    )
    for epoch in (2, 3):
        log.append_cut(cut(epoch), replace=False)
    assert operations(log, spark)[-2:] == ["WRITE", "WRITE"]
    assert epochs(log, spark) == [1, 2, 3]
