"""A checkpoint whose content is far larger than the file is refused before it takes memory (I8)."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from ingestd.lake.delta.log_nesting import ensure_shallow_parquet
from ingestd.lake.store.paths import OddFileError
from tests.harness.hostile_folder import add, commit_of, make_table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.attack("lake writer")

TEXT = '{"numRecords":1,"x":"' + "x" * 2_000_000 + '"}'
ROWS = 1024


def _offsets() -> pa.Array:
    return pa.array(range(ROWS + 1), pa.int32())


def _lists(texts: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(_offsets(), texts)


COLUMNS: dict[str, Callable[[pa.Array], pa.Array]] = {
    "add.path": lambda texts: texts,
    "add.stats": lambda texts: texts,
    "remove.path": lambda texts: texts,
    "metaData.partitionColumns": _lists,
    "metaData.format": lambda texts: pa.StructArray.from_arrays([texts], names=["provider"]),
    "add.tags": lambda texts: pa.MapArray.from_arrays(_offsets(), texts, texts),
}
REFUSED_EACH = r"""
import pathlib, re, sys
import pyarrow as pa
from ingestd.lake.delta.log_nesting import ensure_shallow_parquet
for path in pathlib.Path(sys.argv[1]).glob("*.parquet"):
    try:
        ensure_shallow_parquet(pa.OSFile(str(path)), "p")
        print("read", path.name)
    except OSError as error:
        print(error.why)
print(int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) >> 10)
"""


def _checkpoint(column: str, values: pa.Array) -> pa.Table:
    action, _, field = column.partition(".")
    return pa.table({action: pa.StructArray.from_arrays([values], names=[field])})


def test_a_repeated_text_is_refused_in_every_column(tmp_path: Path) -> None:
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * ROWS, pa.int32()), pa.array([TEXT]))
    late = pa.DictionaryArray.from_arrays(
        pa.array([None] * 50_000 + [0] * ROWS, pa.int32()), pa.array([TEXT])
    )
    for number, (column, nested) in enumerate(COLUMNS.items()):
        pq.write_table(_checkpoint(column, nested(texts)), tmp_path / f"{number}.parquet")
    for number, knows_types in enumerate([False, True]):
        table, path = _checkpoint("add.stats", late), tmp_path / f"late {number}.parquet"
        pq.write_table(table, path, store_schema=knows_types)
    command = [sys.executable, "-c", REFUSED_EACH, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    *said, peak_mb = done.stdout.splitlines()
    assert said == ["is not a checkpoint: it unpacks to far more than it is"] * (len(COLUMNS) + 2)
    assert int(peak_mb) < 70 + 200


def test_many_rows_are_refused_by_their_number(tmp_path: Path) -> None:
    path = str(tmp_path / "x.parquet")
    names = pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), 20_000_000), ["a"])
    pq.write_table(_checkpoint("sidecar.path", names), path)
    with pytest.raises(OddFileError, match="unpacks"):
        ensure_shallow_parquet(pa.OSFile(path), path)


def test_many_row_groups_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "x.parquet")
    table = _checkpoint("add.stats", pa.array(["{}"] * 1_001))
    pq.write_table(table, path, row_group_size=1)
    with pytest.raises(OddFileError, match="1001 row groups"):
        ensure_shallow_parquet(pa.OSFile(path), path)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_an_ordinary_checkpoint_is_read(tmp_path: Path, compression: str) -> None:
    """Also with the schema of the widest table, and equal statistics of thousands of files."""
    stats = '{"numRecords":1,"minValues":{"a":"' + "x" * 500 + '"}}'
    files = [add(f"part-{n:032}.parquet", stats=stats, tags={"a": "b"}) for n in range(20_000)]
    log = make_table(tmp_path / "t", commit_of(files))
    DeltaTable(tmp_path / "t").create_checkpoint()
    [made] = log.glob("*.checkpoint.parquet")
    rows = pq.read_table(made).to_pylist()
    for row in rows:
        if row["metaData"] is not None:
            row["metaData"]["schemaString"] = "x" * 900_000
    pq.write_table(pa.Table.from_pylist(rows, pq.read_schema(made)), made, compression=compression)
    assert ensure_shallow_parquet(pa.OSFile(str(made)), str(made)) == set()
