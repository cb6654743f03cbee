"""Reads of Delta tables by Spark that first check every path in the table's log.

Delta follows any path that a table's log names. Without the check, a client that can write into one
table's folder could make a job with wider permissions copy other files into a mirror. The check
covers what Delta itself read from the log (commits, checkpoints, sidecars), and the rows are read
from that very snapshot: a later commit or a replaced part of the log is never read unchecked. The
rule is `ingestd.lake.delta.log_paths.file_of`. Nothing else here reads a Delta table by Spark.

After a failed read, `missing_files` finds the files that the log names but that no longer exist.

Source: Delta transaction log protocol, "Add File", "Deletion Vectors", "Per-file Statistics".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from ingestd.lake.delta.commit import statistics_of
from ingestd.lake.delta.log_files import SIDECARS, ensure_readable_log
from ingestd.lake.delta.log_paths import OWN_FILE, file_of
from ingestd.lake.store.plain_files import LOG
from spark_jobs.delta_log.commits import delta_log, snapshot_of
from spark_jobs.delta_log.jvm import HADOOP_PATH, java_class, option
from spark_jobs.delta_log.table_files import (
    VECTOR_ID_LENGTH,
    ensure_plain,
    local_folder,
    vector_files_of,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ingestd.lake.store.paths import FolderEntry
    from ingestd.lake.store.store import Store

_OWN_NAME = r"\A" + OWN_FILE.pattern.removesuffix(r"\Z") + r"\z"
"""OWN_FILE's pattern in Java's syntax."""
_SCHEME = re.compile(r"\A[a-z][a-z0-9+.-]*:(//[^/]*)?")


@dataclass(frozen=True, slots=True)
class CheckedTables:
    """Delta tables whose files are checked before they are read or changed.

    Each snapshot is checked once: the check is a Spark job over the state that Delta needs for
    reading anyway. Safe to use from several threads.
    """

    _judged: dict[str, Any] = field(default_factory=dict)
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

    def rows(self, session: SparkSession, path: str, version: int | None = None) -> DataFrame:
        """Return the rows of a table at a version, by default the newest.

        Raises FolderError if the log names a file that is not the table's own, and
        AnalysisException if the table does not exist.
        """
        reader = session.read.format("delta")
        if version is not None:
            reader = reader.option("versionAsOf", version)
        elif not is_connect(session):
            snapshot = snapshot_of(session, path)
            if snapshot.version() >= 0:
                self._judge(session, path, snapshot)
                return _rows_of(session, path, snapshot)
        rows = reader.load(path)
        if is_connect(session):
            ensure_read_within(session, path, rows.inputFiles())
        else:
            self._judge(session, path, _location(rows).getSnapshot())
        return rows

    @staticmethod
    def columns(session: SparkSession, path: str) -> list[str]:
        """Return the column names of a table from its log, without reading a file.

        Raises AnalysisException if the table does not exist.
        """
        return session.read.format("delta").load(path).columns

    def ensure(self, session: SparkSession, path: str) -> None:
        """Check the newest snapshot of a table, if there is one, before the table is changed.

        A change reads rows, too. A commit between this check and its start is read unchecked.
        Raises FolderError as `rows`.
        """
        snapshot = snapshot_of(session, path)
        if snapshot.version() >= 0:
            self._judge(session, path, snapshot)

    def _judge(self, session: SparkSession, path: str, snapshot: Any) -> None:  # noqa: ANN401
        known = self._judged.get(path)
        if known is None or not known.equals(snapshot):
            _ensure_own_files(session, path, snapshot)
            self._judged[path] = snapshot


def is_connect(session: SparkSession) -> bool:
    """Return whether this is a Spark Connect session, which gives no access to the JVM."""
    return getattr(session, "_jvm", None) is None


def ensure_read_within(session: SparkSession, path: str, files: Iterable[str]) -> None:
    """Raise FolderError if one of these files, as Spark names them, is not the table's own.

    `path`: the table's.
    """
    folder = None if is_connect(session) else local_folder(session, path)
    for file in sorted(set(files)):
        name = name_within(path, file)
        if folder is not None:
            ensure_plain(folder, name, path)


def name_within(path: str, file: str) -> str:
    """Return a file's path inside a table. `file`: Spark's name of it, URL-encoded or not.

    `path`: the table's. Raises FolderError for a file that is not the table's own.
    """
    ways = (_relative(path, file), _relative(path, unquote(file)))
    return file_of(next((way for way in ways if way is not None), file), path)


def _relative(path: str, file: str) -> str | None:
    """Return a file's path relative to the table's; None if it is not below it."""
    if "://" not in path:  # a path of the default or the local file system
        file = f"/{_SCHEME.sub('', file, count=1).lstrip('/')}"
    return file.removeprefix(f"{path}/") if file.startswith(f"{path}/") else None


def _location(rows: DataFrame) -> Any:  # noqa: ANN401 - Delta's index of files
    return rows._jdf.queryExecution().analyzed().collectLeaves().head().relation().location()  # noqa: SLF001


def _rows_of(session: SparkSession, path: str, snapshot: Any) -> DataFrame:  # noqa: ANN401
    nothing = java_class(session, "scala.collection.immutable.Nil$")
    relation = delta_log(session, path).createRelation(
        getattr(nothing, "MODULE$"),
        option(session, snapshot),
        option(session),
        True,  # noqa: FBT003 - as a time travel read: of this snapshot
    )
    return DataFrame(session._jsparkSession.baseRelationToDataFrame(relation), session)  # noqa: SLF001


def _ensure_own_files(session: SparkSession, path: str, snapshot: Any) -> None:  # noqa: ANN401
    """Raise FolderError if a snapshot has a file that is not the table's own. Spark job."""
    where = f"{path}, version {snapshot.version()}"
    folder = local_folder(session, path)
    odd = [] if folder is None else _odd_names(folder)
    file, vector = f.col("path"), f.col("deletionVector")
    must_be_checked = ~file.rlike(_OWN_NAME) | ~vector["storageType"].isin("i", "u")
    must_be_checked |= f.length(vector["pathOrInlineDv"]) > VECTOR_ID_LENGTH
    if odd:
        must_be_checked |= file.isin(odd) | vector.isNotNull()
    files = DataFrame(snapshot.allFiles().toDF(), session).where(must_be_checked)
    for row in files.select(file, "deletionVector").collect():
        names = [file_of(row["path"], where)]
        if row["deletionVector"] is not None:
            names += vector_files_of(row["deletionVector"].asDict(), where)
        if folder is not None:
            for name in names:
                ensure_plain(folder, name, where)


def _odd_names(folder: Path) -> list[str]:
    """Return the names in a table's folder that are neither regular files nor folders."""
    with os.scandir(folder) as entries:
        return [
            e.name
            for e in entries
            if not e.is_file(follow_symlinks=False) and not e.is_dir(follow_symlinks=False)
        ]


# --- missing files --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MissingFile:
    """`name`: relative to the table; `highest_lsn`: of its `_cdc_lsn`, None if not in the log."""

    name: str
    highest_lsn: int | None


def missing_files(session: SparkSession, path: str) -> list[MissingFile]:
    """Return the missing files of the newest version of a Delta table; none without a table.

    An operator or a rule of the store deleted them: VACUUM keeps what the newest version needs.
    Checks every file, so call it only after a read has failed.
    """
    snapshot = snapshot_of(session, path)
    if snapshot.version() < 0:
        return []
    files = DataFrame(snapshot.allFiles().toDF(), session)
    configuration = session._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    hadoop_path = java_class(session, HADOOP_PATH)
    folder = hadoop_path(path)
    system = folder.getFileSystem(configuration)
    found = []
    for row in files.select("path", "stats").collect():
        name = file_of(row["path"], path)
        if not system.exists(hadoop_path(folder, name)):
            highest = statistics_of(row["stats"]).get("maxValues", {}).get("_cdc_lsn")
            found.append(MissingFile(name, highest))
    return found
