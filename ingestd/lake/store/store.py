"""Access to the lake's files, wherever they are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.object_store import ObjectStore, refuse_overwriting
from ingestd.lake.store.paths import FolderEntry
from ingestd.lake.store.pending_calls import StorageCalls
from ingestd.lake.store.plain_files import LOG, Durability, Fsync
from ingestd.model.errors import OperatorError


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
        refuse_overwriting(uri, {**os.environ, **(storage_options or {})})
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
