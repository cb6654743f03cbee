"""Files of a lake, wherever it lies: on a local file system or in an object store."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping, Sequence
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
from ingestd.lake.store.fsync import Durability, Fsync
from ingestd.lake.store.pending_calls import StorageCalls, timed
from ingestd.lake.store.plain_files import (
    LOG,
    OddFileError,
    create_plain,
    ensure_size,
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

MARKER = "_ingestd.json"
"""The lake's marker (ingestd.lake.marker). No source's folder has this name: a leading `_` is
mapped."""
SET_ASIDE = ".torn"
"""How the names of files end that were set aside."""
_PIECE_BYTES = 128 << 10
"""What is gathered of a new object before its client is given it; each open one holds so much."""


@dataclass(frozen=True, slots=True)
class FolderEntry:
    """What a folder has under a name; `odd`: what it is if it is no regular file."""

    name: str
    size_bytes: int
    odd: str | None = None


class Store(Protocol):
    """The lake's files, by path relative to its root. All calls block: not for the event loop.

    Raises OSError, or deltalake's errors from an object store.
    """

    @property
    def remark(self) -> str:
        """What whoever asks about it may want to know; mostly nothing."""
        ...

    calls: StorageCalls
    """Those of it, and of others of the same source, that are under way."""

    needs_marker: bool
    """Whether folders are made only where the lake's marker is: its user has seen it there."""

    @property
    def storage_options(self) -> dict[str, str] | None:
        """What deltalake needs to reach it."""
        ...

    def uri(self, path: str) -> str:
        """Return what deltalake opens `path` by."""
        ...

    def make_folder(self, path: str) -> None:
        """Make a folder with its parents, durably, where there are folders.

        Raises OperatorError where the lake's own can't be; LakeLostError where the marker is needed
        and is not there: the folder of a volume that is not mounted is not filled.
        """
        ...

    def create(self, path: str) -> IO[bytes]:
        """Open a new file for writing."""
        ...

    @property
    def part_bytes(self) -> int:
        """About what is sent of a new file at a time, in memory until then; 0: it is written."""
        ...

    @property
    def supports_conditional_put(self) -> bool:
        """Whether `put_if_absent` is there."""
        ...

    def put_if_absent(self, path: str, content: bytes) -> bool:
        """Write a file, whole or not at all; False if it is there already.

        Of an object store that does not say that it is another's: an answer may have been lost.
        Its content is durable, its entry in the folder after `sync`.
        """
        ...

    def open(self, path: str) -> pa.NativeFile:
        """Open a file for reading. Raises OddFileError for what is none, or behind a link."""
        ...

    def read(self, path: str, most_bytes: int) -> bytes:
        """Read a file. Raises OddFileError as `open`, and before it is read if it is larger."""
        ...

    def size(self, path: str) -> int | None:
        """Size of a file, None if there is none. Raises OddFileError for a folder, pipe, link."""
        ...

    def is_link(self, path: str) -> bool:
        """Return whether a symbolic link stands there."""
        ...

    def entries(self, path: str, above: str) -> list[FolderEntry]:
        """List what has a name above this one in a local folder, whatever it is; else nothing.

        An object store has no pipes and no links, and a log there takes a request for each 1,000
        commits.
        """
        ...

    def remove(self, path: str) -> None:
        """Remove a file; nothing if there is none."""
        ...

    def folders(self, path: str) -> list[str]:
        """Names of the folders in a folder; empty if there is none."""
        ...

    def files(self, path: str) -> list[str]:
        """Names of the files in a folder; empty if there is none."""
        ...

    def written(self, path: str) -> dict[str, float]:
        """When each of the files in a folder was last written (Unix seconds), by name."""
        ...

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all that is in it; nothing if there is none."""
        ...

    def set_aside(self, path: str) -> None:
        """Give a file a name by which nobody takes it for what it was, durably (where `syncs`).

        It begins with a dot and ends with `SET_ASIDE`.
        """
        ...

    @property
    def syncs(self) -> bool:
        """Whether `sync` does anything: False where what is written is durable at once."""
        ...

    def sync(self, folder: str, names: Sequence[str]) -> None:
        """Make files of a folder durable, and their entries in it."""
        ...


class LocalStore:
    """A local file system."""

    storage_options = None
    remark = ""

    def __init__(self, root: Path, durability: Durability) -> None:
        self.root = root.absolute()
        self.needs_marker = False
        self.calls = StorageCalls()
        self._durability = durability

    def uri(self, path: str) -> str:
        """Return the absolute path."""
        return str(self.root / path)

    @timed
    def make_folder(self, path: str) -> None:
        """Make a folder with its parents."""
        if self.needs_marker and not (self.root / MARKER).exists():
            raise LakeLostError(
                f"lake {self.root}: {MARKER} is not there: the lake is not mounted, or was removed",
                remedy="mount the lake, or put it back; ingestd tries again within 60 s",
            )
        try:
            make_folders(self.root, path, self._durability)
        except FileNotFoundError as error:
            if self.root.exists():
                raise
            raise OperatorError(
                f"lake {self.root}: no folder can be made there",
                remedy="set `lake.uri` to a folder of a file system that can be written to",
            ) from error

    @timed
    def create(self, path: str) -> IO[bytes]:
        """Open a new file for writing."""
        with place_of(self.root, path) as (folder, name):
            return os.fdopen(create_plain(name, folder), "wb")

    part_bytes = 0
    supports_conditional_put = True

    @timed
    def put_if_absent(self, path: str, content: bytes) -> bool:
        """Link a file of another name, that is whole and durable, to this one."""
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
        """Open a file for reading: the one that was looked at, by its descriptor."""
        return open_native(self.root, path)

    @timed
    def read(self, path: str, most_bytes: int) -> bytes:
        """Read a file."""
        return read_plain(self.root, path, most_bytes)

    @timed
    def size(self, path: str) -> int | None:
        """Size of a file."""
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
        """Return whether a symbolic link stands there."""
        try:
            with place_of(self.root, path) as (folder, name):
                return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return False

    @timed
    def entries(self, path: str, above: str) -> list[FolderEntry]:
        """List what has a name above this one in a folder."""
        found = []
        with contextlib.suppress(FileNotFoundError), self._scanned(path) as entries:
            for entry in entries:
                if entry.name <= above:
                    continue
                with contextlib.suppress(FileNotFoundError):  # it went meanwhile
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
        """Names of the folders in a folder."""
        try:
            with self._scanned(path) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError:
            return []

    @timed
    def files(self, path: str) -> list[str]:
        """Names of the files in a folder."""
        try:
            with self._scanned(path) as entries:
                return sorted(e.name for e in entries if e.is_file(follow_symlinks=False))
        except FileNotFoundError:
            return []

    @timed
    def written(self, path: str) -> dict[str, float]:
        """When each of the files in a folder was last written, by name."""
        found = {}
        with contextlib.suppress(FileNotFoundError), self._scanned(path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # it went meanwhile
                    if entry.is_file(follow_symlinks=False):
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
        """Let its name begin with a dot, which all readers of Delta pass over."""
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
        with place_of(self.root, f"{folder}/"):
            for name in names:
                self._durability.file(self.root / folder / name)
            self._durability.folder(self.root / folder)
        reach("sink.fsync.after")

    @contextmanager
    def _scanned(self, path: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        """Return the entries of a folder, which stays open meanwhile."""
        with (
            place_of(self.root, f"{path}/") as (folder, _),
            os.scandir(self.root if folder is None else folder) as entries,
        ):
            yield entries


class ObjectStore:
    """S3, GCS, Azure and the like, by deltalake's own file system: one set of options for both.

    New objects are put by fewer requests where that is sure to reach the same store (`s3_objects`).
    A put that returned is durable there.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, str] | None) -> None:
        self.storage_options = dict(storage_options) if storage_options else None
        self.needs_marker = False
        self.calls = StorageCalls()
        self._uri = uri.rstrip("/")
        self._handler = DeltaFileSystemHandler(self._uri, self.storage_options)
        self._files = pafs.PyFileSystem(DeltaStorageHandler(self._uri, self.storage_options))
        self._objects: S3Objects | None = None
        self.remark = "an epoch costs two requests a table"
        try:
            self._objects = s3_objects(self._uri, self.storage_options or {}, os.environ)
        except NotSureError as reason:
            self.remark = f"an epoch costs eleven requests a table, not two: {reason}"

    def uri(self, path: str) -> str:
        """Return the URI."""
        return f"{self._uri}/{path}"

    def make_folder(self, path: str) -> None:
        """Do nothing: there are no folders."""

    def create(self, path: str) -> IO[bytes]:
        """Open a new object for writing; it appears when closed."""
        opened: ObjectOutputStream | S3Object
        if self._objects is None:
            opened = self._handler.open_output_stream(path)
        else:
            opened = self._objects.open(path)
        return io.BufferedWriter(_Upload(opened, self, path), _PIECE_BYTES)

    @property
    def supports_conditional_put(self) -> bool:
        """Whether obstore reaches it; what deltalake offers can't, though its own commits can."""
        return self._objects is not None

    @timed
    def put_if_absent(self, path: str, content: bytes) -> bool:
        """Put an object by a conditional put."""
        if self._objects is None:
            raise NotImplementedError(path, len(content))
        reach("sink.commit_put.before")
        is_new = self._objects.put_if_absent(path, content)
        reach("sink.commit_put.after")
        return is_new

    @timed
    def open(self, path: str) -> pa.NativeFile:
        """Open an object for reading."""
        return self._files.open_input_file(path)

    @timed
    def read(self, path: str, most_bytes: int) -> bytes:
        """Read an object. deltalake's file system lets no other thread run until it answers."""
        if self._objects is not None:
            return self._objects.read(path, partial(self._ensure_size, path, most_bytes))
        with self._files.open_input_file(path) as file:
            self._ensure_size(path, most_bytes, file.size())
            return bytes(file.read())

    def _ensure_size(self, path: str, most_bytes: int, nbytes: int) -> None:
        ensure_size(self.uri(path), nbytes, most_bytes)

    @timed
    def size(self, path: str) -> int | None:
        """Size of an object."""
        if self._objects is not None:
            return self._objects.size(path)
        (info,) = self._files.get_file_info([path])
        return int(info.size) if info.type == pafs.FileType.File else None

    def is_link(self, path: str) -> bool:  # noqa: ARG002 - as of all stores
        """Return False: there are no links."""
        return False

    def entries(self, path: str, above: str) -> list[FolderEntry]:  # noqa: ARG002 - as of all stores
        """Return nothing."""
        return []

    @timed
    def remove(self, path: str) -> None:
        """Remove an object."""
        if self.size(path) is not None:
            self._files.delete_file(path)

    @timed
    def folders(self, path: str) -> list[str]:
        """Names of the prefixes below a prefix."""
        found = self._files.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        return sorted(info.base_name for info in found if info.type == pafs.FileType.Directory)

    @timed
    def files(self, path: str) -> list[str]:
        """Names of the objects directly below a prefix."""
        found = self._files.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        return sorted(info.base_name for info in found if info.type == pafs.FileType.File)

    @timed
    def written(self, path: str) -> dict[str, float]:
        """When each of the objects directly below a prefix was last written, by name."""
        found = self._files.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        files = (info for info in found if info.type == pafs.FileType.File)
        return {info.base_name: info.mtime_ns / 1e9 for info in files}

    @timed
    def remove_folder(self, path: str) -> None:
        """Remove the objects below a prefix."""
        selector = pafs.FileSelector(path, allow_not_found=True, recursive=True)
        for info in self._files.get_file_info(selector):
            if info.type == pafs.FileType.File:
                self._files.delete_file(info.path)

    def set_aside(self, path: str) -> None:
        """Never needed: what was put is whole."""
        raise NotImplementedError(path)

    part_bytes = PART_BYTES
    syncs = False

    def sync(self, folder: str, names: Sequence[str]) -> None:
        """Do nothing: what was put is durable."""


class _Upload(io.RawIOBase):
    """Gives a stream `bytes`, where Parquet writers, and `BufferedWriter`, give buffers.

    Those are written to again, or freed, while obstore still has what it was given.
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
"""Options (of `AWS_...`) and their values."""


def _refuse_overwriting(uri: str, options: Mapping[str, str]) -> None:
    for key, value in options.items():
        short = key.lower().removeprefix("aws_").removeprefix("s3_")
        if value.strip().lower() in _OVERWRITING.get(short, ()):
            raise OperatorError(
                f"lake {uri}: {key} = {value}: two writers could overwrite each other's commits",
                remedy="leave it out: a commit has to be refused if there is one already",
            )


def ensure_own_links(store: Store, folder: str) -> None:
    """Raise OthersLinkError where a link of another user leads to a table's folder.

    For what opens the folder by its path (deltalake).
    """
    store.is_link(f"{folder}/{LOG}")


def linked(store: Store, folder: str) -> str | None:
    """Name the first of the folders that lead to a table, below its source's, that is a link."""
    parts = folder.split("/")
    found = ("/".join(parts[:count]) for count in range(2, len(parts) + 1))
    return next((path for path in found if store.is_link(path)), None)


def open_store(
    uri: str,
    storage_options: Mapping[str, str] | None,
    durability: Durability | None = None,
    calls: StorageCalls | None = None,
) -> Store:
    """Return the store at `uri`: a path, relative or not, file://, or what deltalake knows.

    `calls`: where its calls are noted, of its own without.

    Raises OperatorError for a local path with a percent sign, and for options that can't be read or
    by which two writers overwrite each other's commits (I5).
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
            f"lake {uri}: a percent sign in a local path",
            remedy="choose another folder for `lake.uri`: Delta decodes percent signs in paths",
        )
    local = LocalStore(Path(path), durability or Fsync())
    local.calls = calls or local.calls
    return local
