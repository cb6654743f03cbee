"""Durable files: their content and names survive a power failure (I1).

deltalake itself never calls fsync. Source: POSIX fsync; fsync(2): "calling fsync() does not
necessarily ensure that the entry in the directory containing the file has also reached disk".
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


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
