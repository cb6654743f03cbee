"""Files as other engines write them: the same values in other Arrow types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from ingestd.lake.delta.arrow_types import conformed, plain

_TEXTS = ["a", None, "longer than the twelve bytes of a view", ""]
_LISTS = [["a", None], None, [], ["b", "c", "d"]]
_MAPS = [[("k", "x"), ("l", None)], None, [], [("m", "y")]]
_LIST = pa.list_(pa.field("element", pa.string()))
_MAP = pa.map_(pa.string(), pa.string())
_ITEMS = (pa.string(), pa.large_string(), pa.string_view())
_KINDS: list[Callable[[pa.DataType], pa.DataType]] = [
    pa.list_,
    pa.large_list,
    pa.list_view,
    pa.large_list_view,
]


def _arrays() -> list[tuple[pa.Array, pa.DataType]]:
    binary = [None if text is None else text.encode() for text in _TEXTS]
    return [
        *((pa.array(_TEXTS, item), pa.string()) for item in _ITEMS),
        (pa.array(_TEXTS).dictionary_encode(), pa.string()),
        (pc.run_end_encode(pa.array(_TEXTS)), pa.string()),
        *((pa.array(binary, k), pa.binary()) for k in (pa.large_binary(), pa.binary_view())),
        (pa.array([b"abcd", None, b"efgh", b"ijkl"], pa.binary(4)), pa.binary()),
        *((pa.array(_LISTS, of(item)), _LIST) for of in _KINDS for item in _ITEMS),
        (pa.array([["a"], None, ["b"], ["c"]], pa.list_(pa.string(), 1)), _LIST),
        *((pa.array(_MAPS, pa.map_(item, item)), _MAP) for item in _ITEMS),
        (pa.nulls(4), pa.struct([("a", pa.string())])),
        *(
            (
                pa.array([{"b": texts, "a": "x"} for texts in _LISTS], pa.struct(fields)),
                pa.struct([("a", pa.string()), ("b", _LIST)]),
            )
            for of in _KINDS
            for item in _ITEMS
            for fields in [[("b", of(item)), ("a", item)]]
        ),
    ]


@pytest.mark.parametrize(("array", "wanted"), _arrays(), ids=lambda v: str(getattr(v, "type", v)))
@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_value_is_the_same_in_every_type(
    array: pa.Array, wanted: pa.DataType, start: int
) -> None:
    part = array.slice(start)
    found = conformed(part, wanted)
    found.validate(full=True)
    assert found.type.equals(wanted)
    assert [_sorted(v) for v in found.to_pylist()] == [_sorted(v) for v in part.to_pylist()]


@pytest.mark.parametrize(("array", "wanted"), _arrays(), ids=lambda v: str(getattr(v, "type", v)))
def test_plain_rows_can_be_filtered_taken_and_compared(
    array: pa.Array, wanted: pa.DataType
) -> None:
    batch = plain(pa.RecordBatch.from_arrays([array], ["v"]))
    table = plain(pa.Table.from_arrays([pa.chunked_array([array, array.slice(1)])], ["v"]))
    assert table["v"].to_pylist() == array.to_pylist() + array.slice(1).to_pylist()
    assert batch.filter(pc.is_valid(batch["v"])).num_rows == len(array) - array.null_count or (
        pa.types.is_run_end_encoded(array.type)
    )
    assert batch.take(pa.array([0])).num_rows == 1
    if pa.types.is_string(wanted):
        assert pc.equal(batch["v"], "a").to_pylist()[0]


def test_parquet_is_read_in_bounded_batches_of_plain_types() -> None:
    """By `DataFileReader`; `log_room` measures a checkpoint."""
    root = Path(__file__).parents[4]
    readers = {
        path.relative_to(root).as_posix()
        for folder in ("ingestd", "spark_jobs")
        for path in (root / folder).rglob("*.py")
        if "ParquetFile(" in (text := path.read_text()) or "pq.read_table(" in text
    }
    assert readers == {"ingestd/lake/delta/data_files.py", "ingestd/lake/delta/log_room.py"}


def _sorted(value: object) -> object:
    return dict(sorted(value.items())) if isinstance(value, dict) else value
