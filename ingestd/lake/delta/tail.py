"""A reader for what commits added to a Delta table since a version, from its log alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow.compute as pc

from ingestd.lake.delta.commit import commit_path, parse_commit, statistics_of
from ingestd.lake.delta.data_files import open_parquet
from ingestd.lake.delta.log import TableLog
from ingestd.lake.delta.log_files import MOST_COMMIT_BYTES
from ingestd.lake.delta.log_paths import file_of
from ingestd.lake.delta.read import list_files
from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.store import Store

File = tuple[str, Mapping[str, Any]]
"""Path inside the table, and statistics."""


class CommitTail:
    """The files with data that commits after a version added, plus those kept from before.

    It must be created right after the log was read up to `version`. If another log takes its place,
    as when a table was moved away and re-read, the commit with that number differs.
    """

    def __init__(self, store: Store, folder: str, version: int) -> None:
        self._store = store
        self._folder = folder
        self._version = version
        self._kept: list[File] = []
        with storage_faults(store.uri(folder)):
            self._newest = self._commit(version)

    def requeue(self, files: Iterable[File]) -> None:
        """Include these files in the next result again."""
        self._kept = list(files)

    def files(self) -> list[File] | None:
        """Return the files added since; None if the log, or a kept file, was replaced."""
        uri = self._store.uri(self._folder)
        with storage_faults(uri):
            if self._newest is None or self._commit(self._version) != self._newest:
                return None
            while (text := self._commit(self._version + 1)) is not None:
                self._version += 1
                self._newest = text
                path = self._store.uri(commit_path(self._folder, self._version))
                for added in parse_commit(text, path).added():
                    if not added.is_change:
                        continue
                    if added.has_deletion_vector:
                        return None  # listing the table's files raises the proper error
                    statistics = statistics_of(added.statistics_json)
                    self._kept.append((file_of(added.path, uri), statistics))
            paths = [f"{self._folder}/{path}" for path, _ in self._kept]
            is_missing = any(self._store.size(path) is None for path in paths)
        return None if is_missing else list(self._kept)

    def _commit(self, version: int) -> bytes | None:
        path = commit_path(self._folder, version)
        if self._store.size(path) is None:
            return None
        return self._store.read(path, MOST_COMMIT_BYTES)


class EpochEnd:
    """The number of the last epoch, tracked through the commits of `_epochs`."""

    def __init__(self, log: TableLog) -> None:
        self._log = log
        self._tail: CommitTail | None = None
        self._last = 0

    def last(self) -> int:
        """Return the number; 0 if there is no epoch.

        Read the complete table if the commits are not enough: `_epochs` was replaced, or its newest
        commit is only in a checkpoint.
        """
        files = None if self._tail is None else self._tail.files()
        if files is None or self._tail is None:
            return self._read_newest()
        self._read_files(files)
        self._tail.requeue([])
        return self._last

    def _read_newest(self) -> int:
        self._log.load()
        self._last, self._tail = 0, None
        if self._log.exists:
            self._read_files((p, s) for p, s, _ in list_files(self._log.handle))
            self._tail = CommitTail(self._log.store, self._log.folder, self._log.version)
        return self._last

    def _read_files(self, files: Iterable[File]) -> None:
        for path, statistics in files:
            high = statistics.get("maxValues", {}).get("epoch")
            if high is None:
                with open_parquet(self._log.store, f"{self._log.folder}/{path}") as file:
                    found = (pc.max(b.column(0)).as_py() for b in file.batches(["epoch"]))
                    high = max(filter(None, found), default=None)
            self._last = max(self._last, high or 0)
