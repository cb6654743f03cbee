"""Conversion of the values in older lake columns to the newest column of their source column.

If a column's type is changed at the source or overridden in the config, it gets another lake column
from then on. The values in the older one are converted to the text that the server wrote, which is
then parsed for the newest. Source: PostgreSQL's output functions, with DateStyle ISO, TimeZone UTC,
bytea_output hex and the shortest-precise output of floats (src/common/d2s.c, f2s.c; arrayfuncs.c,
array_out; rowtypes.c, record_out).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingestd.decode.values.cast import cast
from ingestd.decode.values.text_column import texts_of
from ingestd.model.schema import Column

_PLAIN_DIGITS = {pa.float32(): 6, pa.float64(): 15}
"""A float with more digits before its point is written with an exponent (FLT_DIG, DBL_DIG)."""
_LEAST_PLAIN = -4
_QUOTED_IN_ARRAY = re.compile(r'[\s"\\{},]|^$|^null$', re.IGNORECASE | re.ASCII)
_QUOTED_IN_RECORD = re.compile(r'[\s"\\(),]|^$', re.ASCII)


def as_newest(column: Column, values: pa.Array) -> tuple[pa.Array, Mapping[int, str]]:
    """Return the values converted for `column`, and the texts of those it can't hold, by row."""
    texts = server_texts(values)
    data = pa.concat_arrays([texts.cast(pa.binary())])  # without an offset
    array, refused = cast(texts_of(data), column.type, is_override=column.is_override)
    return array, dict(
        zip(refused.tolist(), texts.take(pa.array(refused)).to_pylist(), strict=True)
    )


def server_texts(values: pa.Array) -> pa.StringArray:
    """Return the texts that the server wrote for these values."""
    kind = values.type
    if pa.types.is_boolean(kind):
        return pc.if_else(values, "t", "f")
    if pa.types.is_timestamp(kind):
        plain = values.cast(pa.timestamp("us")).cast(pa.string())
        plain = pc.replace_substring_regex(plain, r"\.?0*$", "")
        return plain if kind.tz is None else pc.binary_join_element_wise(plain, "+00", "")
    writer = _writer(kind)
    if writer is None:
        return values.cast(pa.string())
    return pa.array((None if v is None else writer(v) for v in values.to_pylist()), pa.string())


def _writer(kind: pa.DataType) -> Callable[[Any], str] | None:
    """Return a function that writes one value's text, None for types that Arrow writes alike."""
    if pa.types.is_decimal(kind):
        return lambda value: format(value, "f")
    if pa.types.is_floating(kind):
        return lambda value: _float_text(value, kind)
    if pa.types.is_binary(kind):
        return lambda value: f"\\x{value.hex()}"
    if pa.types.is_list(kind):
        return lambda value: _array_text(value, kind.value_type)
    if pa.types.is_struct(kind):
        return lambda value: _record_text(value, kind)
    return None


def _float_text(value: float, kind: pa.DataType) -> str:
    if value != value:  # noqa: PLR0124 - NaN is not
        return "NaN"
    if abs(value) == float("inf"):
        return "Infinity" if value > 0 else "-Infinity"
    number = _shortest(value, kind).normalize()
    sign, digits, _ = number.as_tuple()
    power = number.adjusted()
    if number.is_zero() or _LEAST_PLAIN <= power < _PLAIN_DIGITS[kind]:
        return format(number, "f")
    first, rest = str(digits[0]), "".join(map(str, digits[1:]))
    return f"{'-' * sign}{first}{'.' * bool(rest)}{rest}e{power:+03d}"


def _shortest(value: float, kind: pa.DataType) -> Decimal:
    """Return the shortest decimal strictly between the midpoints to the adjacent floats.

    Python also accepts a midpoint itself, which occurs only for large numbers.
    """
    scalar: Any = np.float32(value) if pa.types.is_float32(kind) else np.float64(value)
    found = Decimal(str(scalar))
    with np.errstate(over="ignore"):
        around = [float(np.nextafter(scalar, type(scalar)(end))) for end in ("-inf", "inf")]
    middles = [(Fraction(value) + Fraction(n)) / 2 for n in around if np.isfinite(n)]
    digits = len(found.normalize().as_tuple().digits)
    while Fraction(found) in middles:
        found = Decimal(f"{value:.{digits}e}")
        digits += 1
    return found


def _element_text(value: Any, kind: pa.DataType) -> str | None:  # noqa: ANN401 - of any type
    found: str | None = server_texts(pa.array([value], kind))[0].as_py()
    return found


def _array_text(values: list[Any], kind: pa.DataType) -> str:
    def written(text: str | None) -> str:
        if text is None:
            return "NULL"
        if not _QUOTED_IN_ARRAY.search(text):
            return text
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'

    texts = server_texts(pa.array(values, kind)).to_pylist()
    return "{" + ",".join(map(written, texts)) + "}"


def _record_text(value: Mapping[str, Any], kind: pa.StructType) -> str:
    def written(text: str | None) -> str:
        if text is None or not _QUOTED_IN_RECORD.search(text):
            return text or ""
        escaped = text.replace("\\", "\\\\").replace('"', '""')
        return f'"{escaped}"'

    texts = (_element_text(value[field.name], field.type) for field in kind)
    return "(" + ",".join(map(written, texts)) + ")"
