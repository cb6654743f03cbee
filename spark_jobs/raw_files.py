"""Raw rows of the newest epochs, read by the driver from the files that the log names last.

What `SourceLake.changes` gives, without a Spark job, where the log tells it in a few entries.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from spark_jobs.commits import log_entries, newest_entry
from spark_jobs.driver_files import TooLargeError, read_parquet

if TYPE_CHECKING:
    from spark_jobs.lake import SourceLake

_MAX_ENTRIES = 32
"""So many log entries are looked at: more are quicker by Spark."""
_MAX_NBYTES = 512 << 20
"""So much memory raw rows take at most."""
_EPOCH = "_cdc_epoch"


def read_newest(
    lake: SourceLake, table: str, *, above: int, through: int, rows: int
) -> pa.Table | None:
    """Give the raw rows of the epochs above one and through another; None: let Spark read them.

    They are `rows`, as `_epochs` has it, or it is None: so nothing hangs on the order of the log's
    entries, nor on a file that was compacted meanwhile.
    """
    path = lake.raw_path(table)
    try:
        names = _newest_files(lake, path, above, through)
        if not names:
            return None
        read, left = [], _MAX_NBYTES
        for name in names:
            read.append(read_parquet(lake.session, path, name, max_nbytes=left))
            left -= read[-1].nbytes
        found = pa.concat_tables(read, promote_options="default")
    except (Py4JError, PySparkException, pa.ArrowException, TooLargeError, OSError, ValueError):
        return None  # a file or entry that is gone or torn: Spark knows better what that means
    epoch = found[_EPOCH]
    found = found.filter(pc.and_(pc.greater(epoch, above), pc.less_equal(epoch, through)))
    return found if found.num_rows == rows else None


def has_unsent(changes: pa.Table, names: Sequence[str]) -> bool:
    """Whether some change did not send one of these columns."""
    unsent = pc.unique(pc.list_flatten(changes["_cdc_unchanged"]))
    return not set(names).isdisjoint(unsent.to_pylist())


def _newest_files(lake: SourceLake, path: str, above: int, through: int) -> list[str] | None:
    """Name the files that may have these epochs; None if the newest entries do not tell."""
    newest = newest_entry(lake.session, path)
    names: list[str] = []
    for version in range(newest, max(newest - _MAX_ENTRIES, -1), -1):
        added = _added(log_entries(lake.session, path, version))
        if added is None:
            return None
        names += [name for name, low, high in added if high > above and low <= through]
        if added and all(high <= above for _, _, high in added):
            return names
    return names if newest < _MAX_ENTRIES else None


def _added(entries: list[dict[str, Any]] | None) -> list[tuple[str, int, int]] | None:
    """Give name, lowest and highest epoch of the files that an entry added; None: not told.

    A compaction adds no rows. Where rows were taken out, by somebody's DELETE, it is not told.
    """
    if entries is None or any(e["remove"]["dataChange"] for e in entries if "remove" in e):
        return None
    found = []
    for add in (e["add"] for e in entries if "add" in e):
        if not add["dataChange"]:
            continue
        told = json.loads(add.get("stats") or "{}")
        low = told.get("minValues", {}).get(_EPOCH)
        high = told.get("maxValues", {}).get(_EPOCH)
        if low is None or high is None or add.get("partitionValues") or "deletionVector" in add:
            return None
        found.append((unquote(add["path"]), low, high))
    return found
