"""Making files outlive a power failure (I1).

deltalake does no fsync of its own. Source: POSIX fsync; fsync(2): "calling fsync() does not
necessarily ensure that the entry in the directory containing the file has also reached disk".
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class Durability(Protocol):
    """How files of a local lake are made durable; tests give one that takes notes."""

    def file(self, path: Path) -> None:
        """Return when the file's content is durable. Raises OSError."""
        ...

    def folder(self, path: Path) -> None:
        """Return when the folder's entries are durable. Raises OSError."""
        ...


class Fsync:
    """fsync(2)."""

    def file(self, path: Path) -> None:
        """Sync a file's content: of that file, and without waiting for what is none."""
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
    """Make a folder and its missing parents, durably. Raises OSError."""
    missing: list[Path] = []
    at = path
    while not at.exists():
        missing.append(at)
        at = at.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        durability.folder(folder.parent)
