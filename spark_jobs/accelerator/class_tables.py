"""Delta tables as Delta's own classes describe them: no Spark job, but for the check of a version.

The check covers what Delta itself read from the log (commits, checkpoints, sidecars), deletion
vectors included, and the rows are read from that very snapshot.

Source: Delta transaction log protocol, "Add File", "Deletion Vectors", "Per-file Statistics".
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from ingestd.lake.delta.commit import statistics_of
from ingestd.lake.delta.log_paths import OWN_FILE, file_of
from spark_jobs.accelerator.class_log import delta_log, log_entries, snapshot_of
from spark_jobs.accelerator.jvm import java_class, option
from spark_jobs.accelerator.places import local_folder, place_of
from spark_jobs.accelerator.switch import Switch
from spark_jobs.delta_log.commits import HISTORY_LIMIT, JobCommit, Signature
from spark_jobs.delta_log.sql_tables import SqlTables
from spark_jobs.delta_log.table_files import VECTOR_ID_LENGTH, ensure_plain, vector_files_of
from spark_jobs.delta_log.tables import DeltaCommits, DeltaState, MissingFile

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_jobs.delta_log.tables import DeltaTables

T = TypeVar("T")
_OWN_NAME = r"\A" + OWN_FILE.pattern.removesuffix(r"\Z") + r"\z"
"""OWN_FILE's pattern in Java's syntax."""


@dataclass(frozen=True, slots=True)
class ClassTables:
    """Implements `spark_jobs.delta_log.tables.DeltaTables`, by `otherwise` once switched off."""

    switch: Switch = field(default_factory=Switch)
    otherwise: DeltaTables = field(default_factory=SqlTables)
    _judged: dict[str, Any] = field(default_factory=dict)

    def state(self, session: SparkSession, path: str) -> DeltaState | None:
        """See `DeltaTables`."""
        return self._by_classes(
            session, lambda: _state(session, path), lambda: self.otherwise.state(session, path)
        )

    def size_bytes(self, session: SparkSession, path: str) -> int | None:
        """See `DeltaTables`. Delta 4.4.0 finds it by a Spark job, once a version."""
        return self._by_classes(
            session,
            lambda: _size_bytes(session, path),
            lambda: self.otherwise.size_bytes(session, path),
        )

    def commits_above(self, session: SparkSession, path: str, version: int) -> DeltaCommits:
        """See `DeltaTables`."""
        return self._by_classes(
            session,
            lambda: _commits_above(session, path, version),
            lambda: self.otherwise.commits_above(session, path, version),
        )

    def rows(self, session: SparkSession, path: str, version: int | None = None) -> DataFrame:
        """See `DeltaTables`."""
        return self._by_classes(
            session,
            lambda: self._rows(session, path, version),
            lambda: self.otherwise.rows(session, path, version),
        )

    def ensure(self, session: SparkSession, path: str) -> None:
        """See `DeltaTables`."""
        self._by_classes(
            session,
            lambda: self._ensure(session, path),
            lambda: self.otherwise.ensure(session, path),
        )

    def missing_files(self, session: SparkSession, path: str) -> list[MissingFile]:
        """See `DeltaTables`."""
        return self._by_classes(
            session,
            lambda: _missing_files(session, path),
            lambda: self.otherwise.missing_files(session, path),
        )

    def _by_classes(
        self, session: SparkSession, work: Callable[[], T], otherwise: Callable[[], T]
    ) -> T:
        if self.switch.is_off:
            return otherwise()
        try:
            return work()
        except (Py4JError, PySparkException) as error:
            if self.switch.stays_on(session, error):
                raise
            return otherwise()

    def _rows(self, session: SparkSession, path: str, version: int | None) -> DataFrame:
        reader = session.read.format("delta")
        if version is None:
            snapshot = snapshot_of(session, path)
            if snapshot.version() >= 0:
                self._judge(session, path, snapshot)
                return _rows_of(session, path, snapshot)
            return reader.load(path)  # which says that there is no table
        rows = reader.option("versionAsOf", version).load(path)
        self._judge(session, path, _location(rows).getSnapshot())
        return rows

    def _ensure(self, session: SparkSession, path: str) -> None:
        snapshot = snapshot_of(session, path)
        if snapshot.version() >= 0:
            self._judge(session, path, snapshot)

    def _judge(self, session: SparkSession, path: str, snapshot: Any) -> None:  # noqa: ANN401
        known = self._judged.get(path)
        if known is None or not known.equals(snapshot):
            _ensure_own_files(session, path, snapshot)
            self._judged[path] = snapshot


def _state(session: SparkSession, path: str) -> DeltaState | None:
    snapshot = snapshot_of(session, path)
    version = int(snapshot.version())
    if version < 0:
        return None
    metadata = snapshot.metadata()
    pairs = metadata.configuration().toSeq()
    found = [pairs.apply(n) for n in range(pairs.size())]
    properties = {str(pair._1()): str(pair._2()) for pair in found}  # noqa: SLF001 - Scala's names
    return DeltaState(version, str(metadata.id()), properties)


def _size_bytes(session: SparkSession, path: str) -> int | None:
    found = snapshot_of(session, path).sizeInBytesIfKnown()
    return int(found.get()) if found.isDefined() else None


def _commits_above(session: SparkSession, path: str, version: int) -> DeltaCommits:
    newest = int(snapshot_of(session, path).version())
    found = []
    for number in range(newest, max(version, newest - HISTORY_LIMIT), -1):
        commit = _commit(session, path, number)
        if commit is None:
            break
        found.append(commit)
    return DeltaCommits(newest, tuple(found))


def _commit(session: SparkSession, path: str, version: int) -> JobCommit | None:
    entries = log_entries(session, path, version)
    if entries is None:
        return None
    info: dict[str, Any] = next((e["commitInfo"] for e in entries if "commitInfo" in e), {})
    operation = str(info.get("operation", ""))
    return JobCommit(version, operation, Signature.parse(info.get("userMetadata")))


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


def _missing_files(session: SparkSession, path: str) -> list[MissingFile]:
    snapshot = snapshot_of(session, path)
    if snapshot.version() < 0:
        return []
    found = []
    for row in DataFrame(snapshot.allFiles().toDF(), session).select("path", "stats").collect():
        name = file_of(row["path"], path)
        file, system = place_of(session, path, name)
        if not system.exists(file):
            highest = statistics_of(row["stats"]).get("maxValues", {}).get("_cdc_lsn")
            found.append(MissingFile(name, highest))
    return found
