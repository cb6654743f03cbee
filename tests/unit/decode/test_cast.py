"""I7 at its source: a value is accepted only if its column returns the same text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.decode import native
from ingestd.decode.pgoutput.tuples import TupleRange, walk_typed
from ingestd.decode.values.cast import cast, raw_text
from ingestd.decode.values.text_column import ByteBuffer, texts_of
from ingestd.model.schema import TIMESTAMP, TIMESTAMP_NTZ, Column
from tests.harness.examples import examples
from tests.unit.decode.pgoutput import tuple_data
from tests.unit.decode.plain import Refused, parse

TYPES = [
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.float64(),
    pa.string(),
    pa.binary(),
    pa.date32(),
    TIMESTAMP_NTZ,
    TIMESTAMP,
    pa.decimal128(12, 2),
    pa.decimal128(5, 0),
    pa.decimal128(3, 3),
    pa.decimal128(18, 0),
    pa.decimal128(18, 18),
    pa.decimal128(38, 10),
]
UNTYPED = {pa.float64(), pa.string(), pa.binary(), pa.decimal128(38, 10)}
"""Those that the compiled part leaves to `cast`."""
ODD = [
    *(b"", b"t", b"f", b"T", b"true", b"0", b"-0", b"00", b"+1", b"1 ", b" 1", b"0x10", b"1_0"),
    *(b"32767", b"32768", b"-32768", b"2147483648", b"9223372036854775807", b"99999"),
    *(b"9223372036854775808", b"-9223372036854775808", b"-9223372036854775809", b"100000"),
    *(b"NaN", b"nan", b"Infinity", b"-Infinity", b"inf", b"infinity", b"-infinity", b"1e400"),
    *(b"1e-400", b"1e5", b"5e-324", b"1.7976931348623157e+308", b"0.1", b".1", b"1.", b"--1"),
    *(b"0.00", b"-0.00", b"0.10", b"00.10", b"-0.10", b"1.5", b"1.555", b"1e2.00", b"1.2.34"),
    *(b"9999999999.99", b"10000000000.00", b"0.999", b"1.000", b"-0.999", b"1-2.00", b"-.50"),
    *(b"9" * 18, b"-" + b"9" * 18, b"9" * 19, b"9" * 20, b"1" + b"0" * 20, b"1" + b"0" * 25),
    *(b"0." + b"9" * 18, b"-0." + b"0" * 17 + b"1", b"1." + b"0" * 18, b"0." + b"9" * 19),
    *(b"9" * 28 + b"." + b"9" * 10, b"1" + b"0" * 28 + b"." + b"0" * 10, b"-0." + b"0" * 10),
    *(b"2024-02-29", b"2023-02-29", b"0001-01-01", b"0000-01-01", b"9999-12-31", b"20240101"),
    *(b"10000-01-01", b"0044-03-15 BC", b"2024-1-01", b"2024/01/01", b"-2024-01-1"),
    *(b"2024-02-30", b"2024-00-10", b"2024-04-31", b"1900-02-29", b"2000-02-29", b"0000-00-00"),
    *(b"2024-01-01 00:60:00", b"2024-01-01 00:00:60", b"2024-13-01 00:00:00", b"2024010112"),
    *(b"2024-01-01 00:00:00,123", b"2024-01-01 00.00.00", b"2024-02-30 00:00:00.5", b"2024-01-a1"),
    *(b"2024-01-01 00:00:00", b"2024-01-01 23:59:59.999999", b"2024-01-01 24:00:00"),
    *(b"2024-01-01 00:00", b"2024-01-01T00:00:00", b"2024-01-01 00:00:00.1", b"2024-01-01 1"),
    *(b"2024-01-01 00:00:00.10", b"2024-01-01 00:00:00.", b"2024-01-01 00:00:00.1234567"),
    *(b"0001-01-01 00:00:00", b"0000-12-31 00:00:00", b"9999-12-31 23:59:59.999999"),
    *(b"2024-01-01 00:00:00+00", b"2024-01-01 00:00:00.5+00", b"2024-01-01 00:00:00+01"),
    *(b"2024-01-01 00:00:00-00", b"2024-01-01 00:00:00+00:00", b"2024-01-01 00:00:00Z", b"+00"),
    *(b"10000-01-01 00:00:00+00", b"0001-01-01 00:00:00+00 BC", b"0000-01-01 00:00:00+00"),
    *(b"\\x", b"\\x00ff", b"\\x0", b"\\xFF", b"\\xgg", b"\\000", b"x00", b"\xff", b"\xc3\xa9"),
]


def expected(values: list[bytes | None], kind: pa.DataType) -> tuple[list[Any], list[int]]:
    found, refused = [], []
    for i, value in enumerate(values):
        try:
            found.append(None if value is None else parse(value, kind))
        except Refused:
            found.append(None)
            refused.append(i)
    return found, refused


def check(values: list[bytes | None], kind: pa.DataType) -> None:
    array, refused = cast(texts_of(pa.array(values, pa.binary())), kind)
    array.validate(full=True)
    want, want_refused = expected(values, kind)
    assert array.type == kind
    assert refused.tolist() == want_refused
    assert repr(array.to_pylist()) == repr(want)
    check_typed(values, kind, array, want_refused)


def check_typed(
    values: list[bytes | None], kind: pa.DataType, want: pa.Array, refused: list[int]
) -> None:
    """What the compiled part casts while it walks is the same."""
    tuples = [tuple_data([value]) for value in values]
    lengths = np.array([len(t) for t in tuples], np.int64)
    ends = np.cumsum(lengths)
    part = TupleRange(ends - lengths, ends, 1)
    found = walk_typed(ByteBuffer(b"".join(tuples)), part, [Column("c", 0, -1, kind)])
    if found is None or "c" not in found[0].values:
        assert native.compiled is None or pa.types.is_nested(kind) or kind in UNTYPED
        return
    typed = found[0].values["c"]
    typed.array.validate(full=True)
    assert typed.array.equals(want)
    assert typed.array.type == kind
    assert typed.refused.tolist() == refused
    assert typed.texts.gather().to_pylist() == [values[row] for row in refused]


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_lossless_odd_values_are_refused_one_by_one(kind: pa.DataType) -> None:
    for value in ODD:
        check([value], kind)


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_lossless_odd_values_among_good_ones_and_nulls(kind: pa.DataType) -> None:
    check([None, *ODD, None, *ODD[::-1]], kind)


@examples(200)
@given(
    st.sampled_from(TYPES),
    st.lists(
        st.none()
        | st.sampled_from(ODD)
        | st.binary(max_size=30)
        | st.text("0123456789-+.: eE\\xtTNf", max_size=24).map(str.encode),
        max_size=12,
    ),
)
def test_lossless_any_bytes(kind: pa.DataType, values: list[bytes | None]) -> None:
    check(values, kind)


def test_float4_is_the_nearest_single() -> None:
    values = [b"3.4028235e+38", b"1e+39", b"0.1", b"Infinity", b"1e-46", b"NaN"]
    array, refused = cast(texts_of(pa.array(values, pa.binary())), pa.float32())
    assert refused.tolist() == [1, 4]
    assert str(array[2]) == "0.10000000149011612"
    assert array[0].as_py() == pytest.approx(3.4028235e38)


def test_lossless_type_that_nothing_knows_refuses_every_value() -> None:
    values = texts_of(pa.array([b"{1,2}", None], pa.binary()))
    array, refused = cast(values, pa.map_(pa.string(), pa.int32()))
    assert array.null_count == 2
    assert refused.tolist() == [0]


def test_raw_text_of_what_is_not_utf8_is_marked_hex() -> None:
    assert raw_text(b"caf\xc3\xa9") == "café"
    assert raw_text(b"\xff\x00") == "\\xff00"
