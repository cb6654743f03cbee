"""A footer that takes much memory is refused before pyarrow builds it."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingestd.lake.delta.data_files import DataFileReader, open_parquet
from ingestd.lake.delta.log_files import ensure_readable_log
from ingestd.lake.delta.parquet.footer import read_metadata
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.paths import OddFileError
from ingestd.lake.store.plain_files import Fsync
from ingestd.model.errors import FolderError
from tests.harness.arrow_schemas import one_field_many_times, parquet_with
from tests.harness.hostile_folder import make_table, plant_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.attack("lake writer")

SCHEMA = b"\x15\x02\x19\x2c\x48\x01r\x15\x02\x00\x15\x02\x25\x02\x18\x01a\x00"
"""Of one column; it comes before the other fields."""
COLUMN = b"\x26\x00\x00"
STRING = b"\x00"


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _list(kind: int, count: int, content: bytes) -> bytes:
    return bytes([0xF0 | kind]) + _varint(count) + content


def _group(columns: bytes) -> bytes:
    return b"\x19" + columns + b"\x16\x00\x16\x00\x00"


def _file(groups: bytes) -> bytes:
    footer = SCHEMA + b"\x16\x00\x19" + groups + b"\x00"
    return b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


MANY = 900_000
LARGE = {
    "columns": _file(_list(12, 1, _group(_list(12, MANY, COLUMN * MANY)))),
    "row groups": _file(_list(12, MANY, _group(b"\x0c") * MANY)),
    "texts in a column": _file(
        _list(
            12,
            1,
            _group(b"\x1c\x26\x00\x1c\x39" + _list(8, 9 * MANY, STRING * 9 * MANY) + b"\x00\x00"),
        )
    ),
    "a list that never ends": _file(b"\xf3\xff\xff\xff\xff\xff\xff\x7f" + bytes(MANY)),
    "a deep structure": _file(b"\x1c" * MANY),
}
"""Files whose footers take 200 MB or more."""


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_footer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """In checkpoints and in data files, before pyarrow sees it."""
    log = make_table(tmp_path / "t")
    plant_checkpoint(log, LARGE[kind])
    (tmp_path / "t" / "part-0.parquet").write_bytes(LARGE[kind])
    store = LocalStore(tmp_path, Fsync())
    monkeypatch.setattr(pq, "read_metadata", None)
    with pytest.raises(OddFileError, match="has a"):
        ensure_readable_log(store, "t")
    with pytest.raises(FolderError, match="has a"), open_parquet(store, "t/part-0.parquet"):
        pass


def test_a_footer_has_a_size(tmp_path: Path) -> None:
    """Of 64 MB, in a file that has them."""
    path = tmp_path / "f"
    path.write_bytes(bytes(65 << 20) + (64 << 20).to_bytes(4, "little") + b"PAR1")
    with pytest.raises(OddFileError, match="a footer of more than"):
        read_metadata(pa.OSFile(str(path)), "f")


@pytest.mark.parametrize("columns", [1, 200, 3_000])
def test_an_ordinary_footer_is_read(tmp_path: Path, columns: int) -> None:
    """Read at once, from the end, and completely measured."""
    path = tmp_path / "f"
    pq.write_table(pa.table({f"c{n}": [n, n] for n in range(columns)}), path, row_group_size=1)
    found = read_metadata(pa.OSFile(str(path)), "f")
    assert (found.num_rows, found.num_columns, found.num_row_groups) == (2, columns, 2)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1PAR1", b"\xff" * 12, b"x" * 100_000])
def test_what_is_no_parquet_file_is_refused_by_pyarrow(content: bytes) -> None:
    with pytest.raises(pa.ArrowInvalid, match=re.compile("parquet", re.IGNORECASE)):
        read_metadata(pa.BufferReader(content), "f")


CHANGED = r"""
import pyarrow as pa, pyarrow.parquet as pq
from ingestd.lake.delta.data_files import DataFileReader
from ingestd.lake.delta.log_nesting import ensure_shallow_parquet
from ingestd.lake.delta.log_room import Room
sink = pa.BufferOutputStream()
pq.write_table(pa.table({"n": [1, 2], "v": [["a"], ["b"]]}), sink, store_schema=False)
content = sink.getvalue().to_pybytes()
begin = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
for at in range(begin, len(content) - 8):
    for byte in (0, 1, 0x7F, 0xFF, content[at] ^ 2, content[at] ^ 16):
        changed = pa.BufferReader(content[:at] + bytes([byte]) + content[at + 1 :])
        for read in (
            lambda: ensure_shallow_parquet(changed, "p", Room()),
            lambda: list(DataFileReader(changed, "p").batches()),
            lambda: DataFileReader(changed, "p").bounds(0, "n"),
        ):
            try:
                read()
            except (OSError, ValueError, TypeError, KeyError, MemoryError, pa.ArrowException):
                pass
"""


def test_no_footer_ends_the_process() -> None:
    """As pyarrow does for a column whose sizes or codec no file has, as soon as it is looked at."""
    command = [sys.executable, "-c", CHANGED]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SIZES = b"\x29\x76" + b"\x02" * 7 + b"\x00"
"""Seven counts of repetitions, where the column has one: pyarrow ends the process."""
BEFORE, TEXTS = b"\x15\x02", b"\x19\x18\x01a"
ENCODINGS = b"\x19\x15\x00"
AFTER = b"\x16\x00\x16\x00\x16\x00\x26\x08"
"""Numbers of values and bytes, and where the first page is."""
CODEC = b"\x15\x00"
_HIDDEN_IN_TEXT = TEXTS + b"\xdc" + SIZES
DISGUISED = {
    "as it is": BEFORE + ENCODINGS + TEXTS + CODEC + AFTER + b"\x7c" + SIZES,
    "a bound shorter than a value": (
        BEFORE + ENCODINGS + TEXTS + CODEC + AFTER + b"\x3c\x58\x01\x00\x18\x01\x00\x00"
    ),
    "another type than the schema's": b"\x15\x04" + ENCODINGS + TEXTS + CODEC + AFTER,
    "a number of a field above 16 bits": (
        BEFORE + ENCODINGS + TEXTS + CODEC + AFTER + b"\x0c" + _varint(2 * (65536 + 16)) + SIZES
    ),
    "a negative number of a field": (
        BEFORE + ENCODINGS + TEXTS + CODEC + AFTER + b"\x0c" + _varint(2 * (65536 - 16) - 1) + SIZES
    ),
    "a codec that is repeated as another type": (
        BEFORE + ENCODINGS + TEXTS + b"\x15" + _varint(2 * 99) + b"\x06\x08\x00" + AFTER
    ),
    "a text where the format has numbers": (
        BEFORE
        + (b"\x19\x18" + bytes([len(_HIDDEN_IN_TEXT)]) + _HIDDEN_IN_TEXT)
        + (b"\x09\x06\x18\x01a" + CODEC + AFTER)
    ),
}
"""Metadata of a column with which pyarrow ends the process."""

READ = r"""
import sys
import pyarrow as pa
from ingestd.lake.delta.parquet.footer import read_metadata
from ingestd.lake.store.paths import OddFileError
try:
    found = read_metadata(pa.BufferReader(bytes.fromhex(sys.argv[1])), "p")
    print(found.row_group(0).column(0).statistics)
except OddFileError:
    print("refused")
"""


def test_sorting_columns_are_no_columns(tmp_path: Path) -> None:
    path = tmp_path / "sorted.parquet"
    order = [pq.SortingColumn(0), pq.SortingColumn(1, descending=True, nulls_first=True)]
    pq.write_table(pa.table({"a": [1], "b": ["x"]}), path, sorting_columns=order)
    found = read_metadata(pa.OSFile(str(path)), "p")
    assert found.row_group(0).sorting_columns == tuple(order)


@pytest.mark.parametrize("metadata", DISGUISED.values(), ids=DISGUISED)
def test_a_footer_is_read_as_pyarrow_reads_it(metadata: bytes) -> None:
    """A writer of one table's folder could end the process at each start, by a checkpoint."""
    column = b"\x26\x08\x1c" + metadata + b"\x00\x00"
    _ensure_refused(_file(_list(12, 1, _group(_list(12, 1, column)))))


def test_another_list_does_not_stand_in_for_the_columns() -> None:
    """The column is encrypted; a list that the format does not have has one that is not."""
    metadata = BEFORE + ENCODINGS + TEXTS + CODEC + AFTER + b"\x00"
    encrypted = b"\x26\x08\x1c" + metadata + b"\x5c\x2c\x19\x18\x01a\x00\x00\x00"
    other = _list(12, 1, b"\x3c" + metadata + b"\x00")
    group = b"\x19" + _list(12, 1, encrypted) + b"\x16\x00\x16\x00\x69" + other + b"\x00"
    _ensure_refused(_file(_list(12, 1, group)))


def _ensure_refused(content: bytes) -> None:
    command = [sys.executable, "-c", READ, content.hex()]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


ROWS = pa.table({"ARROW:schema": [1, 2, 3], "note": ["ARROW:schema", None, "x"]})
"""The name of the key may occur elsewhere."""


def test_a_schema_that_repeats_a_name_takes_no_memory() -> None:
    """200 kB of one file would be 5 GB of columns: the end of the process, for all sources."""
    content = parquet_with(ROWS, one_field_many_times(25_000, 200_000))
    assert len(content) < 500_000
    reader = DataFileReader(pa.BufferReader(content), "p", most_bytes=1 << 20)
    assert pa.Table.from_batches(reader.batches()) == ROWS
    assert pa.total_allocated_bytes() < 64 << 20


@pytest.mark.parametrize("kind", [pa.large_string(), pa.uuid(), pa.list_(pa.int8(), 2)])
def test_types_of_arrow_in_a_file_are_not_believed(kind: pa.DataType) -> None:
    schema = pa.schema([pa.field(name, kind) for name in ROWS.schema.names])
    content = parquet_with(ROWS, schema.serialize().to_pybytes())
    assert pa.Table.from_batches(DataFileReader(pa.BufferReader(content), "p").batches()) == ROWS


def test_each_type_of_the_lake_is_read_without_arrows_schema() -> None:
    moment = datetime(1600, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    rows = pa.table(
        {
            "ts": pa.array([moment, None], pa.timestamp("us", tz="UTC")),
            "ntz": pa.array([moment.replace(tzinfo=None), None], pa.timestamp("us")),
            "d": pa.array([Decimal("1.25"), None], pa.decimal128(38, 2)),
            "list": pa.array([["a", None], None], pa.list_(pa.field("element", pa.string()))),
            "map": pa.array([[("k", "v")], None], pa.map_(pa.string(), pa.string())),
            "row": pa.array(
                [{"a": 1, "b": b"x"}, None], pa.struct([("a", pa.int8()), ("b", pa.binary())])
            ),
            "day": pa.array([moment.date(), None], pa.date32()),
            "flag": pa.array([True, None]),
            "f": pa.array([0.5, None], pa.float32()),
        }
    )
    file = pa.BufferOutputStream()
    pq.write_table(rows, file)
    found = pa.Table.from_batches(DataFileReader(pa.BufferReader(file.getvalue()), "p").batches())
    assert found.schema.equals(rows.schema)
    assert found == rows
