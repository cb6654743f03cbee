"""The rule for paths in a store: no path leads out of the lake, whatever its origin.

Many paths are read from the lake itself, where any writer of the lake can put any text. All
operations of a store check their path here first, and listings return only names that pass.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from dataclasses import dataclass

_ODD = re.compile(r"[\x00-\x1f\x7f\\%\ud800-\udfff]")
"""No name in a lake has these: another reader could decode them again, or read a `/`. A surrogate
stands for a byte that is not UTF-8."""
_OUT = frozenset({"", ".", ".."})


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """An entry of a folder; `odd`: its kind if it is not a regular file."""

    name: str
    size_bytes: int
    odd: str | None = None


class OddFileError(OSError):
    """Something other than a regular file of the lake is at `path`; `why` says what."""

    def __init__(self, path: object, why: str) -> None:
        super().__init__(errno.EINVAL, why, str(path))
        self.path, self.why = str(path), why


class OddPathError(OddFileError):
    """The text `path` is not a path in a lake."""


def why_odd(path: str) -> str | None:
    """Return why a text is not a path in a folder; None if it is one."""
    if path.startswith("/"):
        return "which is absolute"
    if _ODD.search(path):
        return "which has characters that no file name in a lake has"
    if not _OUT.isdisjoint(path.split("/")):
        return "which may lead out of its folder"
    return None


def parts_of(path: str) -> list[str]:
    """Return the names that a path consists of, at least one. Raise OddPathError."""
    why = why_odd(path)
    if why is not None:
        raise OddPathError(path, why)
    return path.split("/")


def checked(path: str) -> str:
    """Return the path of a file in a store. Raise OddPathError."""
    return "/".join(parts_of(path))


def checked_folder(path: str) -> str:
    """Return the path of a folder in a store, empty for its root. Raise OddPathError."""
    return checked(path) if path else path


def plain_names(names: Iterable[str]) -> list[str]:
    """Return those that a path may have, in order."""
    return sorted(name for name in names if why_odd(name) is None)
