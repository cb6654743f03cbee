"""Delta tables as Spark's SQL describes them: the implementation for every session.

Each question is a Spark job. A log's deletion vectors can't be listed so: those are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from pyspark.errors import AnalysisException

from ingestd.lake.delta.log_paths import file_of
from spark_jobs.delta_log.commits import HISTORY_LIMIT, JobCommit, Signature
from spark_jobs.delta_log.statements import history_of, state_of
from spark_jobs.delta_log.table_files import ensure_plain, folder_here
from spark_jobs.delta_log.tables import DeltaCommits, DeltaState, MissingFile, is_connect
from spark_jobs.spark_errors import condition_of

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

_SCHEME = re.compile(r"\A[a-z][a-z0-9+.-]*:(//[^/]*)?")
_NO_TABLE = ("DELTA_MISSING_DELTA_TABLE", "DELTA_TABLE_ONLY_OPERATION")
"""Conditions of the errors about a folder that has no table, or does not exist."""


@dataclass(frozen=True, slots=True)
class SqlTables:
    """Implements `spark_jobs.delta_log.tables.DeltaTables`."""

    _checked: dict[str, object] = field(default_factory=dict)

    def state(self, session: SparkSession, path: str) -> DeltaState | None:
        """See `DeltaTables`."""
        detail = _asked(lambda: state_of(session, path))
        if not detail or detail[0]["format"] != "delta":
            return None
        row = detail[0]
        mark = (row["lastModified"], row["numFiles"], row["sizeInBytes"])
        return DeltaState(mark, row["id"], dict(row["properties"]))

    def size_bytes(self, session: SparkSession, path: str) -> int | None:
        """See `DeltaTables`."""
        detail = _asked(lambda: state_of(session, path))
        return None if not detail else detail[0]["sizeInBytes"]

    def commits_above(self, session: SparkSession, path: str, version: int) -> DeltaCommits:
        """See `DeltaTables`."""
        found = _asked(lambda: history_of(session, path, HISTORY_LIMIT))
        if not found:
            return DeltaCommits(-1)
        newer = tuple(
            JobCommit(row["version"], row["operation"], Signature.parse(row["userMetadata"]))
            for row in found
            if row["version"] > version
        )
        return DeltaCommits(found[0]["version"], newer)

    def rows(self, session: SparkSession, path: str, version: int | None = None) -> DataFrame:
        """See `DeltaTables`."""
        if version is None:
            newest = _asked(lambda: history_of(session, path, 1))
            return self._newest(session, path, newest[0]) if newest else _loaded(session, path)
        rows = _loaded(session, path, version)
        _ensure_read_within(session, path, rows.inputFiles(), f"{path}, version {version}")
        return rows

    def ensure(self, session: SparkSession, path: str) -> None:
        """See `DeltaTables`."""
        newest = _asked(lambda: history_of(session, path, 1))
        if newest:
            self._newest(session, path, newest[0])

    def _newest(self, session: SparkSession, path: str, commit: Any) -> DataFrame:  # noqa: ANN401
        version, key = commit["version"], (commit["version"], commit["timestamp"])
        if self._checked.get(path) == key:
            return _loaded(session, path, version)
        rows = self.rows(session, path, version)
        self._checked[path] = key
        return rows

    def missing_files(self, session: SparkSession, path: str) -> list[MissingFile]:
        """See `DeltaTables`: of tables on this machine only, and without positions."""
        folder = _local(session, path)
        if folder is None or self.state(session, path) is None:
            return []
        names = [name_within(path, file) for file in _loaded(session, path).inputFiles()]
        return [MissingFile(name, None) for name in names if not (folder / name).exists()]


def _asked(ask: Callable[[], list[Any]]) -> list[Any]:
    """Return the answer about a table; none without a table."""
    try:
        return ask()
    except AnalysisException as error:
        if condition_of(error) in _NO_TABLE:
            return []
        raise


def _loaded(session: SparkSession, path: str, version: int | None = None) -> DataFrame:
    reader = session.read.format("delta")
    return (reader if version is None else reader.option("versionAsOf", version)).load(path)


def _local(session: SparkSession, path: str) -> Path | None:
    return None if is_connect(session) else folder_here(path)


def _ensure_read_within(session: SparkSession, path: str, files: Iterable[str], where: str) -> None:
    """Raise FolderError if one of these files, as Spark names them, is not the table's own."""
    folder = _local(session, path)
    for file in sorted(set(files)):
        name = name_within(path, file, where)
        if folder is not None:
            ensure_plain(folder, name, where)


def name_within(path: str, file: str, where: str | None = None) -> str:
    """Return a file's path inside a table. `file`: Spark's name of it, URL-encoded or not.

    `path`: the table's; `where`: the same, for errors. Raises FolderError for a file that is not
    the table's own.
    """
    ways = (_relative(path, file), _relative(path, unquote(file)))
    return file_of(next((way for way in ways if way is not None), file), where or path)


def _relative(path: str, file: str) -> str | None:
    """Return a file's path relative to the table's; None if it is not below it."""
    if "://" not in path:  # a path of the default or the local file system
        file = f"/{_SCHEME.sub('', file, count=1).lstrip('/')}"
    return file.removeprefix(f"{path}/") if file.startswith(f"{path}/") else None
