"""Files on a local file system."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync

if TYPE_CHECKING:
    from pathlib import Path


class Seen(Fsync):
    """Notes the modes of files when they are made durable, under whatever name."""

    def __init__(self) -> None:
        self.modes: dict[str, int] = {}

    def file(self, path: Path) -> None:
        self.modes[path.name] = stat.S_IMODE(path.stat().st_mode)
        super().file(path)


@pytest.mark.parametrize("umask", [0o000, 0o027, 0o077])
def test_files_are_created_with_the_umask(tmp_path: Path, umask: int) -> None:
    seen = Seen()
    store = LocalStore(tmp_path / "lake", seen)
    before = os.umask(umask)
    try:
        store.make_folder("a/b")
        assert store.put_if_absent("a/b/0.json", b"{}")
        assert not store.put_if_absent("a/b/0.json", b"{}")
        with store.create("a/b/part.parquet") as file:
            file.write(b"PAR1")
    finally:
        os.umask(before)
    temporary = [name for name in seen.modes if name.startswith(".0.json.")]
    assert len(temporary) == 2
    assert set(seen.modes.values()) == {0o666 & ~umask}
    made = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    folder, file_mode = 0o777 & ~umask, 0o666 & ~umask
    assert made == {
        "lake": folder, "a": folder, "b": folder, "0.json": file_mode, "part.parquet": file_mode,
    }  # fmt: skip
