"""Commits of files written by the driver: they take about ten milliseconds and no Spark job.

Delta's own transaction makes them: it checks for conflicts and knows the table's features.
Source: Delta transaction log protocol, "Actions".
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from spark_jobs.delta_log.driver_files import write_parquet
from spark_jobs.delta_log.file_statistics import statistics
from spark_jobs.delta_log.jvm import DELTA, SPARK_SQL, java_class, option

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from spark_jobs.delta_log.file_cache import Action


_NOT_PLAIN = (
    "delta.columnMapping.mode",
    "delta.constraints.",
    "delta.enableChangeDataFeed",
    "delta.enableIcebergCompat",
    "delta.enableRowTracking",
)


@dataclass(frozen=True, slots=True)
class Work:
    """The Delta transaction of a commit: application `app_id`, version `version`.

    `mode`: Append if no file is removed, Complete if no earlier file remains.
    """

    app_id: str
    version: int
    mode: Literal["Append", "Update", "Complete"]


def is_plain(snapshot: Any) -> bool:  # noqa: ANN401 - Delta's
    """Return whether the driver may add files to the table; if not, Spark must write them."""
    names = str(snapshot.metadata().configuration().keys().mkString("\n")).split("\n")
    return not any(name.startswith(_NOT_PLAIN) for name in names)


def new_file(
    session: SparkSession, path: str, rows: pa.Table, *, indexed: Sequence[str] = ()
) -> Action:
    """Write rows to a new file of the table at `path`; return the action that adds it.

    No reader sees the file before it is committed; if it never is, VACUUM removes it. `indexed`:
    columns to write statistics for; timestamps always have them. Raises Py4JError or OSError.
    """
    name = f"part-00000-{uuid.uuid4()}-c000.snappy.parquet"
    size = write_parquet(session, path, name, rows)
    added = {
        "path": name,
        "partitionValues": {},
        "size": size,
        "modificationTime": time.time_ns() // 1_000_000,
        "dataChange": True,
        "stats": json.dumps(statistics(rows, indexed)),
    }
    return {"add": added}


def removed(add: Action, now_ms: int) -> Action:
    """Return the action that removes a file. `add`: its add action; `now_ms`: since 1970."""
    gone = {
        "path": add["path"],
        "partitionValues": {},
        "size": add["size"],
        "deletionTimestamp": now_ms,
        "dataChange": True,
        "extendedFileMetadata": True,
    }
    vector = add.get("deletionVector")
    return {"remove": gone if vector is None else gone | {"deletionVector": vector}}


def commit(
    session: SparkSession,
    path: str,
    actions: Sequence[Action],
    work: Work,
    *,
    of_version: int,
    told: str | None = None,
) -> bool:
    """Commit if `of_version` is still the newest version; return whether it was.

    `told`: the commit's `userMetadata`. Raises Py4JError, also if another commit came in between.
    """
    own = session._jsparkSession  # noqa: SLF001 - Delta has no call for it in Python
    java_class(session, f"{SPARK_SQL}.classic.SparkSession").setActiveSession(own)
    transaction = java_class(session, f"{DELTA}.DeltaLog").forTable(own, path).startTransaction()
    if transaction.snapshot().version() != of_version:
        return False
    transaction.readWholeTable()
    now_ms = time.time_ns() // 1_000_000
    done = {"appId": work.app_id, "version": work.version, "lastUpdated": now_ms}
    found = java_class(session, "java.util.ArrayList")()
    from_json = java_class(session, f"{DELTA}.actions.Action").fromJson
    for action in [*actions, {"txn": done}]:
        found.add(from_json(json.dumps(action)))
    mode = getattr(java_class(session, f"{SPARK_SQL}.streaming.OutputMode"), work.mode)()
    operation = java_class(session, f"{DELTA}.DeltaOperations$StreamingUpdate")(
        mode, work.app_id, work.version, option(session, told)
    )
    to_seq = java_class(session, "org.apache.spark.api.python.PythonUtils").toSeq
    transaction.commit(to_seq(found), operation)
    return True
