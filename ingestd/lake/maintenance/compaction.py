"""Maintenance of one Delta table of the lake: joining small files and cleaning its log.

Steps of a piece, and the state that a kill at each of them leaves::

    read, write one file, fsync     an orphan: removed a retention later (`cleanup`)
    commit by compare-and-swap      the old table, or the new file in it; the rows are equal
    fsync of the commit             the daemon syncs commits that it finds before its own (I1)
    checkpoint                      none: the next run writes one

The commit carries dataChange=false and no app transaction: streaming readers skip it, and
`Commit.judge` finds no data in it (I5). It takes the version after the one that was read, or fails.
After a failure the files are checked: unless another compaction removed them (then this one gives
way), the commit is tried again. Appends never conflict with it.

Rows stay in the order in which they were appended, and columns that had bounds get bounds again, so
that a reader skips as before. Memory is bounded by a row group of ingestd's, not by a file.

A table with features that ingestd does not write (`table_features`) is left alone. So is one in
whose folder another program keeps its own record of files (`_backfill`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from deltalake import CommitProperties, PostCommitHookProperties
from deltalake.exceptions import DeltaError
from deltalake.transaction import RemoveAction

from ingestd.failpoints import lost, reach
from ingestd.lake.delta.append_log import AppendLog
from ingestd.lake.delta.commit import (
    COMPACTION,
    add_action,
    commit_path,
    read_commit,
    rewrite_text,
)
from ingestd.lake.delta.data_files import open_parquet
from ingestd.lake.delta.file_statistics import has_statistics
from ingestd.lake.delta.log_files import open_table
from ingestd.lake.delta.log_paths import OWN_FILE
from ingestd.lake.delta.read import conform, list_actions
from ingestd.lake.maintenance.cleanup import CleanupResult, LogCleaner
from ingestd.lake.maintenance.plan import DataFile, pieces, small_files
from ingestd.lake.parquet_writer import ROW_GROUP_BYTES, FragmentWriter
from ingestd.lake.store.errors import storage_fault, storage_faults
from ingestd.lake.store.store import Store
from ingestd.model.errors import FolderError
from ingestd.ports import Fragment

ATTEMPTS = 50
"""How often a commit is tried when appends come first; then it is left to the next run."""
_TOMBSTONES = "delta.deletedFileRetentionDuration"
_TOMBSTONES_DEFAULT_S = 7 * 86400.0
_RETENTION = "ingestd.retention"
"""Table property: the retention, in seconds, to which _TOMBSTONES was raised."""
_NO_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


@dataclass(frozen=True, slots=True)
class MaintenancePolicy:
    """`target_bytes`: of joined files, None: no joining. `retention_s`: None keeps all versions."""

    target_bytes: int | None
    retention_s: float | None


@dataclass(frozen=True, slots=True)
class MaintenanceResult:
    """The work done on a table, and the number of small files that remain."""

    small_files: int = 0
    joined_files: int = 0
    written_files: int = 0
    written_bytes: int = 0
    cleaned: CleanupResult = field(default_factory=CleanupResult)
    gave_way: int = 0


_POINTS = {
    "write": "maintenance.write.before",
    "commit": "maintenance.commit.before",
    "committed": "maintenance.commit.after",
    "clean": "maintenance.clean.before",
}


def _continue(step: str) -> None:
    """Do nothing at a step, except for failpoints."""
    reach(_POINTS[step], lost)


class TableMaintenance:
    """Maintenance of the table in `folder` of `store`, concurrently with the daemon's commits.

    All calls block. `began_s`: start of the run that may be writing files of the table now (Unix
    seconds). `step` is called with ``write``, ``commit``, ``committed``, ``clean`` at these steps;
    if it raises, the call ends there.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        policy: MaintenancePolicy,
        *,
        now_s: float,
        began_s: float,
        step: Callable[[str], None] = _continue,
    ) -> None:
        self._store = store
        self._folder = folder
        self._policy = policy
        self._now_s = now_s
        self._began_s = began_s
        self._step = step
        self._log = AppendLog(store, folder, "")

    def run(self, *, joins: bool = True, cleans: bool = True) -> MaintenanceResult:
        """Do everything that is due; small files are counted in any case.

        Raise whatever `storage_fault` makes of an error.
        """
        self._log.load()
        if not self._log.is_writable or self._has_foreign_folders():
            return MaintenanceResult()
        target = self._policy.target_bytes
        done = MaintenanceResult()
        if target is not None:
            done = self._join(target) if joins else self._counted(target)
        retention_s = self._policy.retention_s
        if cleans and retention_s is not None:
            self._keep_tombstones(retention_s)
            current = frozenset(file.path for file in self._files())
            self._step("clean")
            before_s = self._now_s - retention_s
            cleaner = LogCleaner(
                self._store,
                self._folder,
                written_before_s=before_s,
                began_s=self._began_s,
            )
            done = _with(done, cleaner.clean(current))
        return done

    def _has_foreign_folders(self) -> bool:
        with storage_faults(self._log.uri):
            own = {name for name in self._store.folders(self._folder) if name.startswith("_")}
        return bool(own - {"_delta_log", "_symlink_format_manifest", "_change_data"})

    def _files(self) -> list[DataFile]:
        with storage_faults(self._log.uri):
            return [
                DataFile(path, size, statistics, written_ms)
                for path, statistics, size, written_ms in list_actions(self._log.handle)
            ]

    def _counted(self, target_bytes: int) -> MaintenanceResult:
        return MaintenanceResult(small_files=len(small_files(self._files(), target_bytes)))

    # --- joining files ----------------------------------------------------------------------

    def _join(self, target_bytes: int) -> MaintenanceResult:
        # Other names may be spelled differently in the log than here, where they are removed.
        files = [file for file in self._files() if OWN_FILE.match(file.path)]
        small = len(small_files(files, target_bytes))
        joined = written = nbytes = gave_way = 0
        for piece in pieces(files, target_bytes):
            fragments = self._join_piece(piece, target_bytes)
            if not fragments:
                gave_way += 1
                continue
            joined += len(piece)
            written += len(fragments)
            nbytes += sum(f.size_bytes for f in fragments)
            still = sum(f.size_bytes < target_bytes // 4 for f in fragments)
            small += still - len(piece)
        if joined:
            self._log.checkpoint()
            self._log.load()
        return MaintenanceResult(small, joined, written, nbytes, gave_way=gave_way)

    def _join_piece(self, piece: Sequence[DataFile], target_bytes: int) -> Sequence[Fragment]:
        """Rewrite a piece and exchange its files; return nothing if it gave way."""
        schema = self._log.schema()
        assert schema is not None
        writer = FragmentWriter(
            self._store, self._folder, self._bounded(piece, schema), file_bytes=2 * target_bytes
        )
        try:
            self._step("write")
            writer.write(_row_groups(self._rows(piece, schema)))
            fragments = writer.finish()
            self._ensure_complete(piece, fragments)
            self._step("commit")
        except BaseException:
            writer.abort()
            raise
        # From here on the files may be part of a commit, even if an error is raised.
        if self._exchange(fragments, {f.path: f.size_bytes for f in piece}):
            self._step("committed")
            return fragments
        writer.abort()
        return []

    def _ensure_complete(self, piece: Sequence[DataFile], fragments: Sequence[Fragment]) -> None:
        rows = sum(self._stated_rows(file) for file in piece)
        found = sum(f.rows for f in fragments)
        if found != rows:
            raise FolderError(
                f"lake {self._log.uri}: {len(piece)} files starting with {piece[0].path} have"
                f" {found} rows, but {rows} by the table's log: they are not joined"
            )

    def _stated_rows(self, file: DataFile) -> int:
        """Return the file's number of rows from the log, or from the file if the log lacks it."""
        stated = file.statistics.get("numRecords")
        if stated is not None:
            return int(stated)
        with open_parquet(self._store, f"{self._folder}/{file.path}") as parquet:
            return parquet.num_rows

    def _bounded(self, piece: Sequence[DataFile], schema: pa.Schema) -> list[str]:
        """Return the columns that have bounds, by the footers, as the log may not list all bounds.

        Other engines give bounds to columns of any type; only types with bounds here keep them.
        """
        found: set[str] = set()
        for part in (piece[0], piece[-1]):
            with open_parquet(self._store, f"{self._folder}/{part.path}") as file:
                group = file.metadata.row_group(0)
                chunks = (group.column(i) for i in range(group.num_columns))
                found |= {c.path_in_schema for c in chunks if c.is_stats_set}
        return [f.name for f in schema if f.name in found and has_statistics(f.type)]

    def _rows(self, piece: Sequence[DataFile], schema: pa.Schema) -> Iterator[pa.Table]:
        for part in piece:
            rows = part.statistics.get("numRecords")
            with open_parquet(self._store, f"{self._folder}/{part.path}", rows) as file:
                wanted = [n for n in schema.names if n in file.schema.names]
                for batch in file.batches(wanted):
                    yield conform(pa.Table.from_batches([batch]), schema)

    def _exchange(self, fragments: Sequence[Fragment], removed: dict[str, int]) -> bool:
        """Commit; return False if the files were replaced or appends came first too often."""
        token = uuid.uuid4().hex
        at = self._log.version
        for _ in range(ATTEMPTS):
            failure = self._try_commit(fragments, removed, token, at)
            found = self._read_intervening(at, token, removed)
            if found.is_ours:
                return True
            if found.is_taken:
                return False
            if failure is not None and found.version == at:
                raise storage_fault(failure, self._log.uri) from failure
            at = found.version
        return False

    def _try_commit(
        self, fragments: Sequence[Fragment], removed: dict[str, int], token: str, at: int
    ) -> Exception | None:
        try:
            if self._store.supports_conditional_put:
                text = rewrite_text(fragments, removed, {COMPACTION: token})
                self._store.put_if_absent(commit_path(self._folder, at + 1), text)
            else:
                self._commit_by_handle(fragments, removed, token, at)
        except (DeltaError, OSError) as error:
            return error
        return None

    def _commit_by_handle(
        self, fragments: Sequence[Fragment], removed: dict[str, int], token: str, at: int
    ) -> None:
        # At the version that was read, not the newest: the compare-and-swap is against that.
        handle = open_table(self._store, self._folder, at)
        now_ms = time.time_ns() // 1_000_000
        handle.create_write_transaction(
            [
                *(add_action(f, is_change=False) for f in fragments),
                *(RemoveAction(p, data_change=False, deletion_timestamp=now_ms) for p in removed),
            ],
            "append",
            handle.schema(),
            commit_properties=CommitProperties(
                custom_metadata={COMPACTION: token}, max_commit_retries=0
            ),
            post_commithook_properties=_NO_HOOKS,
        )

    def _read_intervening(self, at: int, token: str, removed: dict[str, int]) -> _Intervening:
        """Read the commits after a version, for ours, or one that removed our files."""
        is_ours = is_taken = False
        with storage_faults(self._log.uri):
            while not is_ours and self._store.size(commit_path(self._folder, at + 1)) is not None:
                at += 1
                commit = read_commit(self._store, self._folder, at)
                is_ours = commit.stamps.get(COMPACTION) == token
                if is_ours:
                    self._store.sync(f"{self._folder}/_delta_log", [f"{at:020}.json"])
                else:
                    is_taken |= any(file.path in removed for file in commit.removed())
        return _Intervening(at, is_ours, is_taken)

    # --- cleaning ---------------------------------------------------------------------------

    def _keep_tombstones(self, wanted_s: float) -> None:
        """Ensure that checkpoints list removed files for at least the retention."""
        had = self._log.configuration()
        if wanted_s <= float(had.get(_RETENTION, _TOMBSTONES_DEFAULT_S)):
            return
        self._log.handle.alter.set_table_properties(
            {_TOMBSTONES: f"interval {int(wanted_s)} seconds", _RETENTION: str(int(wanted_s))},
            raise_if_not_exists=False,
            commit_properties=CommitProperties(max_commit_retries=ATTEMPTS),
            post_commithook_properties=_NO_HOOKS,
        )
        self._log.load()
        self._log.settle()


@dataclass(frozen=True, slots=True)
class _Intervening:
    version: int
    is_ours: bool
    is_taken: bool


def _with(done: MaintenanceResult, cleaned: CleanupResult) -> MaintenanceResult:
    return MaintenanceResult(
        done.small_files,
        done.joined_files,
        done.written_files,
        done.written_bytes,
        cleaned,
        done.gave_way,
    )


def _row_groups(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Yield tables joined to the size of a row group."""
    waiting: list[pa.Table] = []
    nbytes = 0
    for table in tables:
        waiting.append(table)
        nbytes += table.nbytes
        if nbytes >= ROW_GROUP_BYTES:
            yield pa.concat_tables(waiting).combine_chunks()
            waiting, nbytes = [], 0
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()
