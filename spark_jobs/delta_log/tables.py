"""What jobs ask of a Delta table's log: a port with two implementations.

`sql_tables.py` asks by Spark's SQL, which every session has. `spark_jobs.accelerator.class_tables`
asks Delta's own classes: a question costs milliseconds there, not a Spark job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from spark_jobs.delta_log.commits import JobCommit


@dataclass(frozen=True, slots=True)
class DeltaState:
    """A table's id and properties. `mark`: differs from that of each earlier version."""

    mark: object
    table_id: str
    properties: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DeltaCommits:
    """A table's newest version, -1 without a table, and commits, newest first."""

    version: int
    newer: tuple[JobCommit, ...] = ()


@dataclass(frozen=True, slots=True)
class MissingFile:
    """`name`: relative to the table; `highest_lsn`: of its `_cdc_lsn`, None if not known."""

    name: str
    highest_lsn: int | None


class DeltaTables(Protocol):
    """Delta tables, by the paths of their folders. Safe to use from several threads."""

    def state(self, session: SparkSession, path: str) -> DeltaState | None:
        """Return the state of a table's newest version; None without a table."""
        ...

    def size_bytes(self, session: SparkSession, path: str) -> int | None:
        """Return the size of a table's newest version; None if it is not known."""
        ...

    def commits_above(self, session: SparkSession, path: str, version: int) -> DeltaCommits:
        """Return the newest version of a table, and its commits above `version`.

        At most HISTORY_LIMIT of these, and only those whose log entries have not been cleaned up.
        """
        ...

    def rows(self, session: SparkSession, path: str, version: int | None = None) -> DataFrame:
        """Return the rows of a table at a version, by default the newest.

        They are of the version that was checked, whatever is committed meanwhile. Raises
        FolderError if its log names a file that is not the table's own, and AnalysisException if
        the table does not exist.
        """
        ...

    def ensure(self, session: SparkSession, path: str) -> None:
        """Check the newest version of a table, if there is one, before the table is changed.

        A change reads rows, too. A commit between this check and its start is read unchecked.
        Raises FolderError as `rows`.
        """
        ...

    def missing_files(self, session: SparkSession, path: str) -> list[MissingFile]:
        """Return the missing files of the newest version of a table; none without a table.

        An operator or a rule of the store deleted them: VACUUM keeps what the newest version needs.
        Looks at every file, so call it only after a read has failed. Only files that can be looked
        for are found.
        """
        ...


def is_connect(session: SparkSession) -> bool:
    """Return whether this is a Spark Connect session, which gives no access to the JVM."""
    return type(session).__module__.startswith("pyspark.sql.connect")


ON_DATABRICKS = "DATABRICKS_RUNTIME_VERSION"
"""Databricks sets it for each Python process of a cluster. Its Delta is not the open-source one."""


def has_known_classes(session: SparkSession) -> bool:
    """Return whether this process reaches the session's JVM, with open-source Delta in it."""
    return not is_connect(session) and ON_DATABRICKS not in os.environ
