"""A checkpoint whose content is far larger than the file is refused before it takes memory (I8)."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from ingestd.lake.delta.log_files import ensure_readable_log
from ingestd.lake.delta.log_nesting import ensure_shallow_parquet
from ingestd.lake.delta.log_room import Room
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.paths import OddFileError
from ingestd.lake.store.plain_files import Fsync
from tests.harness.hostile_folder import add, commit_of, make_table, plant_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.attack("lake writer")

TEXT = '{"numRecords":1,"x":"' + "x" * 2_000_000 + '"}'
ROWS = 1024
ENTRIES = 20_000_000
LONG_BYTES = (4 << 20) + 2


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
    "add.stats_parsed": lambda texts: pa.StructArray.from_arrays(
        [pa.StructArray.from_arrays([texts], names=["a"])], names=["minValues"]
    ),
    "other.column": lambda texts: texts,
}
REFUSED_EACH = r"""
import pathlib, re, sys
import pyarrow as pa
from ingestd.lake.delta.log_nesting import ensure_shallow_parquet
from ingestd.lake.delta.log_room import Room
for path in pathlib.Path(sys.argv[1]).glob("*.parquet"):
    try:
        ensure_shallow_parquet(pa.OSFile(str(path)), "p", Room())
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
    empty = pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), ENTRIES), [""])
    entries = pa.MapArray.from_arrays(pa.array([0, ENTRIES], pa.int32()), empty, empty)
    pq.write_table(_checkpoint("add.partitionValues", entries), tmp_path / "empty.parquet")
    prefixes = _checkpoint("add.path", pa.array(["x" * 100_000] * ROWS))
    encoded = {"use_dictionary": False, "column_encoding": {"add.path": "DELTA_BYTE_ARRAY"}}
    pq.write_table(prefixes, tmp_path / "prefixes.parquet", **encoded)
    for number, knows_types in enumerate([False, True]):
        table, path = _checkpoint("add.stats", late), tmp_path / f"late {number}.parquet"
        pq.write_table(table, path, store_schema=knows_types)
    command = [sys.executable, "-c", REFUSED_EACH, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    *said, peak_mb = done.stdout.splitlines()
    assert said == ["is not a checkpoint: it unpacks to far more than it is"] * (len(COLUMNS) + 4)
    assert int(peak_mb) < 70 + 200


def test_many_rows_are_refused_by_their_number(tmp_path: Path) -> None:
    path = str(tmp_path / "x.parquet")
    names = pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), 20_000_000), ["a"])
    pq.write_table(_checkpoint("sidecar.path", names), path)
    with pytest.raises(OddFileError, match="unpacks"):
        ensure_shallow_parquet(pa.OSFile(path), path, Room())


@pytest.mark.parametrize(
    "few", [{"row_group_size": 1}, {"data_page_size": 1, "write_batch_size": 1}]
)
def test_many_row_groups_or_pages_are_refused(tmp_path: Path, few: dict[str, int]) -> None:
    path = str(tmp_path / "x.parquet")
    table = pa.table({f"c{n}": range(20) for n in range(20)})
    pq.write_table(table, path, use_dictionary=False, **few)
    assert ensure_shallow_parquet(pa.OSFile(path), path, Room(1_000)) == set()
    with pytest.raises(OddFileError, match="columns and pages"):
        ensure_shallow_parquet(pa.OSFile(path), path, Room(500))


def test_a_log_has_one_limit_for_its_json_checkpoints(tmp_path: Path) -> None:
    log = make_table(tmp_path / "t")
    text = commit_of([add(tags={"a": "[" * 1_000_000})]) * 10
    plant_checkpoint(log, text.encode(), "checkpoint.0.json")
    for number in range(1, 25):
        made = log / f"{0:020}.checkpoint.{number}.json"
        os.link(log / f"{0:020}.checkpoint.0.json", made)
    with pytest.raises(OddFileError, match="columns and pages"):
        ensure_readable_log(LocalStore(tmp_path, Fsync()), "t")


def test_a_log_has_one_limit_for_all_its_sidecars(tmp_path: Path) -> None:
    """Thousands of links to one would be checked for hours."""
    log = make_table(tmp_path / "t")
    (log / "_sidecars").mkdir()
    first = log / "_sidecars" / "0.parquet"
    pq.write_table(pa.table({"x": ["x"]}), first)
    for number in range(1, 2_500):
        os.link(first, log / "_sidecars" / f"{number}.parquet")
    sidecars = [
        {"sidecar": {"path": f"{n}.parquet", "sizeInBytes": 1, "modificationTime": 1}}
        for n in range(2_500)
    ]
    plant_checkpoint(log, commit_of(sidecars).encode(), "checkpoint.u.json")
    with pytest.raises(OddFileError, match="columns and pages"):
        ensure_readable_log(LocalStore(tmp_path, Fsync()), "t")


WRITTEN: dict[str, dict[str, Any]] = {
    "none": {},
    "snappy": {},
    "zstd": {"data_page_version": "2.0"},
    "gzip": {"row_group_size": 7_000},
    "brotli": {"data_page_version": "2.0", "use_dictionary": False},
    "lz4": {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"},
}
"""Options of a writer, by compression."""


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """The rows of a checkpoint with equal statistics of thousands of files, and a wide schema."""
    folder = tmp_path_factory.mktemp("ordinary") / "t"
    stats = '{"numRecords":1,"minValues":{"a":"' + "x" * 500 + '"}}'
    files = [add(f"part-{n:032}.parquet", stats=stats, tags={"a": "b"}) for n in range(20_000)]
    log = make_table(folder, commit_of(files))
    DeltaTable(folder).create_checkpoint()
    [made] = log.glob("*.checkpoint.parquet")
    rows = pq.read_table(made).to_pylist()
    for row in rows:
        if row["metaData"] is not None:
            row["metaData"]["schemaString"] = "x" * 900_000
    return pa.Table.from_pylist(rows, pq.read_schema(made))


@pytest.mark.parametrize("compression", WRITTEN)
def test_an_ordinary_checkpoint_is_read(
    tmp_path: Path, ordinary: pa.Table, compression: str
) -> None:
    path = str(tmp_path / "x.parquet")
    options = WRITTEN[compression]
    if (encoding := options.get("column_encoding")) is not None:
        pq.write_table(ordinary, path)
        schema = pq.read_metadata(path).schema
        leaves = [schema.column(n) for n in range(len(schema))]
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        options = {**options, "column_encoding": dict.fromkeys(texts, encoding)}
    pq.write_table(ordinary, path, compression=compression, **options)
    assert ensure_shallow_parquet(pa.OSFile(path), path, Room()) == set()


@pytest.mark.parametrize("compression", ["gzip", "brotli", "snappy"])
@pytest.mark.parametrize("nbytes", [0, 1])
def test_a_page_smaller_than_its_levels_is_refused(
    tmp_path: Path, compression: str, nbytes: int
) -> None:
    """It was not unpacked, or the source stopped: a writer of one table's folder stopped all."""
    path = tmp_path / "x.parquet"
    options = {"use_dictionary": False, "write_statistics": False, "data_page_version": "2.0"}
    table = _checkpoint("add.path", pa.array(["xxx"]))
    pq.write_table(table, path, compression=compression, **options)
    content = path.read_bytes()
    begin = content.index(b"\x15", 5) + 1  # the field after the kind of the first page
    assert content[begin] == 2 * (2 + 4 + 3)  # bytes of its levels, and of the length and text
    path.write_bytes(content[:begin] + bytes([2 * nbytes]) + content[begin + 1 :])
    with pytest.raises(OddFileError, match="damaged"):
        ensure_shallow_parquet(pa.OSFile(str(path)), "p", Room())


@pytest.mark.parametrize("compression", ["gzip", "brotli"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_page_larger_than_its_header_says_is_refused(
    tmp_path: Path, compression: str, version: str
) -> None:
    """With these codecs deltalake unpacks it all before it compares the sizes."""
    path = tmp_path / "x.parquet"
    column = pa.array(["x" * LONG_BYTES])
    pq.write_table(
        _checkpoint("add.path", column),
        path,
        compression=compression,
        use_dictionary=False,
        write_statistics=False,
        data_page_version=version,
    )
    assert ensure_shallow_parquet(pa.OSFile(str(path)), "p", Room()) == set()
    content = path.read_bytes()
    begin = content.index(b"\x15", 5) + 1  # the field after the kind of the first page
    path.write_bytes(content[:begin] + b"\x80" + content[begin + 1 :])  # its lowest bits
    with pytest.raises(OddFileError, match="damaged"):
        ensure_shallow_parquet(pa.OSFile(str(path)), "p", Room())
