"""Values of older lake columns, as text again and as the newest type has them."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest

from ingestd.decode.values.cast import cast
from ingestd.decode.values.text_column import texts_of
from ingestd.lake.fold.older_types import as_newest, server_texts
from ingestd.model.schema import TIMESTAMP, TIMESTAMP_NTZ, Column

FLOATS = (
    "0 -0 NaN Infinity -Infinity 100 0.1 -1.5 0.0001 1e-05 123456789012345 1e+15 "
    "5.4325472445722704e+16 -5.6183247045108736e+16 5e-324 1.7976931348623157e+308 1e+100"
)
SINGLES = "0 -0 NaN Infinity 100 0.1 0.0001 1e-05 123456 1e+06 1.22612896e+08 3.4028235e+38"
ARRAY = r'{a,NULL,"null","","a b","a,b","{x}","q\"q","b\\s"}'
RECORD = r'(1,,"a b","q""q","b\\s","")'
STRUCT = pa.struct([(n, pa.string()) for n in "abcdef"])


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        (pa.float64(), FLOATS.split()),
        (pa.float32(), SINGLES.split()),
        (pa.decimal128(38, 18), ["0.000000000000000001", "-1.500000000000000000"]),
        (pa.decimal128(18, 0), ["0", "120"]),
        (pa.int64(), ["-9223372036854775808", "0"]),
        (pa.bool_(), ["t", "f"]),
        (pa.date32(), ["2024-02-29", "0001-01-01"]),
        (TIMESTAMP_NTZ, ["2024-01-01 10:00:00", "1999-12-31 23:59:59.5", "2000-01-01 00:00:10.1"]),
        (TIMESTAMP, ["2024-01-01 10:00:00+00", "1969-12-31 23:59:59.000001+00"]),
        (pa.binary(), ["\\x", "\\x00ff"]),
        (pa.string(), ["", "a"]),
        (pa.list_(pa.string()), [ARRAY, "{}"]),
        (pa.list_(TIMESTAMP_NTZ), ['{"2024-01-01 10:00:00",NULL}']),
        (STRUCT, [RECORD]),
    ],
)
def test_what_the_server_wrote_is_written_again(kind: pa.DataType, texts: list[str]) -> None:
    data = pa.array([*(t.encode() for t in texts), None], pa.binary())
    values, refused = cast(texts_of(data), kind)
    assert len(refused) == 0
    assert server_texts(values).to_pylist() == [*texts, None]
    assert server_texts(values[1:]).to_pylist() == [*texts[1:], None]


@pytest.mark.parametrize(
    ("old", "kind", "found", "refused"),
    [
        (pa.array(["1.50", "NaN", None]), pa.decimal128(12, 2), [Decimal("1.50")], {1: "NaN"}),
        (pa.array(["7", "007", "0x1F"]), pa.int32(), [7], {1: "007", 2: "0x1F"}),
        (pa.array([Decimal("0.00000010")]), pa.decimal128(18, 2), [None], {0: "0.00000010"}),
        (pa.array([True]), pa.string(), ["t"], {}),
        (pa.array(["t", "True"]), pa.bool_(), [True], {1: "True"}),
        (pa.array([0], TIMESTAMP), pa.string(), ["1970-01-01 00:00:00+00"], {}),
        (pa.array([float("inf")]), pa.string(), ["Infinity"], {}),
        (pa.array([b"\xff"]), pa.string(), ["\\xff"], {}),
        (pa.array(["\\x6869"]), pa.binary(), [b"hi"], {}),
        (pa.array([[1, 2]], pa.list_(pa.int32())), pa.string(), ["{1,2}"], {}),
        (pa.array(["{1,2}"]), pa.list_(pa.int32()), [[1, 2]], {}),
        (pa.array([], pa.string()), pa.int32(), [], {}),
    ],
)
def test_values_are_taken_as_the_decoder_would(
    old: pa.Array, kind: pa.DataType, found: list[object], refused: dict[int, str]
) -> None:
    column = Column("n", 0, -1, kind, is_override=True)
    values, texts = as_newest(column, old)
    assert values.type == kind
    assert values.to_pylist() == found + [None] * (len(old) - len(found))
    assert texts == refused
