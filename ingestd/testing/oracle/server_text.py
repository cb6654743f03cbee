"""The text of a lake's value as Postgres' output functions write it.

The settings are those that every reader pins: DateStyle ISO, TimeZone UTC, bytea_output hex. Floats
are an exception: the server's text of a float is not always the shortest (PostgreSQL,
src/common/d2s.c), so both texts are made canonical.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa


def text_function(arrow: pa.DataType) -> Callable[[Any], str]:
    """Return the function from a Python value of this type (`to_pylist`) to the server's text."""
    if pa.types.is_list(arrow):
        return _array(text_function(arrow.value_type))
    for is_of_type, function in _FUNCTIONS:
        if is_of_type(arrow):
            return function
    return str  # integers, strings, dates


def canonical_float4(value: float | str) -> str:
    """Return the shortest text that reads as the same float4."""
    return str(np.float32(value))


def canonical_float8(value: float | str) -> str:
    """Return the shortest text that reads as the same float8."""
    return repr(float(value))


_TO_QUOTE = re.compile(r'["\\{},\s]', re.ASCII)

FLOAT_TEXTS = (canonical_float4, canonical_float8)
"""Functions that accept the server's text as well as the value."""


def _array(element: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return a writer of one-dimensional arrays (backend/utils/adt/arrayfuncs.c, array_out)."""

    def text(values: Sequence[Any]) -> str:
        items = ("NULL" if v is None else _quoted(element(v)) for v in values)
        return "{" + ",".join(items) + "}"

    return text


def _quoted(item: str) -> str:
    if item and item.upper() != "NULL" and not _TO_QUOTE.search(item):
        return item
    return '"' + re.sub(r'(["\\])', r"\\\1", item) + '"'


def _timestamp(value: Any) -> str:  # noqa: ANN401 - a datetime, or its value from to_pylist
    text = str(value.replace(tzinfo=None))
    if "." in text:
        text = text.rstrip("0")
    return text if value.tzinfo is None else f"{text}+00"


_FUNCTIONS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[Any], str]], ...] = (
    (pa.types.is_boolean, lambda value: "t" if value else "f"),
    (pa.types.is_float32, canonical_float4),
    (pa.types.is_float64, canonical_float8),
    (pa.types.is_binary, lambda value: "\\x" + value.hex()),
    (pa.types.is_decimal, lambda value: format(value, "f")),
    (pa.types.is_timestamp, _timestamp),
)
