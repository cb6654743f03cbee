"""Delta's log of a table, by Delta's own classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError

from ingestd.lake.delta.commit import actions_in
from ingestd.lake.delta.log_files import MOST_COMMIT_BYTES
from ingestd.lake.store.errors import storage_faults
from ingestd.lake.store.plain_files import ensure_size
from spark_jobs.accelerator.jvm import DELTA, HADOOP_PATH, java_class

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MISSING = "java.io.FileNotFoundException"


def current_version(session: SparkSession, path: str) -> int:
    """Return the newest version of a table. Spark job: see `snapshot_of`."""
    return int(snapshot_of(session, path).version())


def newest_entry(session: SparkSession, path: str) -> int:
    """Return the newest version of a table, by the file names in its log; -1 without a table.

    Unlike `current_version`, this loads no snapshot of a newer version, which would cost a Spark
    job if another engine wrote it.
    """
    log = delta_log(session, path)
    found = int(log.unsafeVolatileSnapshot().version())
    names = log.listFrom(max(found, 0))
    for _ in range(_MAX_LISTED):
        if not names.hasNext():
            return found
        number, _, kind = str(names.next().getPath().getName()).partition(".")
        if kind == "json":
            found = int(number)
    return current_version(session, path)


_MAX_LISTED = 100


def snapshot_of(session: SparkSession, path: str) -> Any:  # noqa: ANN401 - a Scala object
    """Return Delta's snapshot of a table's newest version.

    No Spark job for a version that Delta wrote; one for a version of another engine, once.
    """
    logs = java_class(session, f"{DELTA}.DeltaLog")  # Delta has no call for it in Python
    own = session._jsparkSession  # noqa: SLF001
    # Delta reads a checkpoint in the session of the thread, which a new thread does not have.
    java_class(session, own.getClass().getName()).setActiveSession(own)
    # (`update` takes other arguments in each version)
    return logs.forTableWithSnapshot(own, path)._2()  # noqa: SLF001


def delta_log(session: SparkSession, path: str) -> Any:  # noqa: ANN401 - a Scala object
    """Return Delta's view of a table's log."""
    logs = java_class(session, f"{DELTA}.DeltaLog")
    return logs.forTable(session._jsparkSession, path)  # noqa: SLF001


def log_entries(session: SparkSession, path: str, version: int) -> list[dict[str, Any]] | None:
    """Return the actions of a version; None if its log entry no longer exists. No Spark job.

    Raise FolderError if the entry is not one that a daemon would accept, or too large.

    Source: Delta transaction log protocol, "Delta Log Entries".
    """
    log = delta_log(session, path)
    file = java_class(session, HADOOP_PATH)(log.logPath(), f"{version:020d}.json")
    configuration = log.newDeltaHadoopConf()
    try:
        nbytes = file.getFileSystem(configuration).getFileStatus(file).getLen()
    except Py4JJavaError as error:
        if error.java_exception.getClass().getName() == _MISSING:
            return None
        raise
    with storage_faults(path):
        ensure_size(file.toString(), nbytes, MOST_COMMIT_BYTES)
        lines: str = log.store().read(file, configuration).mkString("\n")
        return actions_in(lines.encode(), file.toString())
