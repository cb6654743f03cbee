"""Hypothesis strategies for the texts that Postgres' input functions accept, by type."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from tests.harness.server_text import array_text, record_text

if TYPE_CHECKING:
    from collections.abc import Callable

    Texts = st.SearchStrategy[str]


@dataclass(frozen=True, slots=True)
class Generated:
    """A type, its values, and the lake type chosen for it (None: the default)."""

    name: str
    values: Texts
    chosen: str | None = None

    def __str__(self) -> str:
        return self.name if self.chosen is None else f"{self.name} as {self.chosen}"


def _integers(bits: int) -> Texts:
    return _between(-(1 << bits - 1), (1 << bits - 1) - 1)


def _between(lowest: int, highest: int) -> Texts:
    """Return any number, and often one that is too large for a smaller type."""
    return (st.integers(lowest, highest) | st.sampled_from([lowest, highest])).map(str)


def _numeric(precision: int, scale: int) -> Texts:
    """Return any number of a declared type, often near its bounds or near zero."""
    largest = 10**precision - 1
    unscaled = st.integers(-largest, largest) | st.integers(-20, 20) | st.just(largest)
    return unscaled.map(lambda n: _scaled(n, scale)) | st.just("NaN")


def _scaled(unscaled: int, scale: int) -> str:
    """Return a number as exact text. Decimal's arithmetic would round it."""
    sign, digits = "-" if unscaled < 0 else "", str(abs(unscaled)).rjust(scale + 1, "0")
    return f"{sign}{digits[: len(digits) - scale]}.{digits[len(digits) - scale :]}"


_words = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
_tricky = st.text('"\\,;{}()[]= \t\n\r\v\fNULnulx1ü', max_size=8)
texts: Texts = _words | _tricky | st.sampled_from(["NULL", "null", "Null", ""])

_bytes = st.binary(max_size=12).map(lambda b: f"\\x{b.hex()}")
_floats4 = st.floats(width=32).map(repr)
_floats8 = st.floats().map(repr)

_era_years = st.integers(1, 10_002).map("{:04d}".format) | st.sampled_from(
    ["0001", "9999", "10000", "294275", "1582", "1900", "2000"]
)
_month_days = st.builds("{:02d}-{:02d}".format, st.integers(1, 12), st.integers(1, 28))
_clock = st.builds(
    "{:02d}:{:02d}:{:02d}.{:06d}".format,
    st.integers(0, 23),
    st.integers(0, 59),
    st.integers(0, 59),
    st.integers(0, 999_999) | st.sampled_from([0, 500_000, 999_999, 1, 10]),
)
_zone = st.builds("{:+03d}:{:02d}".format, st.integers(-15, 15), st.sampled_from([0, 30, 45]))
_special = st.sampled_from(["infinity", "-infinity"])


def _dated(*behind: Texts) -> Texts:
    """Return AD dates, BC dates, and infinities. `behind`: the texts that follow the day."""
    after_christ = st.tuples(_era_years, _month_days).map("-".join)
    before_christ = st.tuples(st.integers(1, 4712).map("{:04d}".format), _month_days).map("-".join)
    return (
        st.tuples(after_christ, *behind).map(" ".join)
        | st.tuples(before_christ, *behind, st.just("BC")).map(" ".join)
        | _special
    )


_days = _dated()
_timestamps = _dated(_clock)
_instants = _dated(st.tuples(_clock, _zone).map("".join))
_seconds = st.tuples(
    st.sampled_from(["", "-"]),
    st.integers(0, 10**9).map(str),  # PostgreSQL 14 reads no field above 2^31 - 1
    st.integers(0, 10**6 - 1).map(".{:06}".format),
).map("".join)
_intervals = st.builds(
    "{} months {} days {} seconds".format,
    st.integers(-(10**8), 10**8),
    st.integers(-(10**8), 10**8),
    _seconds,
)


def _json(spaces: tuple[str, str]) -> Texts:
    leaves: st.SearchStrategy[Any] = (
        st.none() | st.booleans() | st.integers() | _words | st.floats(allow_nan=False, width=16)
    )
    trees = st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_words, inner, max_size=3),
    )
    return trees.filter(lambda tree: "Infinity" not in json.dumps(tree)).map(
        lambda tree: json.dumps(tree, separators=spaces, ensure_ascii=False)
    )


def _ranges(bounds: Texts, key: Callable[[str], Any]) -> Texts:
    brackets = st.tuples(st.sampled_from("[("), st.sampled_from("])"))

    def written(ends: list[str], outer: tuple[str, str]) -> str:
        low, high = sorted(ends, key=key)
        return f"{outer[0]}{low},{high}{outer[1]}"

    return st.builds(written, st.lists(bounds, min_size=2, max_size=2), brackets)


def arrays(elements: Texts) -> Texts:
    """Return arrays: one dimension, empty or with nulls; several dimensions; other bounds."""
    flat = st.lists(st.none() | elements, max_size=6).map(array_text)
    pairs = st.lists(st.none() | elements, min_size=2, max_size=2).map(array_text)
    square = st.lists(pairs, min_size=1, max_size=3).map(lambda rows: "{" + ",".join(rows) + "}")
    shifted = st.builds("[{0}:{0}]={1}".format, st.integers(-3, 3), elements.map(_array_of_one))
    return st.one_of(flat, flat, flat, square, shifted)


def _array_of_one(text: str) -> str:
    return array_text([text])


def records(*fields: Texts) -> Texts:
    """Return composite values of these fields, any of which may be null."""
    return st.tuples(*(st.none() | f for f in fields)).map(record_text)


_ints = _integers(32)
_pairs = records(_ints, texts)
_nests = records(_pairs, arrays(_ints), _days)
_prices = _numeric(10, 2)

GENERATED: dict[str, tuple[Generated, ...]] = {
    "numbers": (
        Generated("bool", st.sampled_from("tf")),
        Generated("int2", _integers(16)),
        Generated("int4", _ints),
        Generated("int8", _integers(64)),
        Generated("oid", _between(0, (1 << 32) - 1)),
        Generated("float4", _floats4),
        Generated("float8", _floats8),
        Generated("numeric(5,2)", _numeric(5, 2)),
        Generated("numeric(18,18)", _numeric(18, 18)),
        Generated("numeric(19,3)", _numeric(19, 3)),
        Generated("numeric(38,0)", _numeric(38, 0)),
        Generated("numeric(38,10)", _numeric(38, 10)),
        Generated("numeric", _numeric(60, 30) | _special),
        Generated("money", st.integers(-(1 << 63), (1 << 63) - 1).map(lambda n: _scaled(n, 2))),
    ),
    "texts": (
        Generated("text", texts),
        Generated("varchar(3)", texts),
        Generated("char(4)", texts),
        Generated("name", texts),
        Generated("bytea", _bytes),
        Generated("json", _json((" ,\n", ":\t"))),
        Generated("jsonb", _json((",", ":"))),
        Generated("varbit", st.text("01", max_size=20)),
    ),
    "times": (
        Generated("date", _days),
        Generated("timestamp", _timestamps),
        Generated("timestamptz", _instants),
        Generated("time", _clock),
        Generated("timetz", st.tuples(_clock, _zone).map("".join)),
        Generated("interval", _intervals),
        Generated("tsrange", _ranges(st.datetimes().map(str), str)),
    ),
    "others": (
        Generated("uuid", st.uuids().map(str)),
        Generated("inet", st.ip_addresses().map(str)),
        Generated("int4range", _ranges(st.integers(-9, 9).map(str), int)),
    ),
    "arrays": (
        Generated("bool[]", arrays(st.sampled_from("tf"))),
        Generated("int4[]", arrays(_ints)),
        Generated("float8[]", arrays(_floats8)),
        Generated("numeric(10,2)[]", arrays(_prices)),
        Generated("text[]", arrays(texts)),
        Generated("char(4)[]", arrays(texts)),
        Generated("bytea[]", arrays(_bytes)),
        Generated("date[]", arrays(_days)),
        Generated("timestamptz[]", arrays(_instants)),
    ),
    "made_of_others": (
        Generated("tags", arrays(texts)),
        Generated("tags[]", arrays(arrays(texts))),
        Generated("price", _prices),
        Generated("pair", _pairs),
        Generated("pair", _pairs, "struct"),
        Generated("nest", _nests, "struct"),
        Generated("nest[]", arrays(_nests), "array<struct>"),
    ),
}
"""Types that are tested together, as columns of one table."""
