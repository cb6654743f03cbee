"""The only way to a Delta table's rows by Spark: Delta follows whatever paths a table's log names.

Who may write into one table's folder could otherwise have a job of wider rights read files of
others into a mirror. Judged is what Delta itself has made of the log (commits, checkpoints,
sidecars), and the rows are read of that very snapshot: what is committed later, or put into the
place of a part of the log, is not read unjudged. The rule is
`ingestd.lake.delta.log_paths.file_of`.

Source: Delta transaction log protocol, "Add File", "Deletion Vectors".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from delta.tables import DeltaTable
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from ingestd.lake.delta.log_paths import OWN_FILE, file_of
from spark_jobs.delta_log.commits import delta_log, snapshot_of
from spark_jobs.delta_log.deletion_vectors import VECTOR_ID_LENGTH, vector_files_of
from spark_jobs.delta_log.driver_files import ensure_plain, local_folder
from spark_jobs.delta_log.jvm import java_class, option

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OWN_NAME = r"\A" + OWN_FILE.pattern.removesuffix(r"\Z") + r"\z"
"""As Java writes it."""
_SCHEME = re.compile(r"\A[a-z][a-z0-9+.-]*:(//[^/]*)?")


@dataclass(frozen=True, slots=True)
class CheckedTables:
    """Delta tables, read and changed after their files were judged.

    A snapshot is judged once: that is a Spark job over the state that Delta needs for reading, too.
    Several threads may ask at once.
    """

    _judged: dict[str, Any] = field(default_factory=dict)

    def rows(self, session: SparkSession, path: str, version: int | None = None) -> DataFrame:
        """Return the rows of a table at a version, or at the newest that there is now.

        Raises FolderError where the log names a file that is not one of the table's own, and
        AnalysisException without a table.
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
        """Return the names of a table's columns, which its log has: no file of it is read.

        Raises AnalysisException without a table.
        """
        return session.read.format("delta").load(path).columns

    def for_change(self, session: SparkSession, path: str) -> DeltaTable:
        """Return a table to merge into or update now, which reads its rows.

        What is committed between this check and the start of the MERGE is read unjudged.

        Raises as `rows`.
        """
        self.ensure(session, path)
        return DeltaTable.forPath(session, path)

    def ensure(self, session: SparkSession, path: str) -> None:
        """Judge the newest snapshot of a table before it is changed, if there is one."""
        snapshot = snapshot_of(session, path)
        if snapshot.version() >= 0:
            self._judge(session, path, snapshot)

    def _judge(self, session: SparkSession, path: str, snapshot: Any) -> None:  # noqa: ANN401
        known = self._judged.get(path)
        if known is None or not known.equals(snapshot):
            _ensure_own_files(session, path, snapshot)
            self._judged[path] = snapshot


def is_connect(session: SparkSession) -> bool:
    """Return whether the session is of a Spark Connect server: there is no JVM to be asked."""
    return getattr(session, "_jvm", None) is None


def ensure_read_within(session: SparkSession, path: str, files: Iterable[str]) -> None:
    """Raise FolderError if one of these files, as Spark names what it reads, is no own file.

    `path`: the table's.
    """
    folder = None if is_connect(session) else local_folder(session, path)
    for file in sorted(set(files)):
        name = name_within(path, file)
        if folder is not None:
            ensure_plain(folder, name, path)


def name_within(path: str, file: str) -> str:
    """Return the path inside a table of a file that Spark names, encoded or not.

    `path`: the table's. Raises FolderError for a file that is not one of the table's own.
    """
    ways = (_relative(path, file), _relative(path, unquote(file)))
    return file_of(next((way for way in ways if way is not None), file), path)


def _relative(path: str, file: str) -> str | None:
    """Return what follows the table's path in a file's; None if it is not below it."""
    if "://" not in path:  # of the default file system, and of this machine's
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
        True,  # noqa: FBT003 - this snapshot, as if it were an older one that was asked for
    )
    return DataFrame(session._jsparkSession.baseRelationToDataFrame(relation), session)  # noqa: SLF001


def _ensure_own_files(session: SparkSession, path: str, snapshot: Any) -> None:  # noqa: ANN401
    """Raise FolderError if a snapshot has a file that is not one of the table's own. Spark job."""
    where = f"{path}, version {snapshot.version()}"
    folder = local_folder(session, path)
    odd = [] if folder is None else _odd_names(folder)
    file, vector = f.col("path"), f.col("deletionVector")
    is_told = ~file.rlike(_OWN_NAME) | ~vector["storageType"].isin("i", "u")
    is_told |= f.length(vector["pathOrInlineDv"]) > VECTOR_ID_LENGTH
    if odd:
        is_told |= file.isin(odd) | vector.isNotNull()
    files = DataFrame(snapshot.allFiles().toDF(), session).where(is_told)
    for row in files.select(file, "deletionVector").collect():
        names = [file_of(row["path"], where)]
        if row["deletionVector"] is not None:
            names += vector_files_of(row["deletionVector"].asDict(), where)
        if folder is not None:
            for name in names:
                ensure_plain(folder, name, where)


def _odd_names(folder: Path) -> list[str]:
    """Return the names in a table's folder of what is neither a regular file nor a folder."""
    with os.scandir(folder) as entries:
        return [
            e.name
            for e in entries
            if not e.is_file(follow_symlinks=False) and not e.is_dir(follow_symlinks=False)
        ]
