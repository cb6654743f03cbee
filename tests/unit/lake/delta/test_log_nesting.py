"""A log that is nested deep is a fault of its table; deltalake would end the process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ingestd
from ingestd.lake.delta.append_log import AppendLog, Creation
from ingestd.lake.delta.commit import is_complete_commit, parse_commit
from ingestd.lake.delta.log import TableLog
from ingestd.lake.delta.log_nesting import FEW_BRACKETS, MOST_DEPTH
from ingestd.lake.store.paths import OddFileError
from ingestd.lake.store.store import open_store
from ingestd.model.errors import FolderError
from tests.harness.hostile_folder import (
    PROTOCOL,
    add,
    commit_of,
    deep_commits,
    deep_list,
    deep_parquet,
    deep_statistics,
    make_table,
    metadata,
    plant_checkpoint,
    plant_commit,
)

pytestmark = pytest.mark.attack("lake writer")

DEEP = 200_000
UUID = "016ae953-37a9-438e-8683-9a9a4a79a395"
OPENED_EACH = """
import sys
from ingestd.lake.delta.log import TableLog
from ingestd.lake.store.store import open_store
from ingestd.model.errors import FolderError
store = open_store(sys.argv[1], None)
for folder in store.folders(""):
    table = TableLog(store, folder, "x")
    try:
        table.load()
        table.handle.get_add_actions()
        print("opened", folder)
    except FolderError as error:
        print("refused", error.what[-200:])
"""


def open_each(lake: Path) -> list[str]:
    """Open all tables in a process that may die of it."""
    command = [sys.executable, "-c", OPENED_EACH, str(lake)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout.splitlines()


def test_a_deep_commit_is_refused_wherever_it_is_deep(tmp_path: Path) -> None:
    count = 0
    for place, content in deep_commits(DEEP):
        make_table(tmp_path / place, content)
        count += 1
    found = open_each(tmp_path)
    assert len(found) == count
    assert all(line.startswith("refused") for line in found), found


def test_a_deep_checkpoint_is_refused_in_every_form(tmp_path: Path) -> None:
    deep = deep_parquet(5_000)
    sidecar = {"sidecar": {"path": "s.parquet", "sizeInBytes": len(deep), "modificationTime": 1}}
    for number, form in enumerate(
        ["checkpoint.parquet", f"checkpoint.{UUID}.parquet", f"checkpoint.{1:010}.{1:010}.parquet"]
    ):
        plant_checkpoint(make_table(tmp_path / f"parquet {number}"), deep, form)
    statistics = deep_statistics(tmp_path.with_name("made"), DEEP)
    plant_checkpoint(make_table(tmp_path / "statistics"), statistics)
    for number, path in enumerate(["s.parquet", "../s.parquet", "%2e%2e/s.parquet", "/s.parquet"]):
        log = make_table(tmp_path / f"sidecar {number}")
        (log / "_sidecars").mkdir()
        (log / "_sidecars" / "s.parquet").write_bytes(deep)
        sidecar["sidecar"]["path"] = path
        content = commit_of([PROTOCOL, metadata(), sidecar])
        plant_checkpoint(log, content.encode(), f"checkpoint.{UUID}.json")
    found = open_each(tmp_path)
    assert len(found) == 8
    assert all(line.startswith("refused") for line in found), found


@pytest.mark.parametrize("depth", [100, 2_000, 100_000])
def test_pyarrow_survives_a_deep_data_file(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "part-1.parquet"
    path.write_bytes(deep_parquet(depth))
    opens = "import sys, pyarrow.parquet as pq\npq.ParquetFile(sys.argv[1])"
    command = [sys.executable, "-c", opens, str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "too deeply nested" in done.stderr


def test_a_deep_commit_is_refused_before_an_alteration(tmp_path: Path) -> None:
    log = AppendLog(open_store(str(tmp_path), None), "t", "ingestd/x")
    log.load()
    log.create(Creation(pa.schema([("id", pa.int64())]), {}))
    _ = log.handle
    for _, content in deep_commits(MOST_DEPTH + FEW_BRACKETS):
        plant_commit(tmp_path / "t" / "_delta_log", content)
        with pytest.raises(FolderError):
            log.add_columns([pa.field("more", pa.int64())])
        (tmp_path / "t" / "_delta_log" / f"{1:020}.json").unlink()


def test_a_large_commit_of_usual_depth_is_read(tmp_path: Path) -> None:
    fields = {f"c{n}": {"a": [n]} for n in range(200)}
    many = [add(f"part-{n}.parquet", stats=json.dumps({"minValues": fields})) for n in range(50)]
    make_table(tmp_path / "t", commit_of(many))
    log = TableLog(open_store(str(tmp_path), None), "t", "x")
    log.load()
    assert log.version == 1


@pytest.mark.parametrize("place", ["tags", "statistics"])
def test_the_limit_of_depth_is_exact(place: str) -> None:
    def content(depth: int) -> bytes:
        filler = ["[]"] * FEW_BRACKETS  # so that it is examined
        if place == "statistics":
            return commit_of([add(stats=f"[{deep_list(depth - 1)},{','.join(filler)}]")]).encode()
        tags = {"a": json.loads(deep_list(depth - 3)), "b": [[] for _ in filler]}
        return commit_of([add(tags=tags)]).encode()

    parse_commit(content(MOST_DEPTH), "here")
    with pytest.raises(OddFileError, match=f"more than {MOST_DEPTH} deep"):
        parse_commit(content(MOST_DEPTH + 1), "here")


def test_a_truncated_large_commit_counts_as_torn() -> None:
    many = [add(f"part-{n}.parquet", stats=json.dumps({"minValues": {}})) for n in range(2_000)]
    content = commit_of(many).encode()
    assert is_complete_commit(content, "here")
    assert not is_complete_commit(content[:-20], "here")


def test_a_checkpoint_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    log = make_table(tmp_path / "t")
    twice = pa.table([pa.array(["a"]), pa.array(["b"])], names=["add", "add"])
    pq.write_table(twice, tmp_path / "x.parquet")
    plant_checkpoint(log, (tmp_path / "x.parquet").read_bytes())
    with pytest.raises(FolderError, match="a column twice"):
        TableLog(open_store(str(tmp_path), None), "t", "x").load()


def test_deltalake_opens_tables_only_after_the_checks() -> None:
    root = Path(ingestd.__file__).parent.parent
    opens = re.compile(r"\bDeltaTable\(|\.update_incremental\(")
    found = {
        path.relative_to(root).as_posix()
        for path in (root / "ingestd").rglob("*.py")
        if opens.search(path.read_text())
    }
    assert found == {
        "ingestd/lake/delta/log_files.py",  # the checks
        "ingestd/lake/delta/append_log.py",  # update_incremental, after them
        "ingestd/lake/check.py",  # a probe in a folder with a random name
    }
