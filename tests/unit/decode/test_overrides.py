"""Types chosen in the config: a value is accepted only if the type holds it exactly."""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.decode.values.cast import cast
from ingestd.decode.values.text_column import texts_of
from tests.harness.examples import examples
from tests.unit.decode.plain import Refused, parse, require

NUMBERS = [
    *(
        b"12.5",
        b"12.500",
        b"12.50",
        b"12",
        b"0",
        b"-0",
        b"0.0",
        b"-0.0",
        b"0.001",
        b"-0.5",
        b"-12.",
    ),
    *(b".5", b"5.", b"", b"-", b".", b"-.", b"1.2.3", b"1e2", b"+1", b"007", b"00.5", b"NaN"),
    *(b"9999999999.99", b"10000000000", b"9999999999.990000", b"9999999999.991", b"Infinity"),
    *(b"0.00" + b"0" * 60, b"1" + b"0" * 37, b"1" + b"0" * 38, b"9" * 38, b"-" + b"9" * 38),
    *(b"0." + b"9" * 38, b"0." + b"9" * 39, b"1--2", b"1-2", b"12.-5", b"1 ", b"\xff", b"0.-5"),
]
DECIMALS = [
    pa.decimal128(12, 2),
    pa.decimal128(5, 0),
    pa.decimal128(3, 3),
    pa.decimal128(38, 9),
    pa.decimal128(38, 38),
]


def exact_decimal(value: bytes, kind: pa.Decimal128Type) -> Decimal:
    require(rb"-?(0|[1-9][0-9]*)(\.[0-9]+)?", value)
    number = Decimal(value.decode())
    if number.is_zero() and value.startswith(b"-"):
        raise Refused
    digits = number.as_tuple()
    unscaled = int("".join(map(str, digits.digits)))
    scale = -int(digits.exponent)
    if scale > kind.scale:
        unscaled, rest = divmod(unscaled, 10 ** (scale - kind.scale))
        if rest:
            raise Refused
    else:
        unscaled *= 10 ** (kind.scale - scale)
    if unscaled >= 10**kind.precision:
        raise Refused
    return Decimal((digits.sign, tuple(map(int, str(unscaled))), -kind.scale))


def check_exact(values: list[bytes | None], kind: pa.Decimal128Type) -> None:
    array, refused = cast(texts_of(pa.array(values, pa.binary())), kind, is_override=True)
    array.validate(full=True)
    want: list[Decimal | None] = []
    want_refused = []
    for i, value in enumerate(values):
        try:
            want.append(None if value is None else exact_decimal(value, kind))
        except Refused:
            want.append(None)
            want_refused.append(i)
    assert refused.tolist() == want_refused
    assert array.to_pylist() == want


@pytest.mark.parametrize("kind", DECIMALS, ids=str)
def test_lossless_chosen_decimal_takes_what_it_holds_exactly(kind: pa.Decimal128Type) -> None:
    for value in NUMBERS:
        check_exact([value], kind)
    check_exact([None, *NUMBERS, None, *NUMBERS[::-1]], kind)


@examples(300)
@given(
    st.sampled_from(DECIMALS),
    st.lists(
        st.none()
        | st.sampled_from(NUMBERS)
        | st.text("0123456789.-", max_size=45).map(str.encode)
        | st.decimals(allow_nan=False, allow_infinity=False, places=3).map(
            lambda d: f"{d:f}".encode()
        )
        | st.binary(max_size=6),
        max_size=10,
    ),
)
def test_lossless_chosen_decimal_of_any_bytes(
    kind: pa.Decimal128Type, values: list[bytes | None]
) -> None:
    check_exact(values, kind)


@pytest.mark.parametrize(
    ("kind", "good", "odd"),
    [
        (
            pa.float64(),
            ["0", "-0", "1.5", "100000000000000", "1e+15", "1e-05", "0.0001", "NaN", "5e-324"],
            ["1.50", "1e15", "1000000000000000", "0.00001", "1e400", "01", "+1", "", "x", "1e-400"],
        ),
        (
            pa.float32(),
            ["0.1", "999999", "1e+06", "-Infinity", "1.1754944e-38"],
            ["0.10000000149011612", "1000000", "1000001", "0.10", "1e39", "nan"],
        ),
    ],
)
def test_lossless_chosen_float_takes_only_the_servers_spelling(
    kind: pa.DataType, good: list[str], odd: list[str]
) -> None:
    values = [v.encode() for v in [*good, *odd]]
    array, refused = cast(texts_of(pa.array(values, pa.binary())), kind, is_override=True)
    assert refused.tolist() == list(range(len(good), len(values)))
    assert array.null_count == len(odd)
    want = [float(v) for v in good]
    assert array.to_pylist()[: len(good)] == pytest.approx(want, rel=1e-6, abs=0, nan_ok=True)


@given(st.lists(st.floats(), max_size=5))
def test_lossless_chosen_float_of_any_number(found: list[float]) -> None:
    texts = [repr(f).encode() for f in found]
    array, refused = cast(texts_of(pa.array(texts, pa.binary())), pa.float64(), is_override=True)
    for i, text in enumerate(texts):
        if i not in refused:
            assert repr(parse(text, pa.float64())) == repr(array[i].as_py())


def test_chosen_types_of_elements() -> None:
    kind = pa.list_(pa.field("element", pa.decimal128(5, 2)))
    texts = texts_of(pa.array([b"{1,2.5,NULL}", b"{2.505}"], pa.binary()))
    array, refused = cast(texts, kind, is_override=True)
    assert array.to_pylist() == [[Decimal("1.00"), Decimal("2.50"), None], None]
    assert refused.tolist() == [1]
