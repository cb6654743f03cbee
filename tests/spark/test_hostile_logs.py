"""A writer of a table's folder can't make a Spark job read other files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable as RustTable
from deltalake import write_deltalake

from ingestd.lake.delta.log_files import MOST_COMMIT_BYTES
from ingestd.model.errors import FolderError
from spark_jobs.accelerator.class_log import log_entries
from spark_jobs.accelerator.class_tables import ClassTables
from spark_jobs.accelerator.driver_files import deleted_rows
from spark_jobs.delta_log.commits import Signature
from spark_jobs.delta_log.sql_tables import SqlTables, name_within
from spark_jobs.delta_log.table_files import vector_files_of
from spark_jobs.delta_log.tables import DeltaTables
from spark_jobs.engine.epoch_poll import EpochPoll
from spark_jobs.epochs import latest
from spark_jobs.history import as_of_lsn
from spark_jobs.history import main as history_main
from spark_jobs.lake.source_lake import SourceLake
from tests.harness.hostile_folder import deep_parquet, plant_checkpoint
from tests.spark.test_mirror import Mirror, change, mirror, raw, table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ingestd.model.schema import Table
    from tests.harness.raw_lake import RawLake

__all__ = ["mirror", "raw"]

pytestmark = pytest.mark.attack("lake writer")
CANARY = 1_666_666_661


def thorough(value: str) -> Any:
    return pytest.param(value, marks=pytest.mark.thorough)


KINDS = ["up", "encoded", "slash", "absolute", "scheme", "link", "folder"]


def lead_out(folder: Path, name: str, out: Path, kind: str) -> str:
    """Move a table's file out of its folder; return a path that leads there for Delta."""
    out.mkdir(exist_ok=True)
    there = out / f"{folder.name}-{name}"
    shutil.move(folder / name, there)
    ups = ".." + "/.." * (len(folder.parts) - len(out.parent.parts) - 1)
    if kind == "link":
        (folder / "part-link.parquet").symlink_to(there)
        return "part-link.parquet"
    if kind == "folder":
        (folder / "linked").symlink_to(out)
        return f"linked/{there.name}"
    return {
        "up": f"{ups}/{out.name}/{there.name}",
        "encoded": f"{ups}/{out.name}/{there.name}".replace("..", "%2e%2E"),
        "slash": f"{ups}/{out.name}/{there.name}".replace("/", "%2F"),
        "absolute": str(there),
        "scheme": there.as_uri(),
    }[kind]


def newest_commit(folder: Path) -> Path:
    return max((folder / "_delta_log").glob("*.json"))


def entries(commit: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in commit.read_text().splitlines()]


def poison(folder: Path, out: Path, kind: str, *, has_statistics: bool = False) -> None:
    """Have the newest commit name its file elsewhere. `has_statistics`: with its statistics."""
    commit = newest_commit(folder)
    found = entries(commit)
    for entry in found:
        if "add" in entry:
            entry["add"]["path"] = lead_out(folder, entry["add"]["path"], out, kind)
            if not has_statistics:
                entry["add"].pop("stats")
    commit.write_text("".join(json.dumps(entry) + "\n" for entry in found))
    commit.with_name(f".{commit.name}.crc").unlink(missing_ok=True)


def keep_in_checkpoint(folder: Path) -> None:
    """Have a checkpoint name the files of the newest commit, and that no more."""
    RustTable(str(folder)).create_checkpoint()
    commit = newest_commit(folder)
    kept = [entry for entry in entries(commit) if "add" not in entry]
    commit.write_text("".join(json.dumps(entry) + "\n" for entry in kept))


def add_poison(folder: Path, out: Path, kind: str) -> None:
    """Commit an apparent compaction of the table's first file with rows."""
    commit = newest_commit(folder)
    version = int(commit.stem)
    logs = [newest_commit(folder).with_name(f"{v:020}.json") for v in range(version, -1, -1)]
    [*adds] = [e["add"] for log in logs if log.exists() for e in entries(log) if "add" in e]
    add = next(a for a in adds if (folder / a["path"]).exists())
    remove = {"path": add["path"], "dataChange": False, "deletionTimestamp": 1}
    path = lead_out(folder, add["path"], out, kind)
    made = [
        {"commitInfo": {"operation": "OPTIMIZE", "timestamp": 1}},
        {"remove": remove},
        {"add": {**add, "path": path, "dataChange": False}},
    ]
    text = "".join(json.dumps(entry) + "\n" for entry in made)
    commit.with_name(f"{version + 1:020}.json").write_text(text)


Asking = Callable[[], DeltaTables]
EACH_WAY = pytest.mark.parametrize("ask", [ClassTables, SqlTables])


@pytest.fixture
def plain(lake: Path) -> Path:
    """A table of three files."""
    folder = lake / "shop" / "public" / "plain"
    for n in range(3):
        write_deltalake(str(folder), pa.table({"id": pa.array([n], pa.int64())}), mode="append")
    return folder


@pytest.mark.parametrize(
    "kind", [kind if kind in {"up", "link"} else thorough(kind) for kind in KINDS]
)
@EACH_WAY
@pytest.mark.parametrize("place", ["commit", thorough("checkpoint"), thorough("older version")])
def test_a_file_elsewhere_is_not_read(
    spark: SparkSession, plain: Path, tmp_path: Path, *, kind: str, place: str, ask: Asking
) -> None:
    poison(plain, tmp_path / "out", kind)
    if place == "checkpoint":
        keep_in_checkpoint(plain)
    version = 2 if place == "older version" else None
    tables = ask()
    for read in (tables.rows, tables.rows, ask().rows):
        with pytest.raises(FolderError, match=f"lake table {plain}, version 2: its log names"):
            read(spark, str(plain), version)
    with pytest.raises(FolderError, match="its log names"):
        tables.ensure(spark, str(plain))
    assert sorted(row["id"] for row in tables.rows(spark, str(plain), 1).collect()) == [0, 1]


@EACH_WAY
def test_rows_are_of_the_snapshot_that_was_judged(
    spark: SparkSession, plain: Path, tmp_path: Path, ask: Asking
) -> None:
    tables = ask()
    rows = tables.rows(spark, str(plain))
    write_deltalake(str(plain), pa.table({"id": pa.array([CANARY], pa.int64())}), mode="append")
    poison(plain, tmp_path / "out", "up")
    assert sorted(row["id"] for row in rows.collect()) == [0, 1, 2]
    with pytest.raises(FolderError, match="version 3"):
        tables.rows(spark, str(plain))


@EACH_WAY
def test_a_checkpoint_put_below_what_was_judged_is_judged_too(
    spark: SparkSession, plain: Path, tmp_path: Path, ask: Asking
) -> None:
    tables = ask()
    assert tables.rows(spark, str(plain)).count() == 3
    poison(plain, tmp_path / "out", "up")
    keep_in_checkpoint(plain)
    write_deltalake(str(plain), pa.table({"id": pa.array([3], pa.int64())}), mode="append")
    with pytest.raises(FolderError, match="version 3"):
        tables.rows(spark, str(plain))


@pytest.mark.thorough
@pytest.mark.parametrize("told", ["../../x", "%2e%2e", "linked", "p/abs"])
def test_a_deletion_vector_elsewhere_is_not_read(
    spark: SparkSession, tmp_path: Path, told: str
) -> None:
    folder = tmp_path / "t"
    rows = spark.range(0, 1000, numPartitions=1).write.format("delta")
    rows.option("delta.enableDeletionVectors", "true").save(str(folder))
    spark.sql(f"DELETE FROM delta.`{folder}` WHERE id = 3")
    tables = ClassTables()
    assert tables.rows(spark, str(folder)).count() == 999
    commit = newest_commit(folder)
    found = entries(commit)
    [add] = [entry["add"] for entry in found if "add" in entry]
    vector = add["deletionVector"]
    assert vector_files_of(vector, "") == [file.name for file in folder.glob("*.bin")]
    if told == "linked":
        [file] = folder.glob("*.bin")
        file.rename(tmp_path / "moved.bin")
        file.symlink_to(tmp_path / "moved.bin")
    elif told == "p/abs":
        vector |= {"storageType": "p", "pathOrInlineDv": str(folder / "a.bin")}
    else:
        vector["pathOrInlineDv"] = told + vector["pathOrInlineDv"]
    newer = commit.with_name(f"{int(commit.stem) + 1:020}.json")
    newer.write_text("".join(json.dumps(entry) + "\n" for entry in found if "add" in entry))
    with pytest.raises(FolderError, match=r"stored elsewhere|is a symbolic link"):
        tables.rows(spark, str(folder))
    with pytest.raises(FolderError, match=r"stored elsewhere|is a symbolic link"):
        deleted_rows(spark, str(folder), add)


def test_a_look_for_epochs_reads_no_file_elsewhere(
    spark: SparkSession, raw: RawLake, tmp_path: Path
) -> None:
    a = table("a")
    for _ in range(2):
        insert(raw, {"a": a}, 1)
    lake = SourceLake(spark, str(raw.uri), "shop")
    poison(Path(lake.epochs_path), tmp_path / "out", "up")
    with pytest.raises(FolderError, match=r"_epochs.* its log names"):
        EpochPoll(lake, lake.require().table_id).look(None)
    with pytest.raises(FolderError, match=r"_epochs.* its log names"):
        lake.epochs()


@pytest.mark.parametrize(
    ("path", "file", "is_own"),
    [
        ("/lake/t", "file:///lake/t/part-1.parquet", True),
        ("/lake/t", "file:/lake/t/part-1.parquet", True),
        ("/la ke/t", "file:///la%20ke/t/ab/part-1.parquet", True),
        ("/la%ke/t", "file:/la%ke/t/part-1.parquet", True),
        ("s3a://b/t", "s3a://b/t/part-1.parquet", True),
        ("s3a://b/t", "s3a://c/t/part-1.parquet", False),
        ("/lake/t", "file:///lake/t2/part-1.parquet", False),
        ("/lake/t", "file:///lake/t/../t2/part-1.parquet", False),
        ("/lake/t", "file:///lake/t/%2e%2e/t2/part-1.parquet", False),
        ("/lake/t", "file:///lake/t", False),
        ("/lake/t", "", False),
    ],
)
def test_what_spark_says_it_reads(path: str, file: str, *, is_own: bool) -> None:
    if is_own:
        assert name_within(path, file).endswith("part-1.parquet")
    else:
        with pytest.raises(FolderError, match="its log names"):
            name_within(path, file)


def insert(raw: RawLake, tables: dict[str, Table], number: int) -> None:
    lsn = raw.next_lsn()
    raw.commit({t: [change("c", number, "x", lsn, 1)] for t in tables.values()})


def folder_of(raw: RawLake, name: str) -> Path:
    return Path(raw.uri, "shop/public", name)


def test_a_deep_checkpoint_stops_one_table_of_a_mirror(
    mirror: Mirror, raw: RawLake, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would overflow the stack of a task, which ends the JVM: with it the job of all tables."""
    every = {name: table(name, oid=oid) for oid, name in enumerate(["bad", "fine"], 1)}
    insert(raw, every, 1)
    raw.record("live", *every.values())
    insert(raw, every, 2)
    plant_checkpoint(folder_of(raw, "bad") / "_delta_log", deep_parquet(200_000))
    code = mirror.run()
    printed = capsys.readouterr().err
    assert list(latest(mirror.spark, mirror.target)) == ["public.fine"], printed
    assert "its schema is nested too deep" in printed
    assert code == 1
    assert [row[0] for row in mirror.rows(every["fine"])] == [1, 2]


@pytest.mark.thorough
def test_jobs_stop_the_tables_of_which_files_are_elsewhere(
    mirror: Mirror, raw: RawLake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """First of raw tables, then of targets: the statement that would read them is not run."""
    every = {name: table(name, oid=oid) for oid, name in enumerate(["raw", "own", "fine"], 1)}
    lake = ["--lake", str(raw.uri), "--source", "shop", "--target"]
    runs: dict[str, Callable[[], int]] = {
        "mirror": mirror.run,
        "soft": lambda: Mirror(mirror.spark, raw, tmp_path / "soft").run("--soft-deletes"),
        "history": lambda: history_main([*lake, str(tmp_path / "history"), "--once"]),
    }
    insert(raw, every, 1)
    raw.record("live", *every.values())
    for job, run in runs.items():
        assert run() == 0, job
        add_poison(tmp_path / job / "public/own", tmp_path / f"out-{job}", "up")
    insert(raw, every, CANARY)
    lsn = raw.next_lsn()
    raw.commit({every["own"]: [change("u", 1, "y", lsn, 1)]})  # the driver reads its file, too
    poison(folder_of(raw, "raw"), tmp_path / "out", "up")
    capsys.readouterr()
    for job, run in runs.items():
        assert run() == 1, job
        said = capsys.readouterr().err
        assert f"table public.raw: lake table {folder_of(raw, 'raw')}, version " in said, said
        assert f"table public.own: lake table {tmp_path / job / 'public/own'}" in said, said
        assert "table public.fine" not in said
    assert list(latest(mirror.spark, mirror.target)) == ["public.fine"]
    assert [row[0] for row in mirror.rows(every["fine"])] == [1, CANARY]
    rows = as_of_lsn(mirror.spark, str(tmp_path / "history"), "public.fine", raw.lsn)
    assert sorted(row["id"] for row in rows.collect()) == [1, CANARY]
    with pytest.raises(FolderError, match="public/own, version"):
        as_of_lsn(mirror.spark, str(tmp_path / "history"), "public.own", raw.lsn)


@pytest.mark.thorough
@pytest.mark.skipif(os.getuid() != 0, reason="a link is given to another user")
def test_jobs_stop_tables_whose_folder_became_a_foreign_link(
    mirror: Mirror, raw: RawLake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    every = {name: table(name, oid=oid) for oid, name in enumerate(["raw", "fine"], 1)}
    lake = ["--lake", str(raw.uri), "--source", "shop", "--target"]
    runs: dict[str, Callable[[], int]] = {
        "mirror": mirror.run,
        "history": lambda: history_main([*lake, str(tmp_path / "history"), "--once"]),
    }
    insert(raw, every, 1)
    raw.record("live", *every.values())
    assert {run() for run in runs.values()} == {0}
    insert(raw, every, CANARY)
    folder, out = folder_of(raw, "raw"), tmp_path / "out"
    folder.rename(out)
    folder.symlink_to(out)
    os.lchown(folder, 65534, -1)
    capsys.readouterr()
    new = Mirror(mirror.spark, raw, tmp_path / "new")
    for job, run in {**runs, "new": new.run}.items():
        assert run() == 1, job
        said = capsys.readouterr().err
        assert f"{folder} is a symbolic link that another user made" in said, said
        assert "table public.fine" not in said
        assert f"mv {folder} " in said
    for made in (mirror, new):
        assert CANARY in [row[0] for row in made.rows(every["fine"])]
        assert list(latest(mirror.spark, made.target)) == ["public.fine"]
    os.lchown(folder, os.getuid(), -1)  # as the remedy says
    assert {run() for run in runs.values()} == {0}
    assert CANARY in [row[0] for row in mirror.rows(every["raw"])]


def test_a_commit_that_is_too_large_is_not_read_into_the_driver(
    spark: SparkSession, tmp_path: Path
) -> None:
    folder = str(tmp_path / "t")
    write_deltalake(folder, pa.table({"id": [1]}))
    path = tmp_path / "t/_delta_log" / f"{1:020}.json"
    for content, why in (
        (b'{"commitInfo":{"x":"' + b"a" * MOST_COMMIT_BYTES + b'"}}', "bytes, more than"),
        (b'{"add":{"path":7,"dataChange":true}}', "wrong type"),
        (b"[" * 100_000, "nested more than 100 deep"),
    ):
        path.write_bytes(content)
        with pytest.raises(FolderError, match=why) as refused:
            log_entries(spark, folder, 1)
        assert f"mv {path} " in str(refused.value.remedy)
    assert log_entries(spark, folder, 2) is None
    found = log_entries(spark, folder, 0)
    assert found is not None
    assert any("metaData" in entry for entry in found)
    assert Signature.parse("[" * 100_000) is Signature.parse('{"epoch":1e999}') is None


def forge_type(raw: RawLake, column: str, kind: str) -> None:
    """Record that a column was dropped, and added again with this text as its type."""
    folder = Path(raw.uri, "shop/_tables")
    recorded = RustTable(str(folder)).to_pyarrow_table()
    last = recorded.sort_by("at").to_pylist()[-1]
    for number, is_there in enumerate((False, True), 1):
        columns = [c for c in last["columns"] if is_there or c["name"] != column]
        forged = {
            **last,
            "at": last["at"] + timedelta(seconds=number),
            "at_lsn": last["at_lsn"] + number,
            "schema_version": last["schema_version"] + number,
            "columns": [c | ({"delta_type": kind} if c["name"] == column else {}) for c in columns],
        }
        write_deltalake(str(folder), pa.Table.from_pylist([forged], recorded.schema), mode="append")


def test_a_type_in_the_records_runs_no_sql(
    mirror: Mirror, raw: RawLake, capsys: pytest.CaptureFixture[str]
) -> None:
    """Functions of Spark call Java, and read files. Only its table stops."""
    orders, other = table("orders"), table("other", oid=2)
    insert(raw, {"orders": orders, "other": other}, 1)
    raw.record("live", other)
    raw.record("live", orders)  # the newest is forged
    assert mirror.run("--no-accelerator") == 0
    forge_type(
        raw,
        "note",
        "string) IS NULL AND reflect('java.lang.System', 'setProperty', 'ran', 'sql') IS NULL"
        " AND CAST(NULL AS string",
    )
    raw.lsn += 100
    insert(raw, {"orders": orders, "other": other}, 2)
    assert mirror.run("--no-accelerator") == 1
    assert "which is no type" in capsys.readouterr().err
    assert [row[0] for row in mirror.rows(other)] == [1, 2]
    seen = mirror.spark.sql("SELECT reflect('java.lang.System', 'getProperty', 'ran') AS ran")
    assert [row["ran"] for row in seen.collect()] != ["sql"]
