"""The server's text of a value, and the values that a lake's column can represent: slow and plain.

This reference for ingestd's typed columns is based only on the documentation and the server's
source: it shares nothing with the decoder. Settings are those that every reader pins (DateStyle
ISO, TimeZone UTC, bytea_output hex, shortest-precise floats).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

_SPACES = " \t\n\r\v\f"
_PLAIN = re.compile(r'[^"\\,(){}]+')
_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d{1,6})?", re.ASCII)
_INSTANT = re.compile(_TIMESTAMP.pattern + r"\+00", re.ASCII)


# --- typed value to text ---------------------------------------------------------------------


def text_of(value: Any, arrow: pa.DataType) -> str:
    """Return a value of `to_pylist` as the server's output function would write it."""
    for is_of_type, written in _WRITERS:
        if is_of_type(arrow):
            return written(value, arrow)
    return str(value)  # integers, strings, dates


def _or_none(value: Any, arrow: pa.DataType) -> str | None:
    return None if value is None else text_of(value, arrow)


def _timestamp(value: datetime, arrow: pa.TimestampType) -> str:
    text = value.replace(tzinfo=None).isoformat(" ")
    text = text.rstrip("0") if "." in text else text
    return text if arrow.tz is None else f"{text}+00"


_WRITERS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[Any, Any], str]], ...] = (
    (pa.types.is_list, lambda v, t: array_text([_or_none(e, t.value_type) for e in v])),
    (pa.types.is_struct, lambda v, t: record_text([_or_none(v[f.name], f.type) for f in t])),
    (pa.types.is_boolean, lambda v, _: "t" if v else "f"),
    (pa.types.is_float32, lambda v, _: float_text(v, np.float32)),
    (pa.types.is_float64, lambda v, _: float_text(v, np.float64)),
    (pa.types.is_binary, lambda v, _: "\\x" + v.hex()),
    (pa.types.is_decimal, lambda v, _: format(v, "f")),
    (pa.types.is_timestamp, _timestamp),
)


def float_text(value: float, kind: type[np.float32 | np.float64]) -> str:
    """Return the shortest decimal strictly between the neighbours' midpoints, nearest to the value.

    Of two equally near ones, return the one with the even last digit.

    Source: PostgreSQL, src/common/d2s.c and f2s.c (acceptBounds is false: so not always the
    shortest), double_to_shortest_decimal_buf; positional from 1e-4 to below 1e15 (1e6 for float4).
    """
    if np.isnan(value):
        return "NaN"
    sign = "-" if np.signbit(value) else ""
    if np.isinf(value):
        return f"{sign}Infinity"
    if value == 0:
        return f"{sign}0"
    digits, exponent = _shortest(kind(abs(value)))
    if not -4 <= exponent < (6 if kind is np.float32 else 15):
        fraction = f".{digits[1:]}" if digits[1:] else ""
        return f"{sign}{digits[0]}{fraction}e{exponent:+03d}"
    if exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    whole, fraction = digits[: exponent + 1].ljust(exponent + 1, "0"), digits[exponent + 1 :]
    return f"{sign}{whole}.{fraction}" if fraction else f"{sign}{whole}"


def _shortest(number: np.float32 | np.float64) -> tuple[str, int]:
    """Return the digits d1d2d3... and the exponent of d1.d2d3..."""
    exact = Fraction(float(number))
    kind = type(number)
    below = exact - Fraction(float(np.nextafter(number, kind(0))))
    with np.errstate(over="ignore"):
        above = np.nextafter(number, kind(np.inf))
    step = below if np.isinf(above) else Fraction(float(above)) - exact
    exponent = int(f"{float(number):.16e}".partition("e")[2])
    for count in range(1, 18):
        unit = Fraction(10) ** (exponent - count + 1)
        down = exact // unit
        inside = [
            (abs(n * unit - exact), n % 2, n)
            for n in (down, down + 1)
            if exact - below / 2 < n * unit < exact + step / 2
        ]
        if inside:
            digits = str(min(inside)[-1])
            return digits.rstrip("0"), exponent + len(digits) - count
    raise AssertionError(number)


def array_text(elements: Sequence[str | None]) -> str:
    """Return a one-dimensional array with lower bound 1 and commas between its elements.

    Source: PostgreSQL, src/backend/utils/adt/arrayfuncs.c, array_out.
    """
    return "{" + ",".join(map(_array_element, elements)) + "}"


def _array_element(text: str | None) -> str:
    if text is None:
        return "NULL"
    if text and text.upper() != "NULL" and not set(text) & set('"\\{},' + _SPACES):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def record_text(fields: Sequence[str | None]) -> str:
    """Return a composite value. Source: src/backend/utils/adt/rowtypes.c, record_out."""
    return "(" + ",".join(map(_record_field, fields)) + ")"


def _record_field(text: str | None) -> str:
    if text is None:
        return ""
    if text and not set(text) & set('"\\(),' + _SPACES):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '""') + '"'


# --- what a column can represent -------------------------------------------------------------


def holds(arrow: pa.DataType, text: str) -> bool:
    """Return whether the lake's column must hold a value with this text (docs/types.md).

    If not, the column is null and `_cdc_raw` has the text. `text` is the server's own, for a type
    of this column, so only values beyond the column's range are looked for.
    """
    if pa.types.is_list(arrow):
        elements = array_elements(text)
        return elements is not None and all(
            e is None or holds(arrow.value_type, e) for e in elements
        )
    if pa.types.is_struct(arrow):
        fields = record_fields(text)
        return len(fields) == arrow.num_fields and all(
            t is None or holds(f.type, t) for f, t in zip(arrow, fields, strict=True)
        )
    if pa.types.is_date(arrow):
        return _DATE.fullmatch(text) is not None
    if pa.types.is_timestamp(arrow):
        return (_TIMESTAMP if arrow.tz is None else _INSTANT).fullmatch(text) is not None
    if pa.types.is_decimal(arrow):
        return text not in {"NaN", "Infinity", "-Infinity"}
    return True


@dataclass(slots=True)
class _Reader:
    """Reads the elements of an array, or the fields of a record, after the opening bracket."""

    text: str
    is_record: bool
    at: int = 1

    def elements(self) -> Iterator[tuple[str, bool]]:
        """Yield each element without its quotes, and whether it had any."""
        while self.at < len(self.text):
            yield self._element()

    def _element(self) -> tuple[str, bool]:
        found, inside, was_quoted = "", False, False
        ends = ",)" if self.is_record else ",}"
        while inside or self.text[self.at] not in ends:
            plain = _PLAIN.match(self.text, self.at)
            if plain is not None:
                found += plain[0]
                self.at = plain.end()
                continue
            letter = self.text[self.at]
            self.at += 1
            if letter == '"' and inside and self.is_record and self.text[self.at] == '"':
                found += '"'
                self.at += 1
            elif letter == '"':
                inside, was_quoted = not inside, True
            elif letter == "\\":
                found += self.text[self.at]
                self.at += 1
            else:
                found += letter
        self.at += 1
        return found, was_quoted


def array_elements(text: str) -> list[str | None] | None:
    """Return an array's elements; None if it has several dimensions or its own bounds."""
    if text == "{}":
        return []
    if not text.startswith("{") or text.startswith("{{"):
        return None
    found = _Reader(text, is_record=False).elements()
    return [None if e == "NULL" and not was_quoted else e for e, was_quoted in found]


def record_fields(text: str) -> list[str | None]:
    """Return a composite value's fields. One without fields reads as one null field."""
    found = _Reader(text, is_record=True).elements()
    return [field if field or was_quoted else None for field, was_quoted in found]
