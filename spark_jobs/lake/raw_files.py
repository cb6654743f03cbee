"""Raw rows of the newest epochs, read by the driver from the files that the log added last.

The rows are those of `SourceLake.changes`, without a Spark job, if a few log entries suffice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.delta_log.newest_files import NewestFiles

if TYPE_CHECKING:
    from spark_jobs.lake.source_lake import SourceLake

_EPOCH = "_cdc_epoch"


def read_newest(
    lake: SourceLake, table: str, *, above: int, through: int, rows: int
) -> pa.Table | None:
    """Return the raw rows of the epochs above one, up to another; None if Spark must read them.

    `rows`: the number that `_epochs` has for them. With any other number the result is None, so
    neither the order of the log's entries nor a compaction can make it wrong.
    """
    files = NewestFiles(lake.session, lake.raw_path(table))
    found = files.rows_above(_EPOCH, above, through)
    if found is None:
        return None
    found = found.filter(pc.less_equal(found[_EPOCH], through))
    return found if found.num_rows == rows else None


def has_unsent(changes: pa.Table, names: Sequence[str]) -> bool:
    """Return whether some change did not send one of these columns."""
    unsent = pc.unique(pc.list_flatten(changes["_cdc_unchanged"]))
    return not set(names).isdisjoint(unsent.to_pylist())
