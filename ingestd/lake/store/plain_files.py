"""Local files opened without following links, and without waiting for what is no file.

A lake's root, a source's folder, and the folders of a schema and of a table are where the operator
put them, by links too. What is inside a table's folder is there by name alone: whoever can write
there could otherwise have files read, written and removed that are elsewhere. A descriptor of the
folder holds it while a name in it is used, so that nothing comes of exchanging one of the two.

Source: open(2), O_NOFOLLOW and O_NONBLOCK; openat(2).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

LOG = "_delta_log"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LINKED = frozenset({errno.ELOOP, errno.ENOTDIR})
_REFERENCES = "_ref"


class OddFileError(OSError):
    """Something else stands at `path` than a file of the lake: `why` says what."""

    def __init__(self, path: Path | str, why: str) -> None:
        super().__init__(errno.EINVAL, why, str(path))
        self.path, self.why = str(path), why


def kind_of(mode: int) -> str | None:
    """Say what is no regular file; None if it is one."""
    if stat.S_ISREG(mode):
        return None
    if stat.S_ISLNK(mode):
        return "is a symbolic link"
    return "is a folder" if stat.S_ISDIR(mode) else "is no regular file"


def table_depth(parts: Sequence[str]) -> int:
    """Return how many parts of a path in the lake lead to the folder that it is in, or its table's.

    As `ingestd.lake.layout.Layout` has them.
    """
    folders = parts[:-1]
    depth = len(folders)
    if len(folders) > 1:
        is_own = folders[1].startswith("_")
        depth = min(depth, 4 if folders[1] == _REFERENCES else 2 if is_own else 3)
    return folders.index(LOG) if LOG in folders[:depth] else depth


@contextmanager
def place_of(root: Path, path: str, depth: int | None = None) -> Iterator[tuple[int | None, str]]:
    """Give a descriptor of the folder that a path ends in, and the name there, or the whole path.

    None: no descriptor is needed, as nothing lies between the table's folder and the file.
    `depth`: how many parts may be links; those that lead to a table's folder without it.
    """
    parts = path.split("/")
    depth = table_depth(parts) if depth is None else depth
    inner = parts[depth:-1]
    if not inner:
        yield None, str(root / path)
        return
    at = Path(root, *parts[:depth], inner[0])
    folder = _opened(at, None, str(at))
    try:
        for name in inner[1:]:
            at /= name
            below = _opened(at, folder, name)
            os.close(folder)
            folder = below
        yield folder, parts[-1]
    finally:
        os.close(folder)


def _opened(path: Path, folder: int | None, name: str) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except OSError as error:
        if error.errno in _LINKED:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            raise OddFileError(path, kind_of(found.st_mode) or "is no folder") from error
        raise


def open_plain(root: Path, path: str, depth: int | None = None) -> int:
    """Open a regular file for reading; give its descriptor. Raises OddFileError for others."""
    with place_of(root, path, depth) as (folder, name):
        try:
            descriptor = os.open(name, _FILE, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OddFileError(root / path, "is a symbolic link") from error
            if error.errno == errno.ENXIO:
                raise OddFileError(root / path, "is no regular file") from error
            raise
    what = kind_of(os.fstat(descriptor).st_mode)
    if what is not None:
        os.close(descriptor)
        raise OddFileError(root / path, what)
    return descriptor


def open_native(root: Path, path: str, depth: int | None = None) -> pa.NativeFile:
    """Open a regular file as `open_plain` does, for pyarrow."""
    descriptor = open_plain(root, path, depth)
    try:
        return pa.OSFile(f"/proc/self/fd/{descriptor}", "rb")
    except FileNotFoundError:  # no /proc
        return pa.PythonFile(os.fdopen(os.dup(descriptor), "rb"), "r")
    finally:
        os.close(descriptor)


def read_plain(root: Path, path: str, most_bytes: int) -> bytes:
    """Read a regular file of no more than so many bytes. Raises OddFileError for others."""
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
    """Raise OddFileError for a file that is too large to be what its name says."""
    if nbytes > most_bytes:
        raise OddFileError(path, f"has {nbytes} bytes, more than {most_bytes}")


def write_new(name: str, folder: int | None, content: bytes) -> None:
    """Write a file that is not there yet."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o666, dir_fd=folder)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)
