"""JSON as jsonb writes it, and what VARIANT holds of it: an independent rule, by decimals."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, NamedTuple

from hypothesis import strategies as st

MOST_DIGITS = 38
MOST_DEPTH = 1000


class Number(NamedTuple):
    """A number as the source writes it."""

    text: str


def jsonb_text(value: Any) -> str:
    """Return the text of a value made of dicts, lists, strings, Numbers, bools and None."""
    match value:
        case Number(text):
            return text
        case dict():
            pairs = (f"{jsonb_text(name)}: {jsonb_text(one)}" for name, one in value.items())
            return "{" + ", ".join(pairs) + "}"
        case list():
            return "[" + ", ".join(map(jsonb_text, value)) + "]"
        case _:
            return json.dumps(value, ensure_ascii=False)


def plain(text: str) -> Any:
    """Return what a JSON text means, with exact numbers."""
    return json.loads(text, parse_int=Decimal, parse_float=Decimal)


def is_held(value: Any) -> bool:
    """Return whether VARIANT can hold a value exactly."""
    match value:
        case Number(text):
            _, digits, exponent = Decimal(text).as_tuple()
            assert isinstance(exponent, int)
            return len(digits) <= MOST_DIGITS and -exponent <= MOST_DIGITS
        case dict():
            return all(map(is_held, value.values()))
        case list():
            return all(map(is_held, value))
        case _:
            return True


def _decimal(whole: int, places: int, sign: str) -> Number:
    digits = str(whole).zfill(places + 1)
    point = len(digits) - places
    return Number(f"{sign}{digits[:point]}.{digits[point:]}" if places else sign + digits)


_ANY = st.integers(0, 10**45)
_ROUND = st.builds(lambda n, zeros: n * 10**zeros, st.integers(0, 999), st.integers(30, 45))
NUMBERS = st.builds(
    _decimal,
    st.one_of(st.integers(0, 99), _ANY, _ROUND),
    st.integers(0, 45),
    st.sampled_from(["", "-"]),
) | st.builds(_decimal, st.integers(0, 10**20), st.integers(0, 18), st.just(""))
_CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
STRINGS = st.text(_CHARACTERS, max_size=12) | st.text('0123456789eE."\\{:-', max_size=60)
DOCUMENTS: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | STRINGS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=4),
    max_leaves=12,
)
