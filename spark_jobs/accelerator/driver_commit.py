"""Commits of files written by the driver: they take about ten milliseconds and no Spark job.

With the statistics of a new file, by which readers of a Delta table skip files.

Delta's own transaction makes them: it checks for conflicts and knows the table's features.
Source: Delta transaction log protocol, "Actions", "Per-file Statistics".
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.accelerator.driver_files import write_parquet
from spark_jobs.accelerator.jvm import DELTA, SPARK_SQL, java_class, option

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_jobs.accelerator.file_cache import Action

_NOT_PLAIN = (
    "delta.columnMapping.mode",
    "delta.constraints.",
    "delta.enableChangeDataFeed",
    "delta.enableIcebergCompat",
    "delta.enableRowTracking",
)

OutputMode = Literal["Append", "Update", "Complete"]


@dataclass(frozen=True, slots=True)
class AppTransaction:
    """The app transaction of a commit: application `app_id`, version `version`.

    `mode`: Append if no file is removed, Complete if no earlier file remains.
    """

    app_id: str
    version: int
    mode: OutputMode


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
    app_transaction: AppTransaction,
    *,
    of_version: int,
    signature: str | None = None,
) -> bool:
    """Commit if `of_version` is still the newest version; return whether it was.

    `signature`: the commit's `userMetadata`. Raises Py4JError, also if another commit came in
    between.
    """
    own = session._jsparkSession  # noqa: SLF001 - Delta has no call for it in Python
    # (from 4.0 on, there are classes for classic and for Connect sessions)
    java_class(session, own.getClass().getName()).setActiveSession(own)
    transaction = java_class(session, f"{DELTA}.DeltaLog").forTable(own, path).startTransaction()
    if transaction.snapshot().version() != of_version:
        return False
    transaction.readWholeTable()
    now_ms = time.time_ns() // 1_000_000
    done = {
        "appId": app_transaction.app_id,
        "version": app_transaction.version,
        "lastUpdated": now_ms,
    }
    found = java_class(session, "java.util.ArrayList")()
    from_json = java_class(session, f"{DELTA}.actions.Action").fromJson
    for action in [*actions, {"txn": done}]:
        found.add(from_json(json.dumps(action)))
    operation = streaming_update(session, app_transaction, signature)
    to_seq = java_class(session, "org.apache.spark.api.python.PythonUtils").toSeq
    transaction.commit(to_seq(found), operation)
    return True


def streaming_update(
    session: SparkSession, app_transaction: AppTransaction, signature: str | None
) -> Any:  # noqa: ANN401 - Delta's
    """Return the operation that a commit is recorded as. Raises Py4JError."""
    mode = getattr(java_class(session, f"{SPARK_SQL}.streaming.OutputMode"), app_transaction.mode)()
    return java_class(session, f"{DELTA}.DeltaOperations$StreamingUpdate")(
        mode, app_transaction.app_id, app_transaction.version, option(session, signature)
    )


# --- statistics of a new file --------------------------------------------------------------------

_MAX_STATS = 32
_DAY_US = 86_400_000_000
_FIRST_DAY, _LAST_DAY = -354_285, 2_932_896
"""The years 1000 to 9999, in days since 1970: the dates that every reader can represent."""


def statistics(rows: pa.Table, indexed: Sequence[str]) -> dict[str, Any]:
    """Return the statistics of the columns `indexed` and of all temporal columns."""
    bounds: dict[str, tuple[int | str, int | str]] = {}
    ranged = [f.name for f in rows.schema if pa.types.is_temporal(f.type)]
    chosen = dict.fromkeys([*indexed, *ranged])
    names = [name for name in chosen if _has_bounds(rows.schema.field(name).type)][:_MAX_STATS]
    for name in names:
        found = _bounds(rows[name])
        if found is not None:
            bounds[name] = found
    return {
        "numRecords": rows.num_rows,
        "minValues": {name: low for name, (low, _) in bounds.items()},
        "maxValues": {name: high for name, (_, high) in bounds.items()},
        "nullCount": {name: rows[name].null_count for name in names},
        "tightBounds": True,
    }


def _has_bounds(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_date32(kind)
        or (pa.types.is_timestamp(kind) and kind.unit == "us")
    )


def _bounds(values: pa.ChunkedArray) -> tuple[int | str, int | str] | None:
    """Return the bounds as Delta writes them; None without values or if out of range."""
    kind = values.type
    if pa.types.is_integer(kind):
        both = pc.min_max(values).as_py()
        return None if both["min"] is None else (both["min"], both["max"])
    is_date = pa.types.is_date32(kind)
    both = pc.min_max(values.cast(pa.int32() if is_date else pa.int64())).as_py()
    low, high, unit = both["min"], both["max"], 1 if is_date else _DAY_US
    if low is None or low < _FIRST_DAY * unit or high >= _LAST_DAY * unit:
        return None
    if is_date:
        return str(np.datetime64(low, "D")), str(np.datetime64(high, "D"))
    zone = "Z" if kind.tz else ""
    return f"{np.datetime64(low, 'us')}{zone}", f"{np.datetime64(high, 'us')}{zone}"
