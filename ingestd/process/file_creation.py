"""File creation in folders where other users may write.

A file is never created through a link, and another user's file is never written to.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path

PRIVATE = 0o600
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def create(path: Path, text: str, mode: int = PRIVATE) -> None:
    """Create a file. Its name must not exist, not even as a dangling link.

    `mode`: reduced by the umask. Raises FileExistsError or another OSError, and leaves no file.
    """
    descriptor = os.open(path, _FLAGS, mode)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def create_binary(path: Path, mode: int = PRIVATE) -> BinaryIO:
    """Create a file as `create` does, and return it, open for writing. Raises OSError."""
    return os.fdopen(os.open(path, _FLAGS, mode), "wb")


def replace(path: Path, text: str, mode: int = PRIVATE) -> None:
    """Create a file, replacing any file of that name.

    A new file is renamed over it. The target of a link, other names of the old file and processes
    that have it open are unaffected. Raises OSError, also for a device or pipe; the old file is
    kept then.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    made = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}")
    create(made, text, mode)
    try:
        made.replace(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise


def make_private_folder(path: Path) -> None:
    """Create a folder that only this user may enter, or accept an existing one. Raises OSError.

    A link, another user's folder, or a folder that others may enter raises OSError as well.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "a link or a file, not a folder", str(path))
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
        raise PermissionError(errno.EPERM, "not a folder of this user only", str(path))


def append(path: Path) -> BinaryIO:
    """Open a file of this user for appending; create it if missing. Raises OSError for a link."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, PRIVATE), "ab")


def is_shared(folder: Path) -> bool:
    """Return whether other users may create files in a folder: by owner or by permissions."""
    found = folder.stat()
    return found.st_uid != os.geteuid() or bool(found.st_mode & stat.S_IWOTH)
