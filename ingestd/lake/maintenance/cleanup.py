"""Cleanup of a Delta table's log, and of the files that no version uses any more.

A commit's JSON may be removed if a checkpoint above it was written before the retention began:
every version since then can still be read. A file that a commit removed from the table is deleted
with that commit, as only versions before it use the file. So one figure, the retention, determines
both how far back versions can be read and how far behind a streaming reader may be.

====================  ===========================================================================
never removed         why
====================  ===========================================================================
the newest commit     it contains the data of `TableLog.resume` (the position of polling) and
with data or an app   `ReferenceLog.content` (the digest of all rows); the commits after it are
transaction           kept too
app transactions      watermarks: in every checkpoint, without last_updated
a file of this run    an epoch being filled writes files for hours before its commit; a file that
                      is in no commit is removed only if an earlier run wrote it, a retention ago
====================  ===========================================================================

The log begins with a checkpoint in one file (`N.checkpoint.parquet`), as ingestd makes them.
Checkpoints of other engines (in parts, or with a UUID and sidecars), checksums and joined commits
of earlier versions are removed with the commits; a sidecar is removed when no checkpoint names it.
Source: Delta protocol, "Checkpoints", "Sidecar Files".

Commits are removed oldest first, each after the files that it took out; then checkpoints. After a
kill, the next run removes the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ingestd.lake.delta.commit import Commit, read_commit
from ingestd.lake.delta.data_files import open_parquet
from ingestd.lake.delta.log_files import SIDECARS, sidecars_of
from ingestd.lake.delta.log_paths import OWN_FILE, file_of
from ingestd.lake.delta.log_room import Room
from ingestd.lake.delta.parquet.footer import read_metadata
from ingestd.lake.maintenance.plan import LogFiles, cut_of, needless_checkpoints
from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.local_store import SET_ASIDE
from ingestd.lake.store.store import Store

_COMMIT = re.compile(r"(\d{20})\.json\Z")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.parquet\Z")
_VERSIONED = re.compile(r"(\d{20})\.(?!json\Z|checkpoint\.parquet\Z)")
"""Any other file of the log whose name contains a version."""
_UUID_CHECKPOINT = re.compile(r"\d{20}\.checkpoint\.[0-9a-fA-F-]{36}\.(?:parquet|json)\Z")


@dataclass(frozen=True, slots=True)
class CleanupResult:
    """Numbers of removed files: of the log (commits and checkpoints), and data files."""

    log_files: int = 0
    data_files: int = 0


class LogCleaner:
    """Cleans the table in `folder` of `store`. All calls block.

    `written_before_s`: younger files are kept (Unix seconds). `began_s`: start of the run that may
    be writing files now.
    """

    def __init__(
        self, store: Store, folder: str, *, written_before_s: float, began_s: float
    ) -> None:
        self._store = store
        self._folder = folder
        self._log_folder = f"{folder}/_delta_log"
        self._before_s = written_before_s
        self._began_s = began_s

    def clean(self, current: frozenset[str]) -> CleanupResult:
        """Remove what is no longer needed; `current`: the files of the newest version.

        Raise whatever `storage_fault` makes of an error.
        """
        with storage_faults(self._store.uri(self._folder)):
            found = self._store.written(self._log_folder)
            log = log_files(found)
            cut = cut_of(log, self._before_s, self._newest_with_data(log))
            if cut is not None and not self._is_checkpoint_sound(cut):
                cut = None
            commits = [n for n in sorted(log.commits) if cut is not None and n < cut]
            data = 0
            for number in commits:  # one after another: a kill loses no progress
                data += self._remove_files_of(number, current)
                self._store.remove(f"{self._log_folder}/{number:020}.json")
            checkpoints = needless_checkpoints(log, cut, self._before_s)
            for number in checkpoints:
                self._store.remove(f"{self._log_folder}/{number:020}.checkpoint.parquet")
            left = self._remove_unfinished(found)
            if cut is not None:
                left += self._remove_of_others(found, cut)
            data += self._remove_orphans(current)
            return CleanupResult(len(commits) + len(checkpoints) + left, data)

    def _newest_with_data(self, log: LogFiles) -> int:
        for number in range(log.newest, -1, -1):
            if number not in log.commits:
                break
            if self._commit(number).has_data:
                return number
        return log.newest

    def _commit(self, number: int) -> Commit:
        return read_commit(self._store, self._folder, number)

    def _is_checkpoint_sound(self, number: int) -> bool:
        """Return whether a checkpoint is readable; make it durable, as its commits are removed."""
        name = f"{number:020}.checkpoint.parquet"
        path = f"{self._log_folder}/{name}"
        with self._store.open(path) as source:
            rows: int = read_metadata(source, self._store.uri(path)).num_rows
        self._store.sync(self._log_folder, [name])
        return rows > 0

    def _remove_files_of(self, number: int, current: frozenset[str]) -> int:
        """Delete the files that a commit removed from the table and whose names are like ours."""
        paths = [self._file_of(file.path) for file in self._commit(number).removed()]
        removable = [path for path in paths if OWN_FILE.match(path) and path not in current]
        for path in removable:
            self._store.remove(f"{self._folder}/{path}")
        return len(removable)

    def _remove_unfinished(self, files: Mapping[str, float]) -> int:
        """Remove unfinished commits of earlier runs; keep files that were set aside."""
        hidden = [n for n in files if n.startswith(".") and not n.endswith(SET_ASIDE)]
        old = [name for name in hidden if files[name] < self._orphaned_s]
        for name in old:
            self._store.remove(f"{self._log_folder}/{name}")
        return len(old)

    def _remove_of_others(self, files: Mapping[str, float], cut: int) -> int:
        """Remove other engines' files of versions before the cut, and sidecars that none names."""
        matches = ((name, _VERSIONED.match(name)) for name in files)
        old = [
            name
            for name, match in matches
            if match is not None and int(match[1]) < cut and files[name] < self._before_s
        ]
        for name in old:
            self._store.remove(f"{self._log_folder}/{name}")
        folder = f"{self._log_folder}/{SIDECARS}"
        written = self._store.written(folder)
        sidecars = [name for name, at in written.items() if at < self._before_s]
        if sidecars:
            named = self._named_sidecars()
            sidecars = [name for name in sidecars if name not in named]
        for name in sidecars:
            self._store.remove(f"{folder}/{name}")
        return len(old) + len(sidecars)

    def _named_sidecars(self) -> frozenset[str]:
        room = Room()
        found: set[str] = set()
        for name in self._store.written(self._log_folder):
            if not _UUID_CHECKPOINT.match(name):
                continue
            found |= sidecars_of(self._store, f"{self._log_folder}/{name}", room)
        return frozenset(found)

    @property
    def _orphaned_s(self) -> float:
        return min(self._before_s, self._began_s)

    def _remove_orphans(self, current: frozenset[str]) -> int:
        written = self._store.written(self._folder)
        old = {n for n, at in written.items() if OWN_FILE.match(n) and at < self._orphaned_s}
        old -= current
        if old:
            old -= self._tombstones()
        for name in old:
            self._store.remove(f"{self._folder}/{name}")
        return len(old)

    def _tombstones(self) -> frozenset[str]:
        """Return the files that readable versions may use.

        Delta keeps them in checkpoints for `delta.deletedFileRetentionDuration`, which is at least
        the retention here; see `ingestd.lake.maintenance.compaction`.
        """
        log = log_files(self._store.written(self._log_folder))
        last = max(log.checkpoints, default=-1)
        found: set[str] = set()
        if last >= 0:
            path = f"{self._log_folder}/{last:020}.checkpoint.parquet"
            with open_parquet(self._store, path) as file:
                for batch in file.batches(["remove.path"]):
                    removes = batch.column("remove").field("path").to_pylist()
                    found.update(self._file_of(path) for path in removes if path)
        for number in sorted(log.commits):
            if number > last:
                files = self._commit(number).files
                found.update(self._file_of(file.path) for file in files if file.kind != "cdc")
        return frozenset(found)

    def _file_of(self, path: object) -> str:
        return file_of(path, self._store.uri(self._folder))


def log_files(written: Mapping[str, float]) -> LogFiles:
    """Return the commits and checkpoints among these files, by name."""

    def numbered(pattern: re.Pattern[str]) -> dict[int, float]:
        matches = ((pattern.match(name), at) for name, at in written.items())
        return {int(match[1]): at for match, at in matches if match is not None}

    return LogFiles(numbered(_COMMIT), numbered(_CHECKPOINT))
