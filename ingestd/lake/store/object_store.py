"""The lake's files in an object store."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.fs as pafs
from deltalake._internal import DeltaFileSystemHandler
from deltalake.fs import DeltaStorageHandler

from ingestd.failpoints import reach
from ingestd.lake.store.paths import FolderEntry, checked, checked_folder, plain_names, why_odd
from ingestd.lake.store.pending_calls import StorageCalls, timed
from ingestd.lake.store.plain_files import ensure_size
from ingestd.lake.store.s3 import PART_BYTES, NotSureError, S3Object, S3Objects, s3_objects
from ingestd.model.errors import OperatorError

if TYPE_CHECKING:
    from deltalake._internal import ObjectOutputStream

_PIECE_BYTES = 128 << 10
"""Buffer of a new object before its data is passed to the client; each open object has one."""


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
        return plain_names(
            i.base_name for i in self._listed(path) if i.type == pafs.FileType.Directory
        )

    @timed
    def files(self, path: str) -> list[str]:
        """Return the names of the objects directly below a prefix."""
        return plain_names(i.base_name for i in self._listed(path) if i.type == pafs.FileType.File)

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


def refuse_overwriting(uri: str, options: Mapping[str, str]) -> None:
    """Raise OperatorError for an option that lets two writers overwrite each other's commits."""
    for key, value in options.items():
        short = key.lower().removeprefix("aws_").removeprefix("s3_")
        if value.strip().lower() in _OVERWRITING.get(short, ()):
            raise OperatorError(
                f"lake {uri}: {key} = {value}: two writers could overwrite each other's commits",
                remedy="remove this option: the store must refuse a commit whose version exists",
            )
