"""Which files a mirror is made of, as its log tells: known from batch to batch.

Source: Delta transaction log protocol, "Actions".
"""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from spark_jobs.delta_log.commits import Signature, log_entries

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import SparkSession

_MAX_ENTRIES = 8
"""So many log entries are looked at for one that wrote all files: more are quicker by Spark."""
_MAX_NEW = 64
"""What was known so many versions ago is brought up to date by the log, and holds as long."""
_MAX_FILES = 1_000
"""Mirrors of more files are left to Spark."""
_FEW_BYTES = 4 << 20

Action = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Files:
    """Of a version of a table: the `add` actions, by path, and the newest signature there is.

    `are_left`: they are no business of the driver's.
    """

    table_id: str
    version: int
    adds: Mapping[str, Action]
    signature: Signature | None
    are_left: bool = False


@dataclass(frozen=True, slots=True)
class MirrorFiles:
    """The files of a job's mirrors. Of one mirror, one thread asks at a time."""

    _known: dict[str, Files] = field(default_factory=dict)
    _large: threading.RLock = field(default_factory=threading.RLock)

    @contextmanager
    def room_for(self, nbytes: int) -> Iterator[None]:
        """Wait until nobody else has more than a few MB in memory, if this is so much."""
        with self._large if nbytes > _FEW_BYTES else nullcontext():
            yield

    def of(self, session: SparkSession, path: str, snapshot: Any) -> Files | None:  # noqa: ANN401
        """Return the files of Delta's snapshot of a table; None for too many, and if it's not told.

        A Spark job where more than a few commits were made since they were last told whole.
        """
        table_id, version = str(snapshot.metadata().id()), int(snapshot.version())
        known = self._known.get(path)
        if known is not None and not (
            known.table_id == table_id and 0 <= version - known.version <= _MAX_NEW
        ):
            known = None
        if known is not None and known.are_left:
            return None
        found = _files(session, path, snapshot, table_id, known)
        if found is not None and len(found.adds) > _MAX_FILES:
            self.leave_to_spark(path, found)
            return None
        if found is not None:
            self._known[path] = found
        return found

    def leave_to_spark(self, path: str, files: Files) -> None:
        """Give no files of this mirror until some commits later."""
        self._known[path] = replace(files, adds={}, are_left=True)


def _files(
    session: SparkSession,
    path: str,
    snapshot: Any,  # noqa: ANN401 - a Scala object
    table_id: str,
    known: Files | None,
) -> Files | None:
    version = int(snapshot.version())
    oldest = max(version - _MAX_ENTRIES + 1, 0) if known is None else known.version + 1
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
        if number == 0 or _is_whole(info):
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


def _is_whole(info: Action) -> bool:
    """Return whether a commit names every file there is after it."""
    told = info.get("operationParameters", {})
    if info.get("operation") == "STREAMING UPDATE":
        return bool(told.get("outputMode") == "Complete")
    is_overwrite = info.get("operation") == "WRITE" and told.get("mode") == "Overwrite"
    return is_overwrite and "predicate" not in told


def _listed(snapshot: Any) -> dict[str, Action]:  # noqa: ANN401 - a Scala object
    rows = snapshot.allFiles().limit(_MAX_FILES + 1).toJSON().collectAsList()
    adds = [json.loads(row) for row in rows]
    return {add["path"]: add for add in adds}
