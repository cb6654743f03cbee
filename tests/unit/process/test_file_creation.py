from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from ingestd.process.file_creation import append, create, is_shared, make_private_folder, replace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.attack("account")
NOBODY = 65534


def _nothing(path: Path, _: Path) -> None:
    assert not path.exists()


def _file(path: Path, _: Path) -> None:
    path.write_text("old")
    path.chmod(0o644)


def _of_another(path: Path, _: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a file of another")
    path.write_text("old")
    os.chown(path, NOBODY, NOBODY)


def _hard_link(path: Path, elsewhere: Path) -> None:
    elsewhere.write_text("old")
    os.link(elsewhere, path)


def _live_link(path: Path, elsewhere: Path) -> None:
    elsewhere.write_text("old")
    path.symlink_to(elsewhere)


def _dangling_link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def _relative_link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(f"../{elsewhere.parent.name}/{elsewhere.name}")


def _loop(path: Path, _: Path) -> None:
    path.symlink_to(path.name)


def _link_to_folder(path: Path, elsewhere: Path) -> None:
    elsewhere.mkdir()
    path.symlink_to(elsewhere)


def _folder(path: Path, _: Path) -> None:
    path.mkdir()


def _pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


def _link_to_pipe(path: Path, elsewhere: Path) -> None:
    os.mkfifo(elsewhere)
    path.symlink_to(elsewhere)


REPLACED = (_file, _of_another, _hard_link, _live_link, _dangling_link, _relative_link, _loop)
KEPT = (_link_to_folder, _folder, _pipe, _link_to_pipe)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A name in a folder that all may write, as /tmp is."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder / "file"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    (tmp_path / "victim").mkdir()
    return tmp_path / "victim" / "target"


def state(path: Path) -> object:
    """What a name is, without following it or opening a pipe."""
    if not os.path.lexists(path):
        return None
    found = path.lstat()
    content = path.read_bytes() if stat.S_ISREG(found.st_mode) else b""
    return found.st_ino, found.st_mode, found.st_uid, content


@pytest.mark.parametrize("make", [*REPLACED, *KEPT])
def test_create_takes_no_name_that_exists(
    path: Path, elsewhere: Path, make: Callable[[Path, Path], None]
) -> None:
    make(path, elsewhere)
    before = state(path), state(elsewhere)
    with pytest.raises(FileExistsError):
        create(path, "secret")
    assert (state(path), state(elsewhere)) == before
    assert [found.name for found in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("make", [_nothing, *REPLACED])
def test_replace_makes_a_file_of_its_own(
    path: Path, elsewhere: Path, make: Callable[[Path, Path], None]
) -> None:
    make(path, elsewhere)
    before = state(elsewhere)
    replace(path, "secret")
    found = path.lstat()
    assert (stat.S_IFMT(found.st_mode), found.st_uid) == (stat.S_IFREG, os.geteuid())
    assert (stat.S_IMODE(found.st_mode), path.read_text()) == (0o600, "secret")
    assert state(elsewhere) == before
    assert [found.name for found in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("make", KEPT)
def test_replace_refuses_what_is_no_file(
    path: Path, elsewhere: Path, make: Callable[[Path, Path], None]
) -> None:
    make(path, elsewhere)
    before = state(path), state(elsewhere)
    with pytest.raises(OSError, match="not a regular file"):
        replace(path, "secret")
    assert (state(path), state(elsewhere)) == before
    assert [found.name for found in path.parent.iterdir()] == ["file"]


def test_modes_are_less_the_umask(path: Path) -> None:
    before = os.umask(0o027)
    try:
        create(path, "", 0o666)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_append_opens_no_link(path: Path, elsewhere: Path) -> None:
    for make in (_live_link, _dangling_link):
        make(path, elsewhere)
        before = state(elsewhere)
        with pytest.raises(OSError, match="symbolic link"):
            append(path)
        assert state(elsewhere) == before
        path.unlink()
        elsewhere.unlink(missing_ok=True)
    for _ in range(2):
        with append(path) as file:
            file.write(b"line\n")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("line\nline\n", 0o600)


@pytest.mark.parametrize("make", [_file, _live_link, _dangling_link, _link_to_folder])
def test_a_private_folder_is_no_link_and_no_file(
    path: Path, elsewhere: Path, make: Callable[[Path, Path], None]
) -> None:
    make(path, elsewhere)
    before = state(path), state(elsewhere)
    with pytest.raises(OSError, match=r"exists|not a folder"):
        make_private_folder(path)
    assert (state(path), state(elsewhere)) == before


def test_a_private_folder_is_this_users_alone(path: Path) -> None:
    make_private_folder(path)
    make_private_folder(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert not is_shared(path)
    for mode in (0o701, 0o710, 0o777):
        path.chmod(mode)
        with pytest.raises(PermissionError):
            make_private_folder(path)
    assert is_shared(path)
    path.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)
        with pytest.raises(PermissionError):
            make_private_folder(path)
        assert is_shared(path)
