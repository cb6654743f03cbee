"""The files of mirrors according to their logs, kept in memory from batch to batch.

Source: Delta transaction log protocol, "Actions".
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from spark_jobs.accelerator.class_log import log_entries
from spark_jobs.delta_log.commits import Signature

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

_MAX_NEW = 64
"""After more new versions than this, files are re-read, and a mirror left to Spark is retried."""
_MAX_FILES = 1_000
"""Mirrors with more files are left to Spark."""
_FEW_BYTES = 4 << 20

Action = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a version of a table: `add` actions by path, and the newest known signature.

    `is_for_spark`: the driver leaves changes of this table to Spark.
    """

    table_id: str
    version: int
    adds: Mapping[str, Action]
    signature: Signature | None
    is_for_spark: bool = False


@dataclass(frozen=True, slots=True)
class MirrorFiles:
    """The files of a job's mirrors. Only one thread may ask about a mirror at a time.

    `most_entries`: log entries to search for one that lists all files. Beyond that, Spark is
    faster.
    """

    most_entries: int = 8
    _known: dict[str, Files] = field(default_factory=dict)
    _large: threading.RLock = field(default_factory=threading.RLock)

    @contextmanager
    def room_for(self, nbytes: int) -> Iterator[None]:
        """Wait until no other caller holds more than a few MB in memory; no wait for few bytes."""
        with self._large if nbytes > _FEW_BYTES else nullcontext():
            yield

    def at_snapshot(self, session: SparkSession, path: str, snapshot: Any) -> Files | None:  # noqa: ANN401
        """Return the files of a snapshot of a table; None if too many, or if the log lacks them.

        Runs a Spark job if the last commit that lists all files is more than a few commits ago.
        """
        table_id, version = str(snapshot.metadata().id()), int(snapshot.version())
        known = self._known.get(path)
        if known is not None and not (
            known.table_id == table_id and 0 <= version - known.version <= _MAX_NEW
        ):
            known = None
        if known is not None and known.is_for_spark:
            return None
        found = self._files(session, path, snapshot, table_id, known)
        if found is not None and len(found.adds) > _MAX_FILES:
            self.leave_to_spark(path, found)
            return None
        if found is not None:
            self._known[path] = found
        return found

    def leave_to_spark(self, path: str, files: Files) -> None:
        """Return no files of this mirror for the next few commits."""
        self._known[path] = replace(files, adds={}, is_for_spark=True)

    def _files(
        self,
        session: SparkSession,
        path: str,
        snapshot: Any,  # noqa: ANN401 - a Scala object
        table_id: str,
        known: Files | None,
    ) -> Files | None:
        version = int(snapshot.version())
        oldest = max(version - self.most_entries + 1, 0) if known is None else known.version + 1
        newer: list[list[Action]] = []
        signature: Signature | None = None
        adds: dict[str, Action] | None = None if known is None else dict(known.adds)
        for number in range(version, oldest - 1, -1):
            entries = log_entries(session, path, number)
            if entries is None:
                return None
            info: Action = next((e["commitInfo"] for e in entries if "commitInfo" in e), {})
            signature = signature or Signature.parse(info.get("userMetadata"))
            newer.append(entries)
            if number == 0 or _lists_all_files(info):
                adds = {}
                break
        if adds is None:
            adds, newer = _listed(snapshot), []
        for entries in reversed(newer):
            for entry in entries:
                if "remove" in entry:
                    adds.pop(entry["remove"]["path"], None)
            adds |= {e["add"]["path"]: e["add"] for e in entries if "add" in e}
        return Files(table_id, version, adds, signature or (known.signature if known else None))


def _lists_all_files(info: Action) -> bool:
    """Return whether a commit lists every file of the table after it."""
    parameters = info.get("operationParameters")
    if not isinstance(parameters, dict):
        return False
    if info.get("operation") == "STREAMING UPDATE":
        return bool(parameters.get("outputMode") == "Complete")
    is_overwrite = info.get("operation") == "WRITE" and parameters.get("mode") == "Overwrite"
    return is_overwrite and "predicate" not in parameters


def _listed(snapshot: Any) -> dict[str, Action]:  # noqa: ANN401 - a Scala object
    rows = snapshot.allFiles().limit(_MAX_FILES + 1).toJSON().collectAsList()
    adds = [json.loads(row) for row in rows]
    return {add["path"]: add for add in adds}
