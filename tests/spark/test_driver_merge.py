"""The driver merges into mirrors itself; the rows are the same as by Spark."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from structlog.testing import capture_logs

from ingestd.model.errors import ConfigError
from ingestd.model.schema import TIMESTAMP, Column, Table, TableId
from spark_jobs.accelerator import driver_files
from spark_jobs.accelerator.by_driver import DriverAccelerator
from spark_jobs.accelerator.choice import VARIABLE, accelerator_of
from spark_jobs.accelerator.class_log import snapshot_of
from spark_jobs.accelerator.driver_merge import DriverMerge
from spark_jobs.accelerator.file_cache import MirrorFiles
from spark_jobs.accelerator.jvm import java_class
from spark_jobs.accelerator.switch import Switch
from spark_jobs.delta_log.acceleration import SparkAlone
from spark_jobs.epochs import latest
from spark_jobs.mirror import main
from spark_jobs.mirrors.job import MirrorJob
from spark_jobs.mirrors.policy import MirrorPolicy
from spark_jobs.mirrors.table import MirrorTable
from tests.harness.raw_lake import Change, RawLake

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from spark_jobs.accelerator.file_cache import Action
    from spark_jobs.delta_log.acceleration import Accelerator
    from spark_jobs.delta_log.commits import Signature
    from spark_jobs.engine.table_mover import TableJob
    from spark_jobs.mirrors.table import Outcomes

pytestmark = [pytest.mark.thorough, pytest.mark.spark_matrix]

ID = Column("id", 20, -1, pa.int64(), "bigint", identity=True)
COLUMNS = (
    ID,
    Column("amount", 1700, -1, pa.decimal128(38, 10), "numeric(38,10)"),
    Column("at", 1184, -1, TIMESTAMP, "timestamp with time zone"),
    Column("local", 1114, -1, pa.timestamp("us"), "timestamp without time zone"),
    Column("day", 1082, -1, pa.date32(), "date"),
    Column("data", 17, -1, pa.binary(), "bytea"),
    Column("tags", 1009, -1, pa.list_(pa.string()), "text[]"),
    Column("score", 701, -1, pa.float64(), "double precision"),
    Column("small", 21, -1, pa.int16(), "smallint"),
    Column("is_open", 16, -1, pa.bool_(), "boolean"),
    Column("note", 25, -1, pa.string(), "text"),
)
TABLE = Table(TableId("public", "kinds"), 1, COLUMNS, "d", ("id",), ("id",))
VALUES: list[dict[str, Any]] = [
    {
        "amount": Decimal("1234567890123456789012345678.0123456789"),
        "at": datetime(1, 1, 1, tzinfo=UTC),
        "local": datetime(9999, 12, 31, 23, 59, 59, 999_999),  # noqa: DTZ001 - it has no zone
        "day": date(1, 1, 1),
        "data": b"\x00\xff",
        "tags": ["a", None, ""],
        "score": float("inf"),
        "small": -32768,
        "is_open": True,
        "note": "zażółć",
    },
    {
        "amount": Decimal(-1),
        "at": datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        "local": datetime(1582, 10, 10, 1, 2, 3),  # noqa: DTZ001 - as above
        "day": date(1582, 10, 10),
        "tags": [],
        "score": -0.0,
    },
    {},
]


class Mirror:
    def __init__(self, spark: SparkSession, lake: Path, target: Path) -> None:
        self.spark, self.raw, self.target = spark, RawLake(lake), str(target)
        self.path = f"{target}/public/kinds"

    def run(
        self,
        *changes: Change,
        table: Table = TABLE,
        job: TableJob | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.raw.commit({table: [{"_cdc_lsn": self.raw.lsn} | c for c in changes]})
        self.raw.record("live", table)
        lake = ["--lake", str(self.raw.uri), "--source", self.raw.source]
        arguments = [*lake, "--target", self.target, "--once"]
        assert main(arguments, job=job, accelerator=accelerator) == 0
        self.raw.next_lsn()

    def rows(self, name: str = "public.kinds") -> dict[int, Any]:
        found = latest(self.spark, self.target)[name].selectExpr("id", "to_json(struct(*)) AS row")
        return {row["id"]: json.loads(row["row"]) for row in found.collect()}

    def files(self) -> dict[str, Any]:
        """Return the deletion vectors of the newest version's files, by their names."""
        found = snapshot_of(self.spark, self.path).allFiles().toJSON().collectAsList()
        return {add["path"]: add.get("deletionVector") for add in map(json.loads, found)}

    def detail(self) -> Any:
        return self.spark.sql(f"DESCRIBE DETAIL delta.`{self.path}`").collect()[0]


@pytest.fixture
def mirror(spark: SparkSession, lake: Path, tmp_path: Path) -> Mirror:
    return Mirror(spark, lake, tmp_path / "mirror")


class DriverOnly(MirrorTable):
    """Refuses to be changed by Spark."""

    def apply(self, outcomes: Outcomes, signature: Signature) -> None:
        del outcomes, signature
        pytest.fail("it was left to Spark")


def in_driver(**limits: int) -> MirrorJob:
    """Return a job that only the driver may do, unless the tests run without the accelerator."""
    policy = MirrorPolicy(**limits)
    return (
        MirrorJob(policy=policy)
        if os.environ.get(VARIABLE) == "off"
        else MirrorJob(mirror_type=DriverOnly, policy=policy)
    )


def by_way(**limits: int) -> MirrorJob:
    return MirrorJob(policy=MirrorPolicy(**limits))


def test_values_of_all_kinds_stay_what_they_are(mirror: Mirror) -> None:
    rows = [{"_cdc_op": "r", "_cdc_seq": 0, "id": n, **v} for n, v in enumerate(VALUES)]
    gone = {"_cdc_op": "r", "_cdc_seq": 0, "id": 7, "note": "to be gone"}
    mirror.run(*rows, gone, job=in_driver(driver_rows=-1))
    by_spark = mirror.rows()
    changed = [{"_cdc_op": "c", "_cdc_seq": 1, "id": 10 + n, **v} for n, v in enumerate(VALUES)]
    mirror.run(*changed, {"_cdc_op": "d", "_cdc_seq": 9, "id": 7}, job=in_driver())
    found = mirror.rows()
    assert {n: found[n] for n in range(3)} == {n: by_spark[n] for n in range(3)}
    assert found.keys() == {0, 1, 2, 10, 11, 12}
    where = {"id": 0, "_cdc_lsn": 0, "_cdc_seq": 0}
    for n in range(3):
        assert found[10 + n] | where == found[n] | where
    many = in_driver(few_rows=-1)  # as if there were many
    mirror.run({"_cdc_op": "u", "_cdc_seq": 1, "id": 0, "note": "again"}, job=many)
    assert (mirror.rows()[10], mirror.rows()[2]) == (found[10], found[2])


def test_mirrors_are_clustered_by_key_however_they_are_written(mirror: Mirror) -> None:
    mirror.run({"_cdc_op": "r", "_cdc_seq": 0, "id": 1})
    assert mirror.detail()["clusteringColumns"] == ["id"]
    mirror.run({"_cdc_op": "u", "_cdc_seq": 1, "id": 1, "note": "by the driver"})
    written = {"_cdc_op": "u", "_cdc_seq": 1, "id": 1, "note": "by a plain write"}
    mirror.run(written, job=by_way(read_file_bytes=-1))
    assert mirror.detail()["clusteringColumns"] == ["id"]
    assert "deletionVectors" in mirror.detail()["tableFeatures"]
    mirror.run({"_cdc_op": "t", "_cdc_seq": 1}, {"_cdc_op": "c", "_cdc_seq": 2, "id": 4})
    assert mirror.detail()["clusteringColumns"] == ["id"]
    assert mirror.rows().keys() == {4}


@pytest.mark.accelerator
def test_deletion_vectors_of_the_driver_and_of_spark_are_one(mirror: Mirror) -> None:
    mirror.run(*({"_cdc_op": "r", "_cdc_seq": 0, "id": n, "note": "first"} for n in range(40)))
    vectors = MirrorPolicy(small_file_bytes=0)
    [loaded] = mirror.files()
    update = {"_cdc_op": "u", "_cdc_seq": 1}
    mirror.run(
        update | {"id": 1, "note": "by the driver"},
        {**update, "_cdc_op": "d", "id": 2},
        job=MirrorJob(policy=vectors),
    )
    by_spark = by_way(small_file_bytes=0, read_file_bytes=-1, small_bytes=0, changed_share=0)
    mirror.run(update | {"id": 3, "note": "by Spark"}, job=by_spark)
    assert mirror.files()[loaded]["cardinality"] == 3
    listed = DriverAccelerator(files=MirrorFiles(most_entries=1))  # Spark has to list them
    again = update | {"id": 4, "note": "by the driver"}
    mirror.run(again, job=MirrorJob(policy=vectors), accelerator=listed)
    assert mirror.files()[loaded]["cardinality"] == 4
    notes = dict.fromkeys((0, *range(5, 40)), "first")
    notes |= {1: "by the driver", 3: "by Spark", 4: "by the driver"}
    assert {n: row["note"] for n, row in mirror.rows().items()} == notes
    mirror.spark.sql(f"REORG TABLE delta.`{mirror.path}` APPLY (PURGE)")
    assert loaded not in mirror.files()
    mirror.run(update | {"id": 5, "note": "after all"})
    assert {n: row["note"] for n, row in mirror.rows().items()} == notes | {5: "after all"}


@pytest.mark.accelerator
def test_small_files_are_joined(mirror: Mirror) -> None:
    counts = []
    for n in range(4):  # by its key no existing file may have it
        mirror.run({"_cdc_op": "c", "_cdc_seq": 1, "id": n}, job=in_driver(most_small_files=2))
        counts.append(len(mirror.files()))
    assert counts == [1, 2, 3, 1]
    assert mirror.rows().keys() == {0, 1, 2, 3}


def test_files_of_stores_go_through_temporary_ones(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(driver_files, "is_local", lambda _: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows = ({"_cdc_op": "r", "_cdc_seq": 0, "id": n, "note": "first"} for n in range(9))
    mirror.run(*rows, job=in_driver(small_file_bytes=0))
    changed = {"_cdc_op": "u", "_cdc_seq": 1, "id": 1, "note": "second"}
    mirror.run(changed, job=in_driver(small_file_bytes=0))
    assert [row["note"] for _, row in sorted(mirror.rows().items())][:3] == [
        "first",
        "second",
        "first",
    ]
    assert not list(tmp_path.glob("ingestd-*"))


class FullDisk(DriverMerge):
    """The driver has no room to write."""

    def _new_file(self, rows: pa.Table, key: Sequence[str]) -> Action:
        del rows, key
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_the_driver_cant_do_is_done_by_spark(mirror: Mirror) -> None:
    first = {"_cdc_op": "r", "_cdc_seq": 0, "id": 1, "note": "first"}
    mirror.run(first, accelerator=DriverAccelerator(merge_type=FullDisk))
    second = {"_cdc_op": "c", "_cdc_seq": 1, "id": 2, "note": "second"}
    mirror.run(second, accelerator=DriverAccelerator(merge_type=FullDisk))
    third = {"_cdc_op": "c", "_cdc_seq": 1, "id": 3, "note": "third"}
    mirror.run(third, job=by_way(read_memory_bytes=0))
    found = {n: row["note"] for n, row in mirror.rows().items()}
    assert found == {1: "first", 2: "second", 3: "third"}


class Killed(DriverMerge):
    """Ends before rows are written."""

    def apply(self, outcomes: pa.Table, key: Sequence[str], signature: Signature) -> bool:
        del outcomes, key, signature
        raise LookupError  # what stops a table leaves it as a kill does


def test_killed_between_making_a_mirror_and_its_rows(mirror: Mirror) -> None:
    first = {"_cdc_op": "r", "_cdc_seq": 0, "id": 1, "note": "first"}
    with pytest.raises(AssertionError):
        mirror.run(first, accelerator=DriverAccelerator(merge_type=Killed))
    assert mirror.spark.read.format("delta").load(mirror.path).count() == 0
    assert not latest(mirror.spark, mirror.target)
    mirror.run({"_cdc_op": "c", "_cdc_seq": 1, "id": 2, "note": "second"})
    assert {n: row["note"] for n, row in mirror.rows().items()} == {1: "first", 2: "second"}


def test_a_folder_with_other_files_gets_its_mirror(mirror: Mirror) -> None:
    folder = Path(mirror.path)
    folder.mkdir(parents=True)
    (folder / "README").write_text("whose is this?")
    mirror.run({"_cdc_op": "r", "_cdc_seq": 0, "id": 1, "note": "first"})
    assert mirror.rows()[1]["note"] == "first"


def test_a_mirror_with_mapped_names_is_left_to_spark(mirror: Mirror) -> None:
    odd = Column("a b", 25, -1, pa.string(), "text")
    table = Table(TableId("public", "kinds"), 1, (ID, odd), "d", ("id",), ("id",))
    mirror.run({"_cdc_op": "r", "_cdc_seq": 0, "id": 1, "a b": "x"}, table=table)
    mirror.run({"_cdc_op": "u", "_cdc_seq": 1, "id": 1, "a b": "y"}, table=table)
    assert mirror.rows()[1]["a b"] == "y"


def test_rows_of_another_writer_are_not_overwritten(mirror: Mirror) -> None:
    mirror.run({"_cdc_op": "r", "_cdc_seq": 0, "id": 1})
    mirror.spark.sql(f"UPDATE delta.`{mirror.path}` SET note = 'by hand'")
    mirror.raw.commit({TABLE: [{"_cdc_op": "c", "_cdc_lsn": mirror.raw.lsn, "id": 2}]})
    lake = ["--lake", str(mirror.raw.uri), "--source", mirror.raw.source]
    assert main([*lake, "--target", mirror.target, "--once"]) == 1
    [note] = mirror.spark.read.format("delta").load(mirror.path).select("note").collect()
    assert note["note"] == "by hand"


class Unknown(DriverMerge):
    """Delta lacks a class that the driver needs, or refuses it."""

    attempts: ClassVar[list[str]] = []
    wrong = "org.apache.spark.sql.delta.NoSuchClass"

    def _new_file(self, rows: pa.Table, key: Sequence[str]) -> Action:
        self.attempts.append(self.wrong)
        java_class(self.session, self.wrong).apply()
        return super()._new_file(rows, key)


class Refused(Unknown):
    """Its call fails inside of Java, as where a cluster forbids it."""

    attempts: ClassVar[list[str]] = []
    wrong = "java.util.Optional"

    def _new_file(self, rows: pa.Table, key: Sequence[str]) -> Action:
        self.attempts.append(self.wrong)
        java_class(self.session, self.wrong).empty().get()  # not of files, nor of a conflict
        return super()._new_file(rows, key)


@pytest.mark.parametrize("merge_type", [Unknown, Refused])
def test_an_unknown_delta_turns_the_accelerator_off_once(
    mirror: Mirror, merge_type: type[Unknown]
) -> None:
    accelerator = DriverAccelerator(merge_type=merge_type)
    merge_type.attempts.clear()
    with capture_logs() as logs:
        mirror.run({"_cdc_op": "r", "_cdc_seq": 0, "id": 1, "note": "a"}, accelerator=accelerator)
        change = {"_cdc_op": "u", "_cdc_seq": 1, "id": 1, "note": "b"}
        mirror.run(change, accelerator=accelerator)
    assert accelerator.switch.is_off
    assert merge_type.attempts == [merge_type.wrong]
    assert [e["event"] for e in logs if e["log_level"] != "info"] == ["accelerator.off"]
    assert mirror.rows()[1]["note"] == "b"


@pytest.mark.parametrize(
    ("java", "method", "given", "is_ordinary"),
    [
        ("java.io.FileReader", "", ["/no/such/file"], True),
        ("java.nio.file.Files", "size", [], False),  # no such method
        ("java.util.UUID", "fromString", ["no"], False),  # an argument that it refuses
        ("java.util.Optional", "get", [], False),
    ],
)
def test_only_faults_of_files_leave_the_accelerator_on(
    spark: SparkSession, java: str, method: str, given: list[str], *, is_ordinary: bool
) -> None:
    made = java_class(spark, java)
    with pytest.raises((Py4JError, PySparkException)) as caught:
        (getattr(made, method) if method else made)(*given)
    switch = Switch()
    assert switch.stays_on(spark, caught.value) is is_ordinary
    assert switch.is_off is not is_ordinary


def test_the_session_of_the_tests_has_what_the_driver_needs(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "on")
    found = accelerator_of(spark)
    assert isinstance(found, DriverAccelerator)
    assert not found.switch.is_off
    assert isinstance(accelerator_of(spark, is_wanted=False), SparkAlone)


def test_the_variable_turns_it_off(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    assert isinstance(accelerator_of(spark), SparkAlone)
    monkeypatch.setenv(VARIABLE, "no")
    with pytest.raises(ConfigError, match="'no' is neither on nor off"):
        accelerator_of(spark)
