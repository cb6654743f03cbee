"""Reads of Delta tables by Spark that first check every path in the table's log.

Delta follows any path that a table's log names. Without the check, a client that can write into one
table's folder could make a job with wider permissions copy other files into a mirror. The rows are
read from the very version that was checked: a later commit is never read unchecked. The rule is
`ingestd.lake.delta.log_paths.file_of`. Nothing else here reads a Delta table by Spark.

After a failed read, `missing_files` finds the files that the log names but that no longer exist.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ingestd.lake.delta.log_files import SIDECARS, ensure_readable_log
from ingestd.lake.store.plain_files import LOG
from spark_jobs.delta_log.sql_tables import SqlTables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from ingestd.lake.store.paths import FolderEntry
    from ingestd.lake.store.store import Store
    from spark_jobs.delta_log.tables import DeltaCommits, DeltaState, DeltaTables, MissingFile


@dataclass(frozen=True, slots=True)
class CheckedTables:
    """Delta tables whose files are checked before they are read or changed.

    Each version is checked once. Safe to use from several threads. `log`: answers questions about
    a table's log; its methods are those of this class.
    """

    log: DeltaTables = field(default_factory=SqlTables)
    _checkpoints: dict[str, frozenset[FolderEntry]] = field(default_factory=dict)

    def ensure_readable(self, store: Store, folder: str) -> None:
        """Raise OddFileError if Delta can't read a log, by the daemon's own check of logs.

        (A checkpoint that is nested too deep overflows the stack of a task, which ends the JVM.)
        Delta refuses deep commits itself, so a log is checked again only if a checkpoint or a
        sidecar is new or was replaced.
        """
        log = f"{folder}/{LOG}"
        entries = store.entries(log, "")
        if any(entry.name == SIDECARS for entry in entries):  # a store without folders lists these
            inside = store.entries(f"{log}/{SIDECARS}", "")
            entries += [replace(entry, name=f"{SIDECARS}/{entry.name}") for entry in inside]
        found = frozenset(
            e for e in entries if ".checkpoint." in e.name or e.name.startswith(f"{SIDECARS}/")
        )
        if self._checkpoints.get(folder) != found:
            ensure_readable_log(store, folder)
            self._checkpoints[folder] = found

    @staticmethod
    def column_types(session: SparkSession, path: str) -> dict[str, str]:
        """Return the columns of a table, name to type, from its log, without reading a file.

        Raises AnalysisException if the table does not exist.
        """
        return dict(session.read.format("delta").load(path).dtypes)

    @staticmethod
    def columns(session: SparkSession, path: str) -> list[str]:
        """Return the names of `column_types`."""
        return list(CheckedTables.column_types(session, path))

    def rows(self, session: SparkSession, path: str, version: int | None = None) -> DataFrame:
        """See `DeltaTables`."""
        return self.log.rows(session, path, version)

    def ensure(self, session: SparkSession, path: str) -> None:
        """See `DeltaTables`."""
        self.log.ensure(session, path)

    def state(self, session: SparkSession, path: str) -> DeltaState | None:
        """See `DeltaTables`."""
        return self.log.state(session, path)

    def size_bytes(self, session: SparkSession, path: str) -> int | None:
        """See `DeltaTables`."""
        return self.log.size_bytes(session, path)

    def commits_above(self, session: SparkSession, path: str, version: int) -> DeltaCommits:
        """See `DeltaTables`."""
        return self.log.commits_above(session, path, version)

    def missing_files(self, session: SparkSession, path: str) -> list[MissingFile]:
        """See `DeltaTables`."""
        return self.log.missing_files(session, path)
