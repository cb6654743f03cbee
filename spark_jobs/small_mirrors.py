"""Mirrors of a few MB, rewritten in the driver: no Spark job, one file, one commit.

The commit is made by Delta's own transaction: it checks for conflicts and knows the table's
features. What is not plain here (a table with deletion vectors in use, column mapping, constraints)
is left to Spark. Source: Delta transaction log protocol, "Actions".
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from spark_jobs.commits import Signature, log_entries, snapshot_of
from spark_jobs.driver_files import read_parquet, write_parquet
from spark_jobs.rewriting import rewritten, shaped

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MAX_ENTRIES = 8
"""So many log entries are looked at for the one that wrote all files."""
_NOT_PLAIN = ("delta.columnMapping.mode", "delta.constraints.", "delta.enableIcebergCompat")
"""Properties of tables that Spark is to write."""


@dataclass(frozen=True, slots=True)
class SmallMirror:
    """The mirror at `path`, of at most `max_bytes`, that has the rows of epoch `above`.

    What it commits is of the application `app_id`. Its methods raise Py4JError: for a store that
    fails, and where another commit came between.
    """

    session: SparkSession
    path: str
    app_id: str
    above: int
    max_bytes: int

    def rewrite(self, outcomes: pa.Table, key: Sequence[str], signature: Signature) -> bool:
        """Apply outcomes, signed as `commits.signed` does; False if that can't be done here."""
        snapshot = snapshot_of(self.session, self.path)
        version = snapshot.version()
        files = self._files(version)
        if files is None or not _is_plain(snapshot.metadata().configuration()):
            return False
        kind = StructType.fromJson(json.loads(snapshot.schema().json()))
        schema = to_arrow_schema(kind, timezone="UTC")
        read = [read_parquet(self.session, self.path, unquote(file["path"])) for file in files]
        old = pa.concat_tables([shaped(rows, schema) for rows in read] or [schema.empty_table()])
        rows = rewritten(old, outcomes, key)
        return rows is not None and self._overwrite(files, rows, signature, version)

    def _files(self, version: int) -> list[dict[str, Any]] | None:
        """Give the `add` actions of all files of a version.

        None for too many bytes, and if its last log entries do not tell. They do if one of them
        wrote the whole table, those after it changed no files, and the newest that is signed is of
        epoch `above` (somebody else may have gone on meanwhile).
        """
        signed: Signature | None = None
        for number in range(version, max(version - _MAX_ENTRIES, -1), -1):
            entries = log_entries(self.session, self.path, number)
            if entries is None:
                return None
            info: dict[str, Any] = next((e["commitInfo"] for e in entries if "commitInfo" in e), {})
            signed = signed or Signature.parse(info.get("userMetadata"))
            added = [e["add"] for e in entries if "add" in e]
            parameters = info.get("operationParameters", {})
            is_whole = info.get("operation") == "WRITE" and parameters.get("mode") == "Overwrite"
            if is_whole and "predicate" not in parameters:
                is_small = sum(add["size"] for add in added) < self.max_bytes
                is_there = signed is not None and signed.epoch == self.above
                return added if is_small and is_there else None
            if added or any("remove" in e for e in entries):
                return None
        return None

    def _overwrite(
        self, files: Sequence[dict[str, Any]], rows: pa.Table, signature: Signature, version: int
    ) -> bool:
        """Put `rows` in the place of the version's files; False if that is not the newest now."""
        jvm: Any = self.session._jvm  # noqa: SLF001 - Delta has no call for it in Python
        delta, own = jvm.org.apache.spark.sql.delta, self.session._jsparkSession  # noqa: SLF001
        jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(own)
        transaction = delta.DeltaLog.forTable(own, self.path).startTransaction()
        if transaction.snapshot().version() != version:
            return False
        transaction.readWholeTable()
        now_ms = time.time_ns() // 1_000_000
        actions: list[dict[str, Any]] = [{"remove": _removed(file, now_ms)} for file in files]
        if rows.num_rows:
            name = f"part-00000-{uuid.uuid4()}-c000.snappy.parquet"
            size = write_parquet(self.session, self.path, name, rows)
            actions.append({"add": _added(name, size, rows.num_rows, now_ms)})
        done = {"appId": self.app_id, "version": signature.epoch, "lastUpdated": now_ms}
        found = jvm.java.util.ArrayList()
        for action in [*actions, {"txn": done}]:
            found.add(delta.actions.Action.fromJson(json.dumps(action)))
        none, text = jvm.scala.Option.empty(), jvm.scala.Option.apply(signature.to_text())
        mode = jvm.org.apache.spark.sql.SaveMode.Overwrite
        write = getattr(delta, "DeltaOperations$Write")
        operation = write(mode, none, none, text, none, none, none, none, none)
        transaction.commit(jvm.org.apache.spark.api.python.PythonUtils.toSeq(found), operation)
        return True


def _is_plain(properties: Any) -> bool:  # noqa: ANN401 - a Scala map
    names = properties.keys().mkString("\n").split("\n")
    return not any(name.startswith(_NOT_PLAIN) for name in names)


def _added(name: str, size: int, rows: int, now_ms: int) -> dict[str, Any]:
    return {
        "path": name,
        "partitionValues": {},
        "size": size,
        "modificationTime": now_ms,
        "dataChange": True,
        "stats": json.dumps({"numRecords": rows, "tightBounds": True}),
    }


def _removed(file: dict[str, Any], now_ms: int) -> dict[str, Any]:
    return {
        "path": file["path"],
        "partitionValues": {},
        "size": file["size"],
        "deletionTimestamp": now_ms,
        "dataChange": True,
        "extendedFileMetadata": True,
    }
