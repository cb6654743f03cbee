"""From the text of a type's output function to Arrow, exactly.

A value is taken only if its column could give the same text back; any other is refused: null in the
column, its text for `_cdc_raw`. Arrow's kernels are laxer than that (``007``, ``0x1F``, a `T` in a
timestamp, 1e400 as infinity), so what they would take wrongly is found first, all rows at once.
Source of the formats: PostgreSQL documentation, "Data Types", with DateStyle ISO, TimeZone UTC,
bytea_output hex and the shortest-precise output of floats.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from ingestd.decode.nested import lists, structs
from ingestd.decode.texts import Texts, bitmap
from ingestd.schema import TIMESTAMP, TIMESTAMP_NTZ

Mask = NDArray[np.bool_]
Caster = Callable[[Texts, pa.DataType], tuple[pa.Array, Mask | None]]
"""Gives the array and a mask of what it refused (None for nothing); absent values may be in it."""

FIRST_DAY = -719_162
"""0001-01-01 in days since 1970; the year 0000, which Arrow takes, Postgres calls 1 BC."""
FIRST_US = FIRST_DAY * 86_400_000_000
END_US = 253_402_300_800_000_000
"""10000-01-01 in us since 1970."""

_DATE_LENGTH = 10
_SECONDS_LENGTH = 19
_ZONE = int.from_bytes(b"+00", "big")
_HEX_PREFIX = int.from_bytes(b"\\x", "big")
_INT64_DIGITS = 18
_SPECIAL_FLOATS = pa.array([b"0", b"-0", b"NaN", b"Infinity", b"-Infinity"], pa.binary())
_NO_NIBBLE = 255

_nibbles = np.full(256, _NO_NIBBLE, np.uint8)
_nibbles[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
_decimal_bytes = np.zeros(256, np.bool_)
_decimal_bytes[np.frombuffer(b"0123456789.-", np.uint8)] = True


def cast(texts: Texts, to: pa.DataType) -> tuple[pa.Array, NDArray[np.int64]]:
    """Give the values as an array of type `to`, and the rows of those refused (ascending).

    A type that nothing here knows refuses every value: none is lost.
    """
    if len(texts) == 0:
        return pa.array([], to), _NONE
    array, refused = _caster(to)(texts, to)
    if refused is None:
        return array, _NONE
    if texts.present is not None:
        refused = refused & texts.present
    return array, np.flatnonzero(refused)


_NONE: NDArray[np.int64] = np.empty(0, np.int64)


def raw_text(value: bytes) -> str:
    r"""Give a refused value's text for `_cdc_raw`; ``\x`` and hex where it is not UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"\\x{value.hex()}"


def _caster(to: pa.DataType) -> Caster:
    if pa.types.is_list(to):
        return lambda texts, to: lists(texts, to, cast)
    if pa.types.is_struct(to):
        return lambda texts, to: structs(texts, to, cast)
    if pa.types.is_decimal128(to):
        return _short_decimals if to.precision <= _INT64_DIGITS else _long_decimals
    return _CASTERS.get(to, _unknown)


def _unknown(texts: Texts, to: pa.DataType) -> tuple[pa.Array, Mask]:
    return pa.nulls(len(texts), to), np.ones(len(texts), np.bool_)


# --- through Arrow's kernels -----------------------------------------------------------------


def _parse(texts: Texts, to: pa.DataType, odd: Mask) -> tuple[pa.Array, Mask]:
    """Cast all but the odd ones with Arrow; what it refuses is added to the odd."""
    values = texts.without(odd).gather()
    try:
        return values.cast(pa.string()).cast(to), odd
    except pa.ArrowInvalid:
        refused = _refused(values, to)
    odd = odd.copy()
    odd[refused] = True
    return texts.without(odd).gather().cast(pa.string()).cast(to), odd


def _refused(values: pa.BinaryArray, to: pa.DataType) -> list[int]:
    """Find the values that the kernel refuses, by halves: cheap while they are few."""
    found, pending = [], [(0, len(values))]
    while pending:
        start, end = pending.pop()
        try:
            values.slice(start, end - start).cast(pa.string()).cast(to)
        except pa.ArrowInvalid:
            if end - start == 1:
                found.append(start)
            else:
                middle = (start + end) // 2
                pending += [(start, middle), (middle, end)]
    return found


def _blanked(array: pa.Array, odd: Mask) -> pa.Array:
    """Null the odd ones."""
    if not odd.any():
        return array
    return pc.if_else(pa.array(odd), pa.scalar(None, array.type), array)


def _numbers(array: pa.Array, kind: type[np.generic]) -> NDArray[np.generic]:
    """View the values of a fixed-width array; anything where it is null."""
    return np.frombuffer(array.buffers()[1], kind, len(array), array.offset * kind().itemsize)


# --- types -----------------------------------------------------------------------------------


def _strings(texts: Texts, to: pa.DataType) -> tuple[pa.Array, Mask | None]:
    values = texts.gather()
    try:
        return values.cast(to), None
    except pa.ArrowInvalid:  # not UTF-8
        return _parse(texts, to, np.zeros(len(texts), np.bool_))


def _booleans(texts: Texts, _: pa.DataType) -> tuple[pa.Array, Mask]:
    letters = texts.source.bytes_at(texts.starts)
    true = letters == ord("t")
    odd = (texts.lengths != 1) | ~(true | (letters == ord("f")))
    kept = texts.without(odd)
    return pa.BooleanArray.from_buffers(pa.bool_(), len(texts), [kept.validity, bitmap(true)]), odd


def _integers(texts: Texts, to: pa.DataType) -> tuple[pa.Array, Mask]:
    return _parse(texts, to, _odd_sign_or_zero(texts, 0))


def _odd_sign_or_zero(texts: Texts, scale: int) -> Mask:
    """Find leading zeros, and what has no digit before the point. Not ``-0.00``."""
    negative = texts.source.bytes_at(texts.starts) == ord("-")
    zero = texts.source.bytes_at(texts.starts + negative) == ord("0")
    digits = texts.lengths - negative
    odd: Mask
    if scale:
        digits -= scale + 1
        odd = (digits < 1) | zero & (digits > 1)
    else:
        odd = (digits < 1) | zero & ((digits > 1) | negative)
    return odd


def _floats(texts: Texts, to: pa.DataType) -> tuple[pa.Array, Mask]:
    """Take the nearest number: the server's shortest-precise text gives it and it gives the text.

    What rounds to infinity or zero without saying so is refused. Other spellings of the same
    number, which no server sends (``1E5``), are not looked for.
    """
    array, odd = _parse(texts, to, _odd_float(texts))
    numbers = np.asarray(_numbers(array, np.float32 if to == pa.float32() else np.float64), float)
    special = np.flatnonzero(~np.isfinite(numbers) | (numbers == 0))
    if len(special):
        known = pc.is_in(texts[special].gather(), _SPECIAL_FLOATS)
        wrong = special[~known.to_numpy(zero_copy_only=False)]
        odd[wrong] = True
        array = _blanked(array, odd)
    return array, odd


def _odd_float(texts: Texts) -> Mask:
    """Find what begins with a plus, a point or a leading zero, or ends with a point."""
    source, ends = texts.source, texts.starts + texts.lengths
    at = texts.starts + (source.bytes_at(texts.starts) == ord("-"))
    first, second = source.bytes_at(at), source.bytes_at(at + 1)
    odd: Mask = (first == ord("0")) & (second >= ord("0")) & (second <= ord("9"))
    odd &= ends > at + 1
    odd |= (first == ord(".")) | (first == ord("+"))
    odd |= (texts.lengths == 0) | (source.bytes_at(ends - 1) == ord("."))
    return odd


def _dates(texts: Texts, to: pa.DataType) -> tuple[pa.Array, Mask]:
    array, odd = _parse(texts, to, texts.lengths != _DATE_LENGTH)
    odd |= _numbers(array, np.int32).astype(np.int64) < FIRST_DAY
    return _blanked(array, odd), odd


def _timestamps(texts: Texts, to: pa.DataType) -> tuple[pa.Array, Mask]:
    odd = _odd_timestamp(texts)
    array, odd = _parse(texts, to, odd)
    odd |= _numbers(array, np.int64).astype(np.int64) < FIRST_US
    return _blanked(array, odd), odd


def _instants(texts: Texts, to: pa.DataType) -> tuple[pa.Array, Mask]:
    """Timestamps with ``+00``, which Arrow does not take: cut off, the rest is UTC."""
    source, ends = texts.source, texts.starts + texts.lengths
    odd = (texts.lengths <= _SECONDS_LENGTH) | (
        (source.int32_at(np.maximum(ends - 4, 0)) & 0xFFFFFF) != _ZONE
    )
    kept = texts.without(odd)
    lengths = np.maximum(kept.lengths - 3, 0)
    array, odd_rest = _timestamps(Texts(source, kept.starts, lengths, kept.present), TIMESTAMP_NTZ)
    return array.view(to), odd | odd_rest


def _odd_timestamp(texts: Texts) -> Mask:
    """Find what is not ``YYYY-MM-DD HH:MM:SS[.ffffff]``, fraction without trailing zeros."""
    source, lengths = texts.source, texts.lengths
    odd: Mask = (lengths < _SECONDS_LENGTH) | (lengths == _SECONDS_LENGTH + 1)
    odd |= source.bytes_at(texts.starts + _DATE_LENGTH) != ord(" ")
    last = source.bytes_at(texts.starts + lengths - 1)
    odd |= (lengths > _SECONDS_LENGTH) & (last == ord("0"))
    return odd


def _bytes(texts: Texts, _: pa.DataType) -> tuple[pa.Array, Mask]:
    lengths = texts.lengths
    prefix = texts.source.int16_at(texts.starts)
    odd = (lengths < 2) | (lengths % 2 != 0) | (prefix != _HEX_PREFIX)  # noqa: PLR2004
    array, bad = _unhex(texts.without(odd))
    if bad is not None:
        odd |= bad
        array, _ = _unhex(texts.without(odd))
    return array, odd


def _unhex(texts: Texts) -> tuple[pa.Array, Mask | None]:
    """Read pairs of hex digits after the prefix; on a wrong digit also tell the values with one."""
    lengths = np.maximum(texts.lengths - 2, 0)
    digits = Texts(texts.source, texts.starts + 2 * (texts.lengths > 0), lengths).gather()
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    data = digits.buffers()[2] if len(digits) else None
    nibbles = _nibbles[np.frombuffer(data or b"", np.uint8)[: offsets[-1]]]
    bad = None
    if (nibbles == _NO_NIBBLE).any():
        bad = _any_within(nibbles == _NO_NIBBLE, offsets)
    packed = (nibbles[0::2] << 4) | nibbles[1::2]
    bounds = (offsets // 2).astype(np.int32)
    buffers = [texts.validity, pa.py_buffer(bounds), pa.py_buffer(packed)]
    return pa.BinaryArray.from_buffers(pa.binary(), len(texts), buffers), bad


def _any_within(flags: Mask, offsets: NDArray[np.int64]) -> Mask:
    """For each pair of neighbouring offsets, whether any flag between them is set."""
    counts = np.concatenate(([0], np.cumsum(flags)))[offsets]
    return np.diff(counts) > 0


# --- decimals --------------------------------------------------------------------------------


def _odd_decimal(texts: Texts, scale: int) -> Mask:
    """Find what has not exactly `scale` digits after the point, or leading zeros."""
    odd = _odd_sign_or_zero(texts, scale)
    if scale:
        point = texts.starts + texts.lengths - (scale + 1)
        odd |= texts.source.bytes_at(np.maximum(point, 0)) != ord(".")
    return odd


def _short_decimals(texts: Texts, to: pa.DataType) -> tuple[pa.Array, Mask]:
    """Up to 18 digits: read the digits without the point as an integer."""
    odd = _odd_decimal(texts, to.scale)
    kept = texts.without(odd)
    values = kept.gather()
    if to.scale and len(values):
        _, offsets, data = values.buffers()
        bounds = np.frombuffer(offsets, np.int32, len(values) + 1)
        content = data.to_pybytes()[: bounds[-1]] if data is not None else b""
        digits = content.translate(None, b".")
        points = bounds.copy()
        points[0] = 0
        points[1:] = (
            np.arange(1, len(values) + 1) if kept.present is None else np.cumsum(kept.present)
        )
        if len(digits) != len(content) - points[-1]:  # a second point somewhere
            return _long_decimals(texts, to)
        values = pa.BinaryArray.from_buffers(
            pa.binary(),
            len(values),
            [kept.validity, pa.py_buffer(bounds - points), pa.py_buffer(digits)],
        )
    try:
        numbers = values.cast(pa.string()).cast(pa.int64())
    except pa.ArrowInvalid:
        return _long_decimals(texts, to)
    unscaled = _numbers(numbers, np.int64).astype(np.int64)
    if numbers.null_count:
        unscaled = np.where(numbers.is_valid().to_numpy(zero_copy_only=False), unscaled, 0)
    negative = texts.source.bytes_at(texts.starts) == ord("-")
    end = 10**to.precision
    odd = odd | (unscaled >= end) | (unscaled <= -end) | negative & (unscaled == 0)
    wide = np.empty((len(texts), 2), np.int64)
    wide[:, 0] = unscaled
    wide[:, 1] = unscaled >> 63
    buffers = [texts.without(odd).validity, pa.py_buffer(wide)]
    return pa.Array.from_buffers(to, len(texts), buffers), odd


def _long_decimals(texts: Texts, to: pa.DataType) -> tuple[pa.Array, Mask]:
    """Any precision: Arrow's kernel, after what it would take wrongly (exponents) is out."""
    odd = _odd_decimal(texts, to.scale)
    kept = texts.without(odd)
    values = kept.gather()
    if len(values):
        _, offsets, data = values.buffers()
        bounds = np.frombuffer(offsets, np.int32, len(values) + 1)
        content = np.frombuffer(data or b"", np.uint8)[: bounds[-1]]
        foreign = ~_decimal_bytes[content]
        if not to.scale:
            foreign |= content == ord(".")
        odd = odd | _any_within(foreign, bounds.astype(np.int64))
    array, odd = _parse(texts, to, odd)
    negative = texts.source.bytes_at(texts.starts) == ord("-")
    words = np.frombuffer(array.buffers()[1], np.int64, 2 * len(array)).reshape(-1, 2)
    odd = odd | negative & (words == 0).all(axis=1)
    return _blanked(array, odd), odd


_CASTERS: dict[pa.DataType, Caster] = {
    pa.string(): _strings,
    pa.binary(): _bytes,
    pa.bool_(): _booleans,
    pa.int8(): _integers,
    pa.int16(): _integers,
    pa.int32(): _integers,
    pa.int64(): _integers,
    pa.float32(): _floats,
    pa.float64(): _floats,
    pa.date32(): _dates,
    TIMESTAMP_NTZ: _timestamps,
    TIMESTAMP: _instants,
}
