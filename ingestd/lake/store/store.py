"""Access to the lake's files, on a local file system or in an object store."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake._internal import DeltaFileSystemHandler
from deltalake.fs import DeltaStorageHandler

from ingestd.failpoints import reach
from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.paths import OddFileError, checked, checked_folder, why_odd
from ingestd.lake.store.pending_calls import StorageCalls, timed
from ingestd.lake.store.plain_files import (
    LOG,
    Durability,
    Fsync,
    create_plain,
    ensure_size,
    folder_at,
    kind_of,
    make_folders,
    open_native,
    place_of,
    read_plain,
    write_new,
)
from ingestd.lake.store.s3 import PART_BYTES, NotSureError, S3Object, S3Objects, s3_objects
from ingestd.model.errors import LakeLostError, OperatorError

if TYPE_CHECKING:
    from deltalake._internal import ObjectOutputStream

ID_FILE = "_ingestd.json"
"""The lake's id file (ingestd.lake.lake_id). No source's folder has this name, as a leading `_` is
escaped."""
SET_ASIDE = ".torn"
"""Suffix of the names of files that were set aside."""
_PIECE_BYTES = 128 << 10
"""Buffer of a new object before its data is passed to the client; each open object has one."""


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """An entry of a folder; `odd`: its kind if it is not a regular file."""

    name: str
    size_bytes: int
    odd: str | None = None


class Store(Protocol):
    """The lake's files, by path relative to its root. All calls block: not for the event loop.

    Methods raise OSError, or deltalake's errors from an object store; OddPathError for a path that
    may lead out of the lake. Listings leave out names that no path may have.
    """

    @property
    def remark(self) -> str:
        """A remark for `ingestd check`; usually empty."""
        ...

    calls: StorageCalls
    """The calls in flight, of this store and of others of the same source."""

    needs_lake_id: bool
    """Whether folders are created only if the lake's id file exists; set once it was seen."""

    @property
    def storage_options(self) -> dict[str, str] | None:
        """The options with which deltalake reaches the store."""
        ...

    def uri(self, path: str) -> str:
        """Return the URI or path with which deltalake opens `path`."""
        ...

    def make_folder(self, path: str) -> None:
        """Create a folder and its parents, durably, if the store has folders.

        Raise OperatorError if the lake's own folder can't be created. Raise LakeLostError if the
        id file is needed but missing, so that the mount point of an unmounted volume is not filled.
        """
        ...

    def create(self, path: str) -> IO[bytes]:
        """Open a new file for writing."""
        ...

    @property
    def part_bytes(self) -> int:
        """About how much of a new file is buffered until it is sent; 0: it is written at once."""
        ...

    @property
    def supports_conditional_put(self) -> bool:
        """Return whether the store has `put_if_absent`."""
        ...

    def put_if_absent(self, path: str, content: bytes) -> bool:
        """Write a file atomically; return False if it exists already.

        In an object store, False does not mean that another process wrote it: an answer may have
        been lost. The content is durable on return, the folder's entry after `sync`.
        """
        ...

    def open(self, path: str) -> pa.NativeFile:
        """Open a regular file for reading. Raise OddFileError for others, or behind a link."""
        ...

    def read(self, path: str, most_bytes: int) -> bytes:
        """Read a file. Raise OddFileError as `open` does, or without reading it if too large."""
        ...

    def size(self, path: str) -> int | None:
        """Return a file's size, None if missing. Raise OddFileError for a folder, pipe or link."""
        ...

    def is_link(self, path: str) -> bool:
        """Return whether a symbolic link is at this path."""
        ...

    def entries(self, path: str, above: str) -> list[FolderEntry]:
        """Return the entries of a folder whose names sort above `above`, of any kind.

        On a disk also all others that are not regular files. In an object store also those in its
        folders, by path; to list a log there takes a request for each 1,000 of them.
        """
        ...

    @property
    def lists_from(self) -> bool:
        """Return whether `entries` lists only what it returns."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file; do nothing if it is missing."""
        ...

    def folders(self, path: str) -> list[str]:
        """Return the names of the folders in a folder; empty if it is missing."""
        ...

    def files(self, path: str) -> list[str]:
        """Return the names of the files in a folder; empty if it is missing."""
        ...

    def written(self, path: str) -> dict[str, float]:
        """Return when each file in a folder was last written (Unix seconds), by name."""
        ...

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all content; do nothing if it is missing."""
        ...

    def set_aside(self, path: str) -> None:
        """Rename a file so that no reader uses it any more, durably (where `syncs`).

        The new name begins with a dot and ends with `SET_ASIDE`.
        """
        ...

    @property
    def syncs(self) -> bool:
        """Return whether `sync` has an effect: False if all writes are durable at once."""
        ...

    def sync(self, folder: str, names: Sequence[str]) -> None:
        """Make files of a folder, and their entries in it, durable."""
        ...


def _plain(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if why_odd(name) is None)


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
                return _plain(entry.name for entry in entries if _is_folder(entry))
        except FileNotFoundError:
            return []

    @timed
    def files(self, path: str) -> list[str]:
        """Return the names of the files in a folder."""
        try:
            with self._scanned(path) as entries:
                return _plain(e.name for e in entries if e.is_file(follow_symlinks=False))
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


class ObjectStore:
    """S3, GCS, Azure and others, through deltalake's own file system and the same options.

    New objects are put with fewer requests if that is certain to reach the same store
    (`s3_objects`). A put is durable when it returns.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, str] | None) -> None:
        self.storage_options = dict(storage_options) if storage_options else None
        self.needs_lake_id = False
        self.calls = StorageCalls()
        self._uri = uri.rstrip("/")
        self._handler = DeltaFileSystemHandler(self._uri, self.storage_options)
        self._files = pafs.PyFileSystem(DeltaStorageHandler(self._uri, self.storage_options))
        self._objects: S3Objects | None = None
        self.remark = "an epoch costs two requests a table"
        try:
            self._objects = s3_objects(self._uri, self.storage_options or {}, os.environ)
        except NotSureError as reason:
            self.remark = f"an epoch costs twelve requests a table, not two: {reason}"

    def uri(self, path: str) -> str:
        """Return the URI."""
        return f"{self._uri}/{checked_folder(path)}"

    def make_folder(self, path: str) -> None:
        """Only check the path: an object store has no folders."""
        checked_folder(path)

    def create(self, path: str) -> IO[bytes]:
        """Open a new object for writing; it appears when closed."""
        opened: ObjectOutputStream | S3Object
        path = checked(path)
        if self._objects is None:
            opened = self._handler.open_output_stream(path)
        else:
            opened = self._objects.open(path)
        return io.BufferedWriter(_Upload(opened, self, path), _PIECE_BYTES)

    @property
    def supports_conditional_put(self) -> bool:
        """Return whether obstore reaches it; deltalake's file system has no conditional put."""
        return self._objects is not None

    @timed
    def put_if_absent(self, path: str, content: bytes) -> bool:
        """Put an object with a conditional put."""
        path = checked(path)
        if self._objects is None:
            raise NotImplementedError(path, len(content))
        reach("sink.commit_put.before")
        is_new = self._objects.put_if_absent(path, content)
        reach("sink.commit_put.after")
        return is_new

    @timed
    def open(self, path: str) -> pa.NativeFile:
        """Open an object for reading."""
        return self._files.open_input_file(checked(path))

    @timed
    def read(self, path: str, most_bytes: int) -> bytes:
        """Read an object. deltalake's file system blocks all other threads until it returns."""
        path = checked(path)
        if self._objects is not None:
            return self._objects.read(path, partial(self._ensure_size, path, most_bytes))
        with self._files.open_input_file(path) as file:
            self._ensure_size(path, most_bytes, file.size())
            return bytes(file.read())

    def _ensure_size(self, path: str, most_bytes: int, nbytes: int) -> None:
        ensure_size(self.uri(path), nbytes, most_bytes)

    @timed
    def size(self, path: str) -> int | None:
        """Return the size of an object."""
        path = checked(path)
        if self._objects is not None:
            return self._objects.size(path)
        (info,) = self._files.get_file_info([path])
        return int(info.size) if info.type == pafs.FileType.File else None

    def is_link(self, path: str) -> bool:
        """Return False: an object store has no links."""
        checked(path)
        return False

    @timed
    def entries(self, path: str, above: str) -> list[FolderEntry]:
        """Return the objects below a prefix whose names sort above `above`."""
        checked_folder(path)
        if self._objects is not None:
            found = self._objects.sizes(path, above)
        else:
            selector = pafs.FileSelector(path, allow_not_found=True, recursive=True)
            every = self._files.get_file_info(selector)
            found = [(i.path, int(i.size)) for i in every if i.type == pafs.FileType.File]
        named = [(at.removeprefix(f"{path}/"), nbytes) for at, nbytes in found]
        return [FolderEntry(name, nbytes) for name, nbytes in named if name > above]

    @property
    def lists_from(self) -> bool:
        """Return whether obstore reaches it; deltalake's file system lists a complete prefix."""
        return self._objects is not None

    @timed
    def remove(self, path: str) -> None:
        """Remove an object."""
        if self.size(path) is not None:
            self._files.delete_file(path)

    @timed
    def folders(self, path: str) -> list[str]:
        """Return the names of the prefixes below a prefix."""
        return _plain(i.base_name for i in self._listed(path) if i.type == pafs.FileType.Directory)

    @timed
    def files(self, path: str) -> list[str]:
        """Return the names of the objects directly below a prefix."""
        return _plain(i.base_name for i in self._listed(path) if i.type == pafs.FileType.File)

    @timed
    def written(self, path: str) -> dict[str, float]:
        """Return when each object directly below a prefix was last written, by name."""
        files = (i for i in self._listed(path) if i.type == pafs.FileType.File)
        return {i.base_name: i.mtime_ns / 1e9 for i in files if why_odd(i.base_name) is None}

    @timed
    def remove_folder(self, path: str) -> None:
        """Remove the objects below a prefix."""
        for info in self._listed(checked(path), recursive=True):
            if info.type == pafs.FileType.File:
                self._files.delete_file(info.path)

    def set_aside(self, path: str) -> None:
        """Raise NotImplementedError: an object is never incomplete."""
        raise NotImplementedError(checked(path))

    part_bytes = PART_BYTES
    syncs = False

    def sync(self, folder: str, names: Sequence[str]) -> None:
        """Only check the paths: an object is durable when its put returns."""
        checked_folder(folder)
        for name in names:
            checked(name)

    def _listed(self, path: str, *, recursive: bool = False) -> list[pafs.FileInfo]:
        selector = pafs.FileSelector(
            checked_folder(path), allow_not_found=True, recursive=recursive
        )
        found: list[pafs.FileInfo] = self._files.get_file_info(selector)
        return found


class _Upload(io.RawIOBase):
    """A file that passes `bytes` to a stream; Parquet writers and `BufferedWriter` pass buffers.

    Those buffers are overwritten or freed while obstore still uses them.
    """

    def __init__(
        self, stream: ObjectOutputStream | S3Object, store: ObjectStore, path: str
    ) -> None:
        self._stream = stream
        self._store = store
        self._path = path
        self._position = 0

    def tell(self) -> int:
        return self._position

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:  # noqa: ANN401 - any buffer
        taken = bytes(data)
        with self._store.calls.during(self._store, self._path):
            self._stream.write(taken)
        self._position += len(taken)
        return len(taken)

    def close(self) -> None:
        if not self.closed:
            super().close()
            with self._store.calls.during(self._store, self._path):
                self._stream.close()  # type: ignore[union-attr] # missing in deltalake's stub


_OVERWRITING = {
    "allow_unsafe_rename": ("true", "1", "yes", "on"),
    "conditional_put": ("disabled",),
}
"""Options (after `AWS_`) that allow overwriting, and their values."""


def _refuse_overwriting(uri: str, options: Mapping[str, str]) -> None:
    for key, value in options.items():
        short = key.lower().removeprefix("aws_").removeprefix("s3_")
        if value.strip().lower() in _OVERWRITING.get(short, ()):
            raise OperatorError(
                f"lake {uri}: {key} = {value}: two writers could overwrite each other's commits",
                remedy="remove this option: the store must refuse a commit whose version exists",
            )


def ensure_own_links(store: Store, folder: str) -> None:
    """Raise OthersLinkError if a link of another user leads to a table's folder.

    Call it before code that opens the folder by its path (deltalake).
    """
    store.is_link(f"{folder}/{LOG}")


def linked(store: Store, folder: str) -> str | None:
    """Return the first folder on the path to a table, below its source's, that is a link."""
    parts = folder.split("/")
    found = ("/".join(parts[:count]) for count in range(2, len(parts) + 1))
    return next((path for path in found if store.is_link(path)), None)


def open_store(
    uri: str,
    storage_options: Mapping[str, str] | None,
    durability: Durability | None = None,
    calls: StorageCalls | None = None,
) -> Store:
    """Return the store at `uri`: a path, relative or absolute, file://, or a URI of deltalake.

    `calls`: records the calls; by default a new one.

    Raise OperatorError for a local path with a percent sign, and for options that can't be read or
    that let two writers overwrite each other's commits (I5).
    """
    parts = urlsplit(uri)
    if "://" in uri and parts.scheme != "file":
        _refuse_overwriting(uri, {**os.environ, **(storage_options or {})})
        with storage_faults(uri):
            remote = ObjectStore(uri, storage_options)
        remote.calls = calls or remote.calls
        return remote
    path = unquote(parts.path) if parts.scheme == "file" else uri
    if "%" in str(Path(path).absolute()):
        raise OperatorError(
            f"lake {uri}: the local path has a percent sign",
            remedy="choose another folder for `lake.uri`: Delta decodes percent signs in paths",
        )
    local = LocalStore(Path(path), durability or Fsync())
    local.calls = calls or local.calls
    return local
