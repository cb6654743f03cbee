"""Files that a table's log names but that no longer exist.

Someone deleted them by hand, or a store's rules did. VACUUM never does: it keeps what the newest
version needs. Source: Delta transaction log protocol, "Add File", "Per-file Statistics".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta.tables import DeltaTable
from pyspark.sql import DataFrame

from ingestd.lake.delta.commit import statistics_of
from ingestd.lake.delta.log_paths import file_of
from spark_jobs.delta_log.commits import snapshot_of
from spark_jobs.delta_log.jvm import HADOOP_PATH, java_class

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class GoneFile:
    """`name`: relative to the table; `highest_lsn`: of its `_cdc_lsn`, None if not in the log."""

    name: str
    highest_lsn: int | None


def gone_files(session: SparkSession, path: str) -> list[GoneFile]:
    """Return the missing files of the newest version of a Delta table; none without a table.

    Checks every file, so call it only after a read has failed.
    """
    if not DeltaTable.isDeltaTable(session, path):
        return []
    files = DataFrame(snapshot_of(session, path).allFiles().toDF(), session)
    configuration = session._jsparkSession.sessionState().newHadoopConf()  # noqa: SLF001
    hadoop_path = java_class(session, HADOOP_PATH)
    folder = hadoop_path(path)
    system = folder.getFileSystem(configuration)
    found = []
    for row in files.select("path", "stats").collect():
        name = file_of(row["path"], path)
        if not system.exists(hadoop_path(folder, name)):
            highest = statistics_of(row["stats"]).get("maxValues", {}).get("_cdc_lsn")
            found.append(GoneFile(name, highest))
    return found
