"""Local files: opened safely, and made durable.

They are opened only through links of trusted users, and only regular files. The operator chooses a
lake's root, which may contain links. Below it, the folders that lead to a table (the source's, the
schema's, its own) may be links made by root or by the user of this process, as with the sysctl
fs.protected_symlinks. The same applies to links on the way to a link's target. Inside a table's
folder no links are allowed. Otherwise, anyone who can write to the lake could have files elsewhere
read, written and removed. A name is used relative to a descriptor of its folder, so exchanging
either meanwhile has no effect.

A durable file's content and name survive a power failure (I1). deltalake itself never calls fsync.

Source: open(2), O_NOFOLLOW, O_PATH and O_NONBLOCK; openat(2); readlink(2); symlink(7); POSIX fsync;
fsync(2): "calling fsync() does not necessarily ensure that the entry in the directory containing
the file has also reached disk".
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from ingestd.lake.store.paths import OddFileError, parts_of

LOG = "_delta_log"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ITSELF = getattr(os, "O_PATH", 0) | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to open a link itself; without O_PATH (only on Linux) no link is followed."""
_PASSED = getattr(os, "O_PATH", 0) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags to open a folder on the way to another: being able to enter it is enough."""
_MOST_LINKS = 40
_LINKED = frozenset({errno.ELOOP, errno.ENOTDIR})
_REFERENCES = "_ref"
_ANY = "_"
"""Stands for any name in a folder."""


class OthersLinkError(OddFileError):
    """A symbolic link made by another user is at `path`."""

    def __init__(self, path: Path | str, owner: int) -> None:
        super().__init__(path, f"is a symbolic link that another user made ({_name_of(owner)})")


def _name_of(owner: int) -> str:
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return f"uid {owner}"


def kind_of(mode: int) -> str | None:
    """Return what a file is if it is not regular, else None."""
    if stat.S_ISREG(mode):
        return None
    if stat.S_ISLNK(mode):
        return "is a symbolic link"
    return "is a folder" if stat.S_ISDIR(mode) else "is not a regular file"


def table_depth(parts: Sequence[str]) -> int:
    """Return how many parts of a path in the lake lead to its folder, or to that of its table.

    The layout is that of `ingestd.lake.layout.Layout`.
    """
    folders = parts[:-1]
    depth = len(folders)
    if len(folders) > 1:
        # A schema's segment has a leading `_` only where it is mapped, as `_x00DC_n_x00EF_`.
        is_own = folders[1].startswith("_") and not folders[1].startswith("_x")
        depth = min(depth, 4 if folders[1] == _REFERENCES else 2 if is_own else 3)
    return folders.index(LOG) if LOG in folders[:depth] else depth


@contextmanager
def place_of(root: Path, path: str, depth: int | None = None) -> Iterator[tuple[int | None, str]]:
    """Yield a descriptor of a path's folder, and the name in it.

    For a name in the root itself, yield None and the full path. `depth`: how many parts may be
    links of root or of this user; by default those that lead to a table's folder. Raise
    OddFileError.
    """
    *folders, name = parts_of(path)
    if not folders:
        yield None, str(root / name)
        return
    folder = open_folder(root, folders, table_depth((*folders, name)) if depth is None else depth)
    try:
        yield folder, name
    finally:
        os.close(folder)


@contextmanager
def folder_at(root: Path, path: str) -> Iterator[int | None]:
    """Yield a descriptor of a folder; None for the root, whose path is empty.

    Raise OddFileError, as `place_of` does.
    """
    if not path:
        yield None
        return
    with place_of(root, f"{path}/{_ANY}") as (folder, _):
        yield folder


def open_folder(root: Path, folders: Sequence[str], depth: int) -> int:
    """Return a descriptor of the folder at a path of one or more names, which were checked.

    `depth`: see `place_of`. Raise OddFileError.
    """
    folder = _opened(root, folders[:1], None, may_link=depth > 0)
    for count in range(2, len(folders) + 1):
        try:
            below = _opened(root, folders[:count], folder, may_link=count <= depth)
        finally:
            os.close(folder)
        folder = below
    return folder


def make_folders(root: Path, path: str, durability: Durability) -> None:
    """Create a folder and its missing parents, durably; refuse links as `place_of` does."""
    make_folder(root, durability)
    folders = parts_of(path) if path else []
    above: int | None = None
    try:
        for count in range(1, len(folders) + 1):
            below = _made(root, folders[:count], above, durability)
            if above is not None:
                os.close(above)
            above = below
    finally:
        if above is not None:
            os.close(above)


def _made(root: Path, folders: Sequence[str], above: int | None, durability: Durability) -> int:
    may_link = len(folders) <= table_depth((*folders, ""))
    try:
        return _opened(root, folders, above, may_link=may_link)
    except FileNotFoundError:
        name = str(root / folders[0]) if above is None else folders[-1]
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=above)
        durability.folder(root.joinpath(*folders[:-1]))
        return _opened(root, folders, above, may_link=False)


def _opened(root: Path, folders: Sequence[str], above: int | None, *, may_link: bool) -> int:
    """Open the last of these folders, relative to `above`; the first one by the root's path."""
    name = f"{root}/{folders[0]}" if above is None else folders[-1]
    try:
        return os.open(name, _FOLDER, dir_fd=above)
    except OSError as error:
        if error.errno not in _LINKED:
            raise
        path = root.joinpath(*folders)
        found = os.stat(name, dir_fd=above, follow_symlinks=False)
        if not may_link or not stat.S_ISLNK(found.st_mode):
            raise OddFileError(path, kind_of(found.st_mode) or "is not a folder") from error
    return _followed(path, above)


def _followed(path: Path, above: int | None) -> int:
    """Open the folder that a link leads to, through links of root and of this user only.

    `above`: the descriptor of the link's folder, or None if that is the lake's root.
    """
    at, left, links = path.parent, [path.name], 0
    here = os.open(at, _PASSED & ~os.O_NOFOLLOW) if above is None else os.dup(above)
    try:
        while left:
            name = left.pop(0)
            if name in {"", "."}:
                continue
            try:
                below = os.open(name, _PASSED, dir_fd=here)
                at = at.parent if name == ".." else at / name
            except OSError as error:
                if error.errno not in _LINKED:
                    raise
                if links == _MOST_LINKS:
                    raise OddFileError(path, "is a symbolic link that leads to itself") from error
                target = _target(at / name, here)
                left, links = [*target.split("/"), *left], links + 1
                if not target.startswith("/"):
                    continue
                at, below = Path("/"), os.open("/", _PASSED)
            os.close(here)
            here = below
        return os.open(".", _FOLDER, dir_fd=here)
    finally:
        os.close(here)


def _target(path: Path, folder: int) -> str:
    """Return a link's target, read from the same link whose owner was checked."""
    link = os.open(path.name, _ITSELF, dir_fd=folder)
    try:
        found = os.fstat(link)
        if not stat.S_ISLNK(found.st_mode):
            raise OddFileError(path, "is not a folder")
        if found.st_uid not in {0, os.geteuid()}:
            raise OthersLinkError(path, found.st_uid)
        return os.readlink("", dir_fd=link)
    finally:
        os.close(link)


def open_plain(root: Path, path: str, depth: int | None = None) -> int:
    """Open a regular file and return its descriptor. Raise OddFileError for anything else."""
    with place_of(root, path, depth) as (folder, name):
        try:
            descriptor = os.open(name, _FILE, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OddFileError(root / path, "is a symbolic link") from error
            if error.errno == errno.ENXIO:
                raise OddFileError(root / path, "is not a regular file") from error
            raise
    what = kind_of(os.fstat(descriptor).st_mode)
    if what is not None:
        os.close(descriptor)
        raise OddFileError(root / path, what)
    return descriptor


def open_native(root: Path, path: str, depth: int | None = None) -> pa.NativeFile:
    """Open a regular file for pyarrow; see `open_plain`."""
    descriptor = open_plain(root, path, depth)
    try:
        return pa.OSFile(f"/proc/self/fd/{descriptor}", "rb")
    except FileNotFoundError:  # no /proc
        return pa.PythonFile(os.fdopen(os.dup(descriptor), "rb"), "r")
    finally:
        os.close(descriptor)


def read_plain(root: Path, path: str, most_bytes: int) -> bytes:
    """Read a regular file of at most `most_bytes`. Raise OddFileError for anything else."""
    descriptor = open_plain(root, path)
    try:
        size = os.fstat(descriptor).st_size
        ensure_size(root / path, size, most_bytes)
        content = os.read(descriptor, size)
        while len(content) < size and (piece := os.read(descriptor, size - len(content))):
            content += piece
    finally:
        os.close(descriptor)
    return content


def ensure_size(path: Path | str, nbytes: int, most_bytes: int) -> None:
    """Raise OddFileError for a file that is larger than any file of its kind."""
    if nbytes > most_bytes:
        raise OddFileError(path, f"has {nbytes} bytes, more than {most_bytes}")


def create_plain(name: str, folder: int | None) -> int:
    """Create a file that does not exist yet; return a descriptor for writing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o666, dir_fd=folder)


def write_new(name: str, folder: int | None, content: bytes) -> None:
    """Write a file that does not exist yet."""
    descriptor = create_plain(name, folder)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)


# --- durability ----------------------------------------------------------------------------------


class Durability(Protocol):
    """Makes files of a local lake durable; tests pass one that records calls."""

    def file(self, path: Path) -> None:
        """Return when the file's content is durable. Raise OSError."""
        ...

    def folder(self, path: Path) -> None:
        """Return when the folder's entries are durable. Raise OSError."""
        ...


class Fsync:
    """fsync(2)."""

    def file(self, path: Path) -> None:
        """Sync a file's content; never follow a link or wait for a pipe."""
        _sync(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)

    def folder(self, path: Path) -> None:
        """Sync a folder's entries."""
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path, durability: Durability) -> None:
    """Create a folder and its missing parents, durably. Raise OSError."""
    missing: list[Path] = []
    at = path
    while not at.exists():
        missing.append(at)
        at = at.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        durability.folder(folder.parent)
