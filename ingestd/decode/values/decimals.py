"""Parsing of integers and decimals; see `ingestd.decode.values.cast` for accepted values.

Each function also flags the values that it refuses, such as a numeric with more digits than the
lake's decimal: there the column is null, and `_cdc_raw` has the text.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ingestd.decode.values.kernels import (
    Bytes,
    Flags,
    Offsets,
    any_within,
    blanked,
    byte_table,
    contents,
    numbers,
    parse,
)
from ingestd.decode.values.text_column import ByteBuffer, TextColumn, texts_of

_MINUS, _POINT, _ZERO = (ord(c) for c in "-.0")
_NINE = 9
_INT64_DIGITS = 18
_NO_DIGIT = ~byte_table(b"0123456789")
_DECIMAL_BYTES = byte_table(b"0123456789.-")


def integers(texts: TextColumn, to: pa.DataType) -> tuple[pa.Array, Flags]:
    """Cast integers without a plus or leading zeros."""
    largest = (1 << to.bit_width - 1) - 1

    def suspects(data: Bytes, offsets: Offsets) -> Flags:
        return _no_integer(data, offsets, largest)

    return parse(texts, to, _odd_start(texts, 0), suspects)


def _no_integer(data: Bytes, offsets: Offsets, largest: int) -> Flags:
    """Flag values that are too large, or have bytes other than digits."""
    starts, sizes = offsets[:-1], np.diff(offsets)
    negative = (sizes > 0) & (data[np.minimum(starts, len(data) - 1)] == _MINUS)
    no_digit = _NO_DIGIT[data]
    no_digit[starts[negative]] = False
    digits, most = sizes - negative, len(str(largest))
    found: Flags = any_within(no_digit, offsets) | (digits > most)
    at = np.flatnonzero((digits == most) & ~found)
    if len(at):
        longest = TextColumn(ByteBuffer(data.tobytes()), starts[at] + negative[at], digits[at])
        values = longest.gather().cast(pa.string()).cast(pa.uint64()).to_numpy()
        found[at] = values > np.uint64(largest) + negative[at].astype(np.uint64)
    return found


def _odd_start(texts: TextColumn, scale: int) -> Flags:
    """Flag leading zeros, and values without a digit before the point. ``-0.00`` is not flagged."""
    first = texts.first()
    negative = first == _MINUS
    if negative.any():
        first = np.where(negative, texts.second(), first)
    first = first - np.uint8(_ZERO)  # lower bytes wrap around
    digits = texts.lengths - negative
    odd: Flags
    if scale:
        digits -= scale + 1
        odd = (digits < 1) | (first > _NINE) | (first == 0) & (digits > 1)
    else:
        odd = (digits < 1) | (first > _NINE) | (first == 0) & ((digits > 1) | negative)
    return odd


def _odd_decimal(texts: TextColumn, scale: int) -> Flags:
    """Flag values without exactly `scale` digits after the point, or with leading zeros."""
    odd = _odd_start(texts, scale)
    if scale:
        point = texts.starts + texts.lengths - (scale + 1)
        odd |= texts.source.bytes_at(np.maximum(point, 0)) != _POINT
    return odd


def decimals(texts: TextColumn, to: pa.DataType) -> tuple[pa.Array, Flags]:
    """Cast numbers that have exactly the decimal's digits after the point."""
    return (_short if to.precision <= _INT64_DIGITS else _long)(texts, to)


def _short(texts: TextColumn, to: pa.DataType) -> tuple[pa.Array, Flags]:
    """Cast up to 18 digits: parse them without the point as an integer."""
    odd = _odd_decimal(texts, to.scale)
    kept = texts.without(odd)
    values = kept.gather()
    if to.scale:
        _, offsets, data = values.buffers()
        bounds = np.frombuffer(offsets, np.int32, len(values) + 1)
        content = data.slice(0, int(bounds[-1])).to_pybytes() if data is not None else b""
        digits = content.translate(None, b".")
        points = bounds.copy()
        points[0] = 0
        points[1:] = (
            np.arange(1, len(values) + 1) if kept.present is None else np.cumsum(kept.present)
        )
        if len(digits) != len(content) - points[-1]:  # some value has a second point
            return _long(texts, to)
        values = pa.BinaryArray.from_buffers(
            pa.binary(),
            len(values),
            [kept.validity, pa.py_buffer(bounds - points), pa.py_buffer(digits)],
        )
    try:
        parsed = values.cast(pa.string()).cast(pa.int64())
    except pa.ArrowInvalid:
        return _long(texts, to)
    unscaled = numbers(parsed, np.int64).astype(np.int64)
    if parsed.null_count:
        unscaled = np.where(parsed.is_valid().to_numpy(zero_copy_only=False), unscaled, 0)
    negative = texts.first() == _MINUS
    end = 10**to.precision
    odd = odd | (unscaled >= end) | (unscaled <= -end) | negative & (unscaled == 0)
    wide = np.empty((len(texts), 2), np.int64)
    wide[:, 0] = unscaled
    wide[:, 1] = unscaled >> 63
    buffers = [texts.without(odd).validity, pa.py_buffer(wide)]
    return pa.Array.from_buffers(to, len(texts), buffers), odd


def _long(texts: TextColumn, to: pa.DataType) -> tuple[pa.Array, Flags]:
    """Cast any precision with Arrow's kernel, after removing exponents, which it would misread."""
    odd = _odd_decimal(texts, to.scale)
    data, bounds = contents(texts.without(odd).gather())
    foreign = ~_DECIMAL_BYTES[data]
    if not to.scale:
        foreign |= data == _POINT
    odd = odd | any_within(foreign, bounds)
    array, odd = parse(texts, to, odd)
    return _no_negative_zero(texts, array, odd)


def _no_negative_zero(texts: TextColumn, array: pa.Array, odd: Flags) -> tuple[pa.Array, Flags]:
    negative = texts.first() == _MINUS
    words = np.frombuffer(array.buffers()[1], np.int64, 2 * len(array)).reshape(-1, 2)
    odd = odd | negative & (words == 0).all(axis=1)
    return blanked(array, odd), odd


def exact_decimals(texts: TextColumn, to: pa.DataType) -> tuple[pa.Array, Flags]:
    """Cast numbers that the decimal holds exactly, with any number of digits after the point.

    The format is that of numeric_out: no plus, no exponent, no leading zeros.
    """
    flat = texts_of(texts.gather())
    source, starts, ends = flat.source, flat.starts, flat.starts + flat.lengths
    bounds = np.append(starts, ends[-1])
    data = source.data[: ends[-1]]
    points = np.flatnonzero(data == _POINT)
    nth = np.searchsorted(points, bounds)
    point = ends.copy()
    has_point = np.diff(nth) == 1
    point[has_point] = points[nth[:-1][has_point]]
    negative = source.bytes_at(starts) == _MINUS
    first = source.bytes_at(starts + negative) - np.uint8(_ZERO)  # lower bytes wrap around
    whole_digits = point - starts - negative
    odd = (whole_digits < 1) | (first > _NINE) | (first == 0) & (whole_digits > 1)
    odd |= (np.diff(nth) > 1) | (point == ends - 1)
    odd |= whole_digits - (first == 0) > to.precision - to.scale
    foreign = ~_DECIMAL_BYTES[data] | (data == _MINUS)
    foreign[starts[negative & (flat.lengths > 0)]] = False
    odd |= any_within(foreign, bounds)
    end = np.minimum(ends, point + (1 + to.scale if to.scale else 0))
    past = np.flatnonzero((data != _ZERO) & (data != _POINT))
    odd |= np.searchsorted(past, ends) > np.searchsorted(past, end)
    cut = TextColumn(source, starts, end - starts, flat.present)
    array, odd = parse(cut, to, odd)
    return _no_negative_zero(cut, array, odd)
