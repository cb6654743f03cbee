"""A log is a list of files, and of folders of files: anything else is the fault of its table (I8).

deltalake walks through all of it, also through names with a dot and folders that it does not know.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingestd.lake.delta.append_log import AppendLog, Creation
from ingestd.lake.delta.log import MOST_VERSION, TableLog
from ingestd.lake.delta.log_files import ensure_readable_log
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync
from ingestd.lake.store.store import open_store
from ingestd.model.errors import FolderError
from tests.harness.hostile_folder import PROTOCOL, commit_of, make_table, metadata

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.attack("lake writer")

UUID = "016ae953-37a9-438e-8683-9a9a4a79a395"


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
        made.bind(path.name)  # the path is too long


KINDS: dict[str, Callable[[Path], None]] = {
    "link": lambda path: path.symlink_to("."),
    "link out": lambda path: path.symlink_to("/usr"),
    "pipe": os.mkfifo,
    "socket": _socket,
    "folder": Path.mkdir,
    "file": Path.touch,
}
NO_NAMES = ["\udcff\udcfe", "a\nb"]
NAMES = [".x", "0", "zz", "_last_checkpoint.x", "zz (os error 28)", *NO_NAMES]
ODD = [(at, n, k) for at in ("", "zz", ".zz") for n in NAMES for k in [*KINDS][:4]]
ODD += [("", name, "file") for name in NO_NAMES]
ODD += [(at, "in", "folder") for at in ("zz", ".zz", "_sidecars")]


@pytest.mark.parametrize(("at", "name", "kind"), ODD, ids=ascii)
def test_what_is_no_file_of_a_log_is_refused(tmp_path: Path, at: str, name: str, kind: str) -> None:
    log = AppendLog(open_store(str(tmp_path), None), "t", "ingestd/x")
    log.load()
    log.create(Creation(pa.schema([("id", pa.int64())]), {}))
    path = tmp_path / "t" / "_delta_log" / at / name
    path.parent.mkdir(exist_ok=True)
    KINDS[kind](path)
    for use in (log.load, lambda: log.add_columns([pa.field("more", pa.int64())])):
        with pytest.raises(FolderError, match=r"/_delta_log/") as caught:
            use()
        assert caught.value.what.isprintable()
        assert f"lake {tmp_path}/t: {tmp_path}/t/_delta_log/" in caught.value.what
        remedy = str(caught.value.remedy)
        assert remedy.isprintable()
        assert re.match(r"move it away: mv \S.* \"\$\(mktemp -d\)\"; ", remedy)


def test_what_other_programs_leave_in_a_log_does_no_harm(tmp_path: Path) -> None:
    log = make_table(tmp_path / "t")
    for name in [
        *(f".{0:020}.json.crc", f"{0:020}.crc", f".{1:020}.json.{UUID}.tmp", "._last_checkpoint"),
        *(f".{1:020}.json.0a1b2c3d.torn", ".nfs000000000123", "_last_vacuum_info", "notes #1.txt"),
        *(f"_commits/{1:020}.{UUID}.json", f"_staged_commits/{1:020}.{UUID}.json"),
        *(f"_changelog/{0:020}.json", "_sidecars/a.parquet", ".hidden/x", "empty/x"),
    ]:
        path = log / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    (log / "empty" / "x").unlink()
    table = TableLog(open_store(str(tmp_path), None), "t", "x")
    table.load()
    assert table.version == 0


class _Watched(LocalStore):
    """Records which files are opened."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, Fsync())
        self.opened: list[str] = []

    def open(self, path: str) -> pa.NativeFile:
        self.opened.append(path)
        return super().open(path)


@pytest.mark.parametrize("form", ["json", "parquet"])
def test_a_sidecar_is_read_once(tmp_path: Path, form: str) -> None:
    log = make_table(tmp_path / "t")
    (log / "_sidecars").mkdir()
    stats = pa.StructArray.from_arrays([pa.array(["{}"])], names=["stats"])
    pq.write_table(pa.table({"add": stats}), log / "_sidecars" / "a.parquet")
    number, stem = 20_000, f"{0:020}.checkpoint.{UUID}"
    if form == "json":
        line = json.dumps({"sidecar": {"path": "a.parquet", "sizeInBytes": 1}})
        (log / f"{stem}.json").write_text(f"{line}\n" * number)
    else:
        paths = pa.StructArray.from_arrays([pa.array(["a.parquet"] * number)], names=["path"])
        pq.write_table(pa.table({"sidecar": paths}), log / f"{stem}.parquet")
    store = _Watched(tmp_path)
    ensure_readable_log(store, "t")
    assert store.opened.count("t/_delta_log/_sidecars/a.parquet") == 1


def test_a_large_json_checkpoint_is_not_read(tmp_path: Path) -> None:
    log = make_table(tmp_path / "t")
    with (log / f"{0:020}.checkpoint.{UUID}.json").open("wb") as file:
        file.truncate(511 << 20)  # sparse: it takes no disk
    with pytest.raises(FolderError, match=f"has {511 << 20} bytes, more than"):
        TableLog(open_store(str(tmp_path), None), "t", "x").load()


@pytest.mark.parametrize("version", [MOST_VERSION + 1, (1 << 63) - 1])
def test_a_version_that_no_table_reaches_is_refused(tmp_path: Path, version: int) -> None:
    log = make_table(tmp_path / "t")
    table = TableLog(open_store(str(tmp_path), None), "t", "x")
    table.load()
    table.handle.create_checkpoint()
    [made] = log.glob("*.checkpoint.parquet")
    made.rename(log / f"{version:020}.checkpoint.parquet")
    (log / "_last_checkpoint").write_text(json.dumps({"version": version, "size": 3}))
    (log / f"{0:020}.json").unlink()
    with pytest.raises(FolderError, match=f"version {version} is more than {MOST_VERSION}"):
        table.load()


@pytest.mark.parametrize("content", ["", "{"])
def test_two_torn_commits_are_not_set_aside(tmp_path: Path, content: str) -> None:
    log = make_table(tmp_path / "t", *[content] * 50)
    before = sorted(log.iterdir())
    table = TableLog(open_store(str(tmp_path), None), "t", "x")
    with pytest.raises(FolderError, match="commits 49 and 50 are incomplete"):
        table.load(lambda _version: None)
    assert sorted(log.iterdir()) == before


def test_few_checkpoints_are_set_aside(tmp_path: Path) -> None:
    log = make_table(tmp_path / "t", *[commit_of([PROTOCOL, metadata()])] * 20)
    for version in range(1, 21):
        (log / f"{version:020}.checkpoint.parquet").write_bytes(b"PAR1")
    table = TableLog(open_store(str(tmp_path), None), "t", "x")
    with contextlib.suppress(FolderError):
        table.load(lambda _version: None)
    assert len(list(log.glob(".*.torn"))) <= 2
