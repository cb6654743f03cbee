"""Hashes of values against a plain definition."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingestd.digests.value_hashes import HashBlocks, column_hashes, row_hashes, text_hash
from ingestd.model.schema import TIMESTAMP

BITS = (1 << 64) - 1
NULL = 0x6A09E667F3BCC909
LONG = 512


# --- the plain definition ---------------------------------------------------------------------


def plain_mix(number: int) -> int:
    number = (number + 0x9E3779B97F4A7C15) & BITS
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & BITS
    number = ((number ^ number >> 27) * 0x94D049BB133111EB) & BITS
    return number ^ number >> 31


def plain_bytes(value: bytes, long: int) -> int:
    found = plain_mix(len(value))
    if len(value) > long:
        pieces = [plain_bytes(value[i : i + long], long) for i in range(0, len(value), long)]
        return found ^ plain_bytes(plain_words(pieces), long)
    for at in range(0, len(value), 8):
        found = plain_mix(found ^ int.from_bytes(value[at : at + 8], "little"))
    return found


def plain_words(numbers: Sequence[int]) -> bytes:
    return b"".join(n.to_bytes(8, "little") for n in numbers)


def plain_row(values: Sequence[Any], long: int = LONG) -> int:
    first, *others = (plain_value(v, long) for v in values)
    for other in others:
        first = plain_mix(first) ^ other
    return first


def plain_value(value: Any, long: int = LONG) -> int:  # noqa: C901, PLR0911 - a line for each type
    match value:
        case None:
            return NULL
        case str():
            return plain_bytes(value.encode(), long)
        case bytes():
            return plain_bytes(value, long)
        case bool() | int():
            return plain_mix(value & BITS)
        case float():
            plain = math.nan if math.isnan(value) else value
            return plain_mix(int.from_bytes(struct.pack("<d", plain), "little"))
        case datetime():
            since = value - datetime(1970, 1, 1, tzinfo=UTC)
            return plain_mix(since // timedelta(microseconds=1) & BITS)
        case date():
            return plain_mix((value - date(1970, 1, 1)).days & BITS)
        case Decimal():
            unscaled = int(value.scaleb(4)) & (1 << 128) - 1
            return plain_mix(plain_mix(unscaled & BITS) ^ unscaled >> 64)
        case list():
            return plain_bytes(plain_words([plain_value(v, long) for v in value]), long)
        case tuple():  # a map's entry
            return plain_row(value, long)
        case dict():
            return plain_mix(plain_row(list(value.values()), long))
    raise AssertionError(value)


DECIMAL = pa.decimal128(20, 4)
TEXTS = st.text("az09 äß€𝄞\0", max_size=40)
VALUES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int64(): st.integers(-(1 << 63), (1 << 63) - 1),
    pa.int32(): st.integers(-(1 << 31), (1 << 31) - 1),
    pa.int16(): st.integers(-(1 << 15), (1 << 15) - 1),
    pa.bool_(): st.booleans(),
    pa.string(): TEXTS,
    pa.binary(): st.binary(max_size=40),
    pa.date32(): st.dates(),
    TIMESTAMP: st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC)),  # noqa: DTZ001
    pa.float64(): st.floats(),
    pa.float32(): st.floats(width=32),
    DECIMAL: st.decimals(-(10**16) + 1, 10**16 - 1, places=4),
    pa.null(): st.none(),
}

Kind = tuple[pa.DataType, st.SearchStrategy[Any]]


def lists(kind: Kind) -> Kind:
    return pa.list_(kind[0]), st.lists(st.none() | kind[1], max_size=5)


def maps(kind: Kind) -> Kind:
    entries = st.lists(st.tuples(TEXTS, st.none() | kind[1]), max_size=3)
    return pa.map_(pa.string(), kind[0]), entries


def structs(kinds: list[Kind]) -> Kind:
    fields = [(f"f{i}", kind) for i, (kind, _) in enumerate(kinds)]
    values = {f"f{i}": st.none() | values for i, (_, values) in enumerate(kinds)}
    return pa.struct(fields), st.fixed_dictionaries(values)


KINDS = st.recursive(
    st.sampled_from(list(VALUES.items())),
    lambda inner: st.one_of(
        inner.map(lists), inner.map(maps), st.lists(inner, min_size=1, max_size=3).map(structs)
    ),
    max_leaves=4,
)


@st.composite
def columns(draw: st.DrawFn, kinds: st.SearchStrategy[Kind] = KINDS) -> pa.Array:
    kind, values = draw(kinds)
    return pa.array(draw(st.lists(st.none() | values, max_size=20)), kind)


# --- the hashes -------------------------------------------------------------------------------


@pytest.mark.slow
@given(columns(), st.sampled_from([16, 24, LONG]), st.integers(1, 9), st.integers(0, 20))
def test_hashes_are_those_of_the_definition(
    column: pa.Array, long: int, block: int, start: int
) -> None:
    blocks = HashBlocks(values=block, nbytes=block * 8, long_bytes=long)
    found = column_hashes(column, blocks).tolist()
    assert found == [plain_value(v, long) for v in column.to_pylist()]
    assert column_hashes(column.slice(start), blocks).tolist() == found[start:]
    assert column_hashes(column.slice(start, 3), blocks).tolist() == found[start : start + 3]


@given(columns(st.sampled_from([i for i in VALUES.items() if i[0] not in (pa.bool_(), pa.null())])))
def test_the_encoding_is_not_in_the_hash(column: pa.Array) -> None:
    found = column_hashes(column).tolist()
    assert column_hashes(column.dictionary_encode()).tolist() == found
    wide = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
    assert column_hashes(column.cast(wide.get(column.type, column.type))).tolist() == found


@pytest.mark.parametrize("kind", [*VALUES, pa.list_(pa.int32()), pa.struct([("x", pa.int32())])])
def test_nulls_have_a_hash_of_their_own(kind: pa.DataType) -> None:
    assert column_hashes(pa.nulls(3, kind)).tolist() == [NULL] * 3
    assert column_hashes(pa.nulls(0, kind)).tolist() == []


def test_a_null_in_a_dictionary_is_null() -> None:
    values = pa.DictionaryArray.from_arrays([0, 1, None], pa.array(["a", None]))
    assert column_hashes(values).tolist() == [plain_value("a"), NULL, NULL]


def test_many_values_hash_in_blocks_as_alone() -> None:
    texts = [f"{'x' * (i % 50)}{i}" for i in range(40_000)]
    found = column_hashes(pa.array(texts)).tolist()
    assert found[::997] == [plain_value(t) for t in texts[::997]]
    assert len(set(found)) == len(texts)


def test_long_texts_hash_in_pieces() -> None:
    texts = ["", "y" * 300_000, "z" * 512, "z" * 513, "a", "y" * 299_999 + "x", "y" * 3_000_000]
    found = column_hashes(pa.array(texts)).tolist()
    assert found == [plain_value(t) for t in texts]
    assert found == [int(text_hash(t)) for t in texts]
    assert len(set(found)) == len(texts)


def test_the_width_of_a_number_is_not_in_the_hash() -> None:
    for narrow, wide in [(pa.int16(), pa.int64()), (pa.float32(), pa.float64())]:
        values = pa.array([-1, 7], narrow)
        assert column_hashes(values).tolist() == column_hashes(values.cast(wide)).tolist()


def test_zeros_differ_by_sign_and_all_nans_are_equal() -> None:
    other_nan = struct.unpack("<d", (0xFFF8000000000001).to_bytes(8, "little"))[0]
    zero, negative, first, second = column_hashes(pa.array([0.0, -0.0, math.nan, other_nan]))
    assert zero != negative
    assert first == second


def test_values_do_not_run_into_each_other() -> None:
    pairs = [("a", "b"), ("b", "a"), ("ab", ""), ("", "ab"), ("a", "a"), ("b", "b"), ("", None)]
    found = row_hashes([pa.array(c) for c in zip(*pairs, strict=True)], len(pairs))
    assert found.tolist() == [plain_row(p) for p in pairs]
    assert len(set(found.tolist())) == len(pairs)
    cuts = [[], [""], ["a"], ["a", ""], ["", "a"], ["ab"], ["a", "b"], ["ba"], [None], None]
    assert len(set(column_hashes(pa.array(cuts)).tolist())) == len(cuts)
    rows = pa.array([{"x": None}, None, {"x": 0}], pa.struct([("x", pa.int32())]))
    assert len(set(column_hashes(rows).tolist())) == len(rows)


def test_rows_without_columns_have_one_hash() -> None:
    assert len(set(row_hashes([], 3).tolist())) == 1
    empty = column_hashes(pa.array([{}, None], pa.struct([]))).tolist()
    assert empty[0] != empty[1]
