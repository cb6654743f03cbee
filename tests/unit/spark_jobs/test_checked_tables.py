"""Spark jobs check a log again if a part of it was replaced since they did."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.paths import OddFileError
from ingestd.lake.store.plain_files import Fsync
from spark_jobs.delta_log.checked_tables import CheckedTables
from tests.harness.hostile_folder import deep_parquet, make_table, plant_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.attack("lake writer")
DEEP = deep_parquet(200_000)
FILLED_BYTES = 186
"""Of a file without rows, apart from what fills it."""


def _shallow(nbytes: int) -> bytes:
    """Return a Parquet file of that size, with two levels."""
    sink = pa.BufferOutputStream()
    rows = pa.table({"txn": pa.array([], pa.struct([("appId", pa.string())]))})
    with pq.ParquetWriter(sink, rows.schema, store_schema=False) as writer:
        writer.write_table(rows)
        writer.add_key_value_metadata({"filler": "x" * (nbytes - FILLED_BYTES)})
    content: bytes = sink.getvalue().to_pybytes()
    return content


@pytest.mark.parametrize("kind", ["a checkpoint", "a sidecar"])
def test_a_replaced_part_of_a_log_is_checked(tmp_path: Path, kind: str) -> None:
    """Also one of the same size and time."""
    log = make_table(tmp_path / "bad")
    path = log / f"{0:020}.checkpoint.parquet"
    if kind == "a checkpoint":
        plant_checkpoint(log, _shallow(len(DEEP)))
    else:
        path = log / "_sidecars" / "a.parquet"
        path.parent.mkdir()
        path.write_bytes(_shallow(len(DEEP)))
        action = {"sidecar": {"path": "a.parquet", "sizeInBytes": 1, "modificationTime": 1}}
        plant_checkpoint(log, f"{json.dumps(action)}\n".encode(), "checkpoint.u.json")
    store, checked = LocalStore(tmp_path, Fsync()), CheckedTables()
    checked.ensure_readable(store, "bad")
    before = path.stat()
    assert before.st_size == len(DEEP)
    path.write_bytes(DEEP)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(OddFileError):
        checked.ensure_readable(store, "bad")


def test_an_unchanged_log_is_checked_once(tmp_path: Path) -> None:
    """Later listings alone decide it: the checkpoint is not read again."""
    log = make_table(tmp_path / "t")
    plant_checkpoint(log, _shallow(2_000))
    (log / "_sidecars").mkdir()
    (log / "_sidecars" / "a.parquet").write_bytes(_shallow(2_000))
    store, checked = LocalStore(tmp_path, Fsync()), CheckedTables()
    checked.ensure_readable(store, "t")
    store.open = None  # type: ignore[assignment, method-assign] # nothing is opened
    store.read = None  # type: ignore[assignment, method-assign]
    checked.ensure_readable(store, "t")
