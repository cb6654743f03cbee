"""The lake's files on a local file system."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pyarrow as pa

from ingestd.failpoints import reach
from ingestd.lake.store.paths import (
    FolderEntry,
    OddFileError,
    checked,
    checked_folder,
    plain_names,
    why_odd,
)
from ingestd.lake.store.pending_calls import StorageCalls, timed
from ingestd.lake.store.plain_files import (
    Durability,
    create_plain,
    folder_at,
    kind_of,
    make_folders,
    open_native,
    place_of,
    read_plain,
    write_new,
)
from ingestd.model.errors import LakeLostError, OperatorError

ID_FILE = "_ingestd.json"
"""The lake's id file (ingestd.lake.lake_id). No source's folder has this name, as a leading `_` is
escaped."""
SET_ASIDE = ".torn"
"""Suffix of the names of files that were set aside."""


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link that leads to itself
            return False
        raise


class LocalStore:
    """A local file system."""

    storage_options = None
    remark = ""

    def __init__(self, root: Path, durability: Durability) -> None:
        self.root = root.absolute()
        self.needs_lake_id = False
        self.calls = StorageCalls()
        self._durability = durability

    def uri(self, path: str) -> str:
        """Return the absolute path."""
        return str(self.root / checked_folder(path))

    @timed
    def make_folder(self, path: str) -> None:
        """Make a folder with its parents."""
        if self.needs_lake_id and not (self.root / ID_FILE).exists():
            raise LakeLostError(
                f"lake {self.root}: {ID_FILE} is missing: the lake is not mounted, or was removed",
                remedy="mount the lake, or put it back; ingestd retries within 60 s",
            )
        try:
            make_folders(self.root, path, self._durability)
        except FileNotFoundError as error:
            if self.root.exists():
                raise
            raise OperatorError(
                f"lake {self.root}: no folder can be created there",
                remedy="set `lake.uri` to a folder on a writable file system",
            ) from error

    @timed
    def create(self, path: str) -> IO[bytes]:
        """Open a new file for writing."""
        with place_of(self.root, path) as (folder, name):
            return os.fdopen(create_plain(name, folder), "wb")

    part_bytes = 0
    supports_conditional_put = True
    lists_from = True

    @timed
    def put_if_absent(self, path: str, content: bytes) -> bool:
        """Write a temporary file durably, then hard-link it to the path."""
        with place_of(self.root, path) as (folder, target):
            at = target.rpartition("/")
            made = f"{at[0]}{at[1]}.{at[2]}.{uuid.uuid4().hex}"
            try:
                write_new(made, folder, content)
                self._durability.file((self.root / path).with_name(made.rpartition("/")[2]))
                reach("sink.commit_put.before")
                os.link(made, target, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
                reach("sink.commit_put.after")
            except FileExistsError:
                return False
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(made, dir_fd=folder)
        return True

    @timed
    def open(self, path: str) -> pa.NativeFile:
        """Open a file for reading, by the descriptor that was checked."""
        return open_native(self.root, path)

    @timed
    def read(self, path: str, most_bytes: int) -> bytes:
        """Read a file."""
        return read_plain(self.root, path, most_bytes)

    @timed
    def size(self, path: str) -> int | None:
        """Return the size of a file."""
        try:
            with place_of(self.root, path) as (folder, name):
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if (odd := kind_of(found.st_mode)) is not None:
            raise OddFileError(self.root / path, odd)
        return found.st_size

    @timed
    def is_link(self, path: str) -> bool:
        """Return whether a symbolic link is at this path."""
        try:
            with place_of(self.root, path) as (folder, name):
                return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return False

    @timed
    def entries(self, path: str, above: str) -> list[FolderEntry]:
        """Return the entries of a folder whose names sort above `above`, and all odd ones."""
        found = []
        with contextlib.suppress(FileNotFoundError), self._scanned(path) as entries:
            for entry in entries:
                if entry.name <= above and entry.is_file(follow_symlinks=False):
                    continue
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    status = entry.stat(follow_symlinks=False)
                    found.append(FolderEntry(entry.name, status.st_size, kind_of(status.st_mode)))
        return found

    @timed
    def remove(self, path: str) -> None:
        """Remove a file."""
        with (
            contextlib.suppress(FileNotFoundError),
            place_of(self.root, path) as (folder, name),
        ):
            os.unlink(name, dir_fd=folder)

    @timed
    def folders(self, path: str) -> list[str]:
        """Return the names of the folders in a folder."""
        try:
            with self._scanned(path) as entries:
                return plain_names(entry.name for entry in entries if _is_folder(entry))
        except FileNotFoundError:
            return []

    @timed
    def files(self, path: str) -> list[str]:
        """Return the names of the files in a folder."""
        try:
            with self._scanned(path) as entries:
                return plain_names(e.name for e in entries if e.is_file(follow_symlinks=False))
        except FileNotFoundError:
            return []

    @timed
    def written(self, path: str) -> dict[str, float]:
        """Return when each file in a folder was last written, by name."""
        found = {}
        with contextlib.suppress(FileNotFoundError), self._scanned(path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    if entry.is_file(follow_symlinks=False) and why_odd(entry.name) is None:
                        found[entry.name] = entry.stat().st_mtime
        return found

    @timed
    def remove_folder(self, path: str) -> None:
        """Remove a folder."""
        with (
            contextlib.suppress(FileNotFoundError),
            place_of(self.root, path) as (folder, name),
        ):
            shutil.rmtree(name, dir_fd=folder)

    @timed
    def set_aside(self, path: str) -> None:
        """Rename the file to a name with a leading dot, which all readers of Delta skip."""
        with place_of(self.root, path) as (folder, target):
            at = target.rpartition("/")
            name = f"{at[0]}{at[1]}.{at[2]}.{uuid.uuid4().hex[:8]}{SET_ASIDE}"
            os.rename(target, name, src_dir_fd=folder, dst_dir_fd=folder)
        self._durability.folder((self.root / path).parent)

    syncs = True

    @timed
    def sync(self, folder: str, names: Sequence[str]) -> None:
        """Fsync the files, then the folder."""
        reach("sink.fsync.before")
        with folder_at(self.root, folder):
            for name in names:
                self._durability.file(self.root / folder / checked(name))
            self._durability.folder(self.root / folder)
        reach("sink.fsync.after")

    @contextmanager
    def _scanned(self, path: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        """Yield the entries of a folder, which stays open meanwhile."""
        with (
            folder_at(self.root, path) as folder,
            os.scandir(self.root if folder is None else folder) as entries,
        ):
            yield entries
