"""`ingestd check` of a local lake."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from ingestd.lake.check import probe

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_probe_of_a_missing_lake_leaves_nothing(tmp_path: Path) -> None:
    found = probe(str(tmp_path / "a" / "b" / "lake"))

    assert (found.level, found.detail) == ("ok", "writable")
    assert list(tmp_path.iterdir()) == []


def test_a_path_where_no_folder_can_be_created_is_reported() -> None:
    found = probe("/proc/nope/lake")
    assert (found.level, found.detail) == (
        "fail",
        "lake /proc/nope/lake: no folder can be created there",
    )
    assert "set `lake.uri` to a folder" in str(found.remedy)


def test_an_existing_lake_is_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "lake" / "shop").mkdir(parents=True)
    (tmp_path / "empty").mkdir()

    assert probe(str(tmp_path / "lake")).level == "ok"
    assert probe(str(tmp_path / "empty")).level == "ok"
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == [
        "empty",
        "lake",
        "lake/shop",
    ]


def test_what_stands_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    found = probe(str(tmp_path / "file" / "lake"))

    assert found.level == "fail"
    assert "a file exists where a folder should be" in found.detail
    assert found.remedy


def test_a_file_system_without_hard_links_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)

    found = probe(str(tmp_path / "lake"))

    assert found.level == "fail"
    assert "no hard links" in found.detail
    assert list(tmp_path.iterdir()) == []


def test_one_writer_a_commit_that_overwrites_another_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(made: str, target: str, *, src_dir_fd: int | None, **_: object) -> None:
        os.replace(made, target, src_dir_fd=src_dir_fd, dst_dir_fd=src_dir_fd)

    monkeypatch.setattr(os, "link", link)

    found = probe(str(tmp_path / "lake"))

    assert found.level == "fail"
    assert "overwrite each other" in found.detail
    assert list(tmp_path.iterdir()) == []
