"""Timestamps in files of other engines: INT96 as Spark writes it, at the ends of its range."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake

from ingestd.lake.delta.newest_rows import newest_rows
from ingestd.lake.delta.read import read_raw
from ingestd.lake.maintenance.compaction import MaintenancePolicy, TableMaintenance
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.plain_files import Fsync
from tests.unit.lake.rows import make_table

if TYPE_CHECKING:
    from pathlib import Path

AT = [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)]
FOLDER = "shop/public/a"


def test_lossless_96_bit_timestamps_of_another_engine(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    for number in range(8):
        rows = pa.table(
            {
                "_cdc_lsn": pa.array([2 * number, 2 * number + 1]),
                "_cdc_seq": pa.array([1, 2]),
                "at": pa.array(AT, pa.timestamp("us", "UTC")),
            }
        )
        write_deltalake(folder, rows, mode="append")
    for path in folder.glob("*.parquet"):
        rows = pq.read_table(path, partitioning=None)
        pq.write_table(rows, path, use_deprecated_int96_timestamps=True, store_schema=False)
    assert _found(tmp_path) == 8 * AT
    policy = MaintenancePolicy(1 << 20, None)
    store = LocalStore(tmp_path, Fsync())
    assert TableMaintenance(store, FOLDER, policy, now_s=0, began_s=0).run().joined_files == 8
    assert _found(tmp_path) == 8 * AT


def _found(lake: Path) -> list[datetime]:
    rows = newest_rows(LocalStore(lake, Fsync()), FOLDER, ("_cdc_lsn", "_cdc_seq"), 99)
    assert rows is not None
    newest = [row["at"] for row in reversed(rows)]
    read = read_raw(str(lake), "shop", make_table("a").id).sort_by("_cdc_lsn")["at"].to_pylist()
    assert newest == read
    return newest
