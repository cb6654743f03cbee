"""Data files of few bytes with many rows or long values: batches stay small, or it is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingestd.lake.delta.data_files import BATCH_BYTES, DataFileReader, open_parquet
from ingestd.lake.store.local_store import LocalStore
from ingestd.lake.store.paths import OddFileError
from ingestd.lake.store.plain_files import Fsync
from ingestd.model.errors import FolderError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.attack("lake writer")

ROWS = 200_000
LONG = "x" * 2_000


def equal(text: str, number: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(np.zeros(number, np.int32), [text])


def of_structs(column: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays([column, column], names=["v", "w"])


def of_maps(column: pa.Array) -> pa.Array:
    keys = pa.array(["k"] * len(column))
    return pa.MapArray.from_arrays(np.arange(len(column) + 1, dtype=np.int32), keys, column)


def of_lists(column: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(np.arange(len(column) + 1, dtype=np.int32), column)


KINDS = {
    "texts": lambda: equal(LONG, ROWS),
    "structs": lambda: of_structs(equal(LONG, ROWS)),
    "lists": lambda: of_lists(equal(LONG, ROWS)),
    "maps": lambda: of_maps(equal(LONG, ROWS)),
    "structs in lists": lambda: of_lists(of_structs(equal(LONG, ROWS))),
    "numbers": lambda: pa.repeat(pa.scalar(1, pa.int64()), 20 * ROWS),
    "one long text": lambda: pa.array([LONG * 2_000] + ["y"] * ROWS),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keeps_schema", [True, False])
def test_batches_are_small_whatever_a_file_has(
    tmp_path: Path, kind: str, *, keeps_schema: bool
) -> None:
    column = KINDS[kind]()
    table = pa.table({"a.b": column})
    pq.write_table(table, tmp_path / "f", compression="zstd", store_schema=keeps_schema)
    rows = 0
    with open_parquet(LocalStore(tmp_path, Fsync()), "f", len(column)) as file:
        before = pa.total_allocated_bytes()
        for batch in file.batches():
            assert pa.total_allocated_bytes() - before < 5 * BATCH_BYTES
            rows += batch.num_rows
    assert rows == len(column)


@pytest.mark.parametrize(
    "encoding", ["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "dictionary"]
)
def test_ordinary_rows_come_as_they_are(tmp_path: Path, encoding: str) -> None:
    """Rows of several row groups, with nulls, whatever their encoding is."""
    texts = [None if n % 7 == 0 else f"{n}" * (n % 50) for n in range(5_000)]
    table = pa.table({"v": texts, "l": [[t, t] for t in texts], "n": range(5_000)})
    options: dict[str, Any] = {"use_dictionary": encoding == "dictionary"}
    if encoding != "dictionary":
        options |= {"column_encoding": {"v": encoding, "l.list.element": encoding}}
    pq.write_table(table, tmp_path / "f", row_group_size=1_700, **options)
    with open_parquet(LocalStore(tmp_path, Fsync()), "f") as file:
        assert pa.Table.from_batches(file.batches()).equals(table)
        numbers = pa.Table.from_batches(file.batches(["n"], group=1, most_rows=100))
    assert numbers["n"].to_pylist() == list(range(1_700, 3_400))


REFUSED: dict[str, tuple[Callable[[], pa.Array], dict[str, bool]]] = {
    # Zeros in one page, which is decompressed at once.
    "a large column": (lambda: pa.array(np.zeros(20_000_000, np.int64)), {"use_dictionary": False}),
    # One row can't be divided.
    "a large row": (lambda: pa.array([np.ones(20_000_000, np.int64)]), {}),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_decoded_at_once_is_limited(tmp_path: Path, kind: str) -> None:
    make, options = REFUSED[kind]
    column = make()
    pq.write_table(
        pa.table({"v": column}),
        tmp_path / "f",
        compression="zstd",
        row_group_size=len(column),
        **options,
    )
    with (
        pytest.raises(FolderError, match="f has the column"),
        open_parquet(LocalStore(tmp_path, Fsync()), "f") as file,
    ):
        next(file.batches())


def test_rows_that_never_end_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"v": equal(LONG * 10, ROWS)}), tmp_path / "f", compression="zstd")
    with LocalStore(tmp_path, Fsync()).open("f") as source:
        file = DataFileReader(source, "f", most_bytes=1 << 20)
        with pytest.raises(OddFileError, match="has more than"):
            list(file.batches())


def test_rows_other_than_the_log_has_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"v": [1, 2]}), tmp_path / "f")
    with (
        pytest.raises(FolderError, match="f has 2 rows, but 1 by the table's log"),
        open_parquet(LocalStore(tmp_path, Fsync()), "f", 1),
    ):
        pass


def test_bounds_that_python_can_not_hold_are_unknown(tmp_path: Path) -> None:
    days = pa.array([2**31 - 1], pa.int32()).view(pa.date32())
    pq.write_table(pa.table({"day": days, "n": [7]}), tmp_path / "f")
    with pa.OSFile(str(tmp_path / "f")) as source:
        reader = DataFileReader(source, "f")
        assert reader.bounds(0, "day") == (None, None)
        assert reader.bounds(0, "n") == (7, 7)
