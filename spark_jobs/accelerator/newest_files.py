"""The files that the newest entries of a table's log added, and their rows: no Spark job.

Reading a table by Spark takes 0.3 to 1 s, whatever its size, mostly to replay the log. This module
reads a few log entries, or leaves the read to Spark. A compaction adds no rows and is skipped; if a
commit removes rows, Spark must read. Source: Delta transaction log protocol, "Actions".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from ingestd.lake.delta.commit import statistics_of
from ingestd.lake.delta.log_paths import file_of
from spark_jobs.accelerator.class_log import log_entries, newest_entry
from spark_jobs.accelerator.driver_files import TooLargeError, read_parquet
from spark_jobs.accelerator.switch import Switch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MOST_ENTRIES = 32
_MAX_NBYTES = 512 << 20
"""Memory that the rows may take."""


@dataclass(frozen=True, slots=True)
class NewestFiles:
    """Implements `spark_jobs.delta_log.acceleration.NewestRows`.

    `most_entries`: log entries to read at most. Beyond that, Spark is faster.
    Raises FolderError if the log names a file that is not the table's own.
    """

    session: SparkSession
    path: str
    most_entries: int = MOST_ENTRIES
    switch: Switch = field(default_factory=Switch)

    def rows_above(self, column: str, above: int, through: int | None = None) -> pa.Table | None:
        """See `NewestRows`."""
        found = self._read_rows(lambda: self._files_above(column, above, through))
        return None if found is None else found.filter(pc.greater(found[column], above))

    def all_rows(self) -> pa.Table | None:
        """See `NewestRows`."""
        return self._read_rows(self._all_files)

    def last_rows(self, app_id: str | None = None) -> pa.Table | None:
        """See `NewestRows`."""
        return self._read_rows(lambda: self._last_files(app_id))

    def _read_rows(self, files: Callable[[], Sequence[str] | None]) -> pa.Table | None:
        try:
            names = files()
            if not names:
                return None
            read, left = [], _MAX_NBYTES
            for name in names:
                read.append(read_parquet(self.session, self.path, name, max_nbytes=left))
                left -= read[-1].nbytes
            return pa.concat_tables(read, promote_options="default")
        except (Py4JError, PySparkException) as error:
            self.switch.stays_on(self.session, error)
            return None
        except (pa.ArrowException, TooLargeError, OSError, ValueError):
            return None  # a missing or torn file or entry: Spark reports it better

    def _files_above(self, column: str, above: int, through: int | None) -> list[str] | None:
        newest = newest_entry(self.session, self.path)
        names: list[str] = []
        for version in range(newest, max(newest - self.most_entries, -1), -1):
            entries = log_entries(self.session, self.path, version)
            if entries is None or _takes_rows(entries):
                return None
            added = [_bounds(add, column, self.path) for add in _added(entries)]
            known = [bounds for bounds in added if bounds is not None]
            if len(known) < len(added):
                return None
            names += [
                name
                for name, low, high in known
                if high > above and (through is None or low <= through)
            ]
            if known and all(high <= above for _, _, high in known):
                return names
        return names if newest < self.most_entries else None

    def _all_files(self) -> list[str] | None:
        newest = newest_entry(self.session, self.path)
        if newest >= self.most_entries:
            return None
        names: list[str] = []
        for version in range(newest + 1):
            entries = log_entries(self.session, self.path, version)
            if entries is None or _takes_rows(entries):
                return None
            added = _added(entries)
            if not all(map(_is_plain, added)):
                return None
            names += [file_of(add["path"], self.path) for add in added]
        return names

    def _last_files(self, app_id: str | None) -> list[str] | None:
        newest = newest_entry(self.session, self.path)
        for version in range(newest, max(newest - self.most_entries, -1), -1):
            entries = log_entries(self.session, self.path, version)
            if entries is None:
                return None
            is_own = any(e["txn"]["appId"] == app_id for e in entries if "txn" in e)
            if _takes_rows(entries) and not is_own:
                return None
            added = _added(entries)
            if added:
                are_plain = all(map(_is_plain, added))
                names = [file_of(add["path"], self.path) for add in added]
                return names if are_plain else None
        return None


def _takes_rows(entries: Sequence[dict[str, Any]]) -> bool:
    return any(e["remove"]["dataChange"] for e in entries if "remove" in e)


def _added(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e["add"] for e in entries if "add" in e and e["add"]["dataChange"]]


def _is_plain(add: dict[str, Any]) -> bool:
    return not add.get("partitionValues") and "deletionVector" not in add


def _bounds(add: dict[str, Any], column: str, table: str) -> tuple[str, int, int] | None:
    """Return a file's name and its lowest and highest value; None without statistics."""
    statistics = statistics_of(add.get("stats"))
    low, high = (statistics.get(name, {}).get(column) for name in ("minValues", "maxValues"))
    if low is None or high is None or not _is_plain(add):
        return None
    return file_of(add["path"], table), low, high
