"""Commits of files that the driver wrote: no Spark job, some ten milliseconds.

They are made by Delta's own transaction: it checks for conflicts and knows the table's features.
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
    """What a commit is: of the application `app_id`, its version `version`.

    `mode`: Append where nothing is taken away, Complete where nothing of before is left.
    """

    app_id: str
    version: int
    mode: Literal["Append", "Update", "Complete"]


def is_plain(snapshot: Any) -> bool:  # noqa: ANN401 - Delta's
    """Return whether files of the driver may be added; else Spark is to write."""
    names = str(snapshot.metadata().configuration().keys().mkString("\n")).split("\n")
    return not any(name.startswith(_NOT_PLAIN) for name in names)


def new_file(
    session: SparkSession, path: str, rows: pa.Table, *, indexed: Sequence[str] = ()
) -> Action:
    """Write rows to a new file of the table at `path`; give the action that adds it.

    Until it is committed nobody reads it; VACUUM takes it away. `indexed`: columns that have
    statistics; times have them always. Raises Py4JError or OSError.
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
    """Return the action that takes away what `add` added. `now_ms`: since 1970."""
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
    """Commit if `of_version` is the newest still; False if not.

    `told`: the commit's `userMetadata`. Raises Py4JError, where another commit came between, too.
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
